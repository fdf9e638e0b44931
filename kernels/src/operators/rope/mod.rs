//! Rotary position embedding (Su et al., arXiv 2104.09864) in the half-split form of Hugging
//! Face's Llama: the pair of elements (i, i + D/2) is rotated by position x frequency i.

pub(crate) mod cpu;
#[cfg(gpu)]
pub(crate) mod cuda;

use crate::memory::copy_views;
use crate::{Element, Memory, Result, View, ViewMut, check_len, ensure};

/// Shape of the packed queries, keys and values of a micro-batch: `[B*T, (H + 2G) * D]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QkvShape {
    /// Sequences, B.
    pub batch: usize,
    /// Tokens of each sequence, T.
    pub length: usize,
    /// Query heads, H.
    pub heads: usize,
    /// Key/value heads, G.
    pub kv_heads: usize,
    /// Width of a head, D: even.
    pub head_dim: usize,
}

impl QkvShape {
    /// Returns the tokens of all sequences, N.
    pub fn tokens(&self) -> usize {
        self.batch * self.length
    }

    /// Returns the elements of one token's queries, keys and values.
    pub fn row(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Rejects shapes that attention does not support.
    pub(crate) fn check(&self, operator: &'static str) -> Result<()> {
        let &QkvShape { heads, kv_heads, head_dim, .. } = self;
        ensure(operator, kv_heads > 0 && heads > 0 && heads.is_multiple_of(kv_heads), || {
            format!("{heads} query heads do not divide into {kv_heads} key/value heads")
        })?;
        ensure(operator, head_dim > 0 && head_dim.is_multiple_of(2), || {
            format!("head_dim {head_dim} is not even")
        })
    }

    /// Returns the number of query heads that share one key/value head.
    pub fn group_size(&self) -> usize {
        self.heads / self.kv_heads
    }
}

/// Cosines and sines of the tokens' positions.
pub struct RopeTable<'a, M: Memory> {
    /// Cosines of every position, `[positions, D/2]`.
    pub cos: View<'a, M, f32>,
    /// Sines of every position, `[positions, D/2]`.
    pub sin: View<'a, M, f32>,
    /// Position of the first token of each sequence.
    pub first_position: usize,
}

copy_views!(RopeTable<M: Memory>);

/// Arguments of [`Rope`].
pub struct RopeArgs<'a, M: Memory, T: Element> {
    /// Shape of `qkv`.
    pub shape: &'a QkvShape,
    /// Covers the positions of all tokens.
    pub table: RopeTable<'a, M>,
    /// Queries, keys and values of a token side by side, or their gradients; `[B*T, (H + 2G) D]`.
    pub qkv: ViewMut<'a, M, T>,
}

/// Rotary position embedding as an operator of a device.
pub trait Rope: Memory {
    /// Rotates queries and keys in place. Token t of a sequence is at position `first_position + t`.
    fn rope_forward<T: Element>(&self, args: RopeArgs<'_, Self, T>) -> Result<()>;

    /// Replaces the gradients of rotated queries and keys by the gradients before the rotation.
    fn rope_backward<T: Element>(&self, args: RopeArgs<'_, Self, T>) -> Result<()>;
}

/// Checks a shape, the length of its `qkv`, and that the table's cosines and sines cover it.
fn check(
    operator: &'static str,
    shape: &QkvShape,
    first_position: usize,
    [qkv, cos, sin]: [usize; 3],
) -> Result<()> {
    shape.check(operator)?;
    check_len(operator, "qkv", qkv, shape.tokens() * shape.row())?;
    let end = first_position.saturating_add(shape.length);
    let needed = end.saturating_mul(shape.head_dim / 2);
    ensure(operator, cos >= needed && sin == cos, || {
        format!(
            "the table holds {cos} cosines and {sin} sines, expected {needed} for {end} positions"
        )
    })
}
