//! Rotary position embedding (Su et al., arXiv 2104.09864) in the half-split form of Hugging
//! Face's Llama: the pair of numbers (i, i + D/2) turns by position x frequency i.
//!
//! One pass over the queries and keys of a token rotates them and, for a Mixture-of-Head block,
//! routes the queries before it does ([`crate::router`]).

pub(crate) mod cpu;
#[cfg(gpu)]
pub(crate) mod cuda;

use crate::backend::{Backend, View};
use crate::error::{Result, check_len, ensure};

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
    /// Tokens in all, N.
    pub fn tokens(&self) -> usize {
        self.batch * self.length
    }

    /// Numbers of one token's queries, keys and values.
    pub fn row(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Refuses shapes that no attention has.
    pub(crate) fn check(&self, operator: &'static str) -> Result<()> {
        let &QkvShape { heads, kv_heads, head_dim, .. } = self;
        ensure(operator, kv_heads > 0 && heads > 0 && heads.is_multiple_of(kv_heads), || {
            format!("{heads} query heads do not divide into {kv_heads} key/value heads")
        })?;
        ensure(operator, head_dim > 0 && head_dim.is_multiple_of(2), || {
            format!("head_dim {head_dim} is not even")
        })
    }

    /// Query heads that share one key/value head.
    pub fn group_size(&self) -> usize {
        self.heads / self.kv_heads
    }
}

/// Cosines and sines of every position, `[positions, D/2]` each.
pub struct RopeTable<'a, B: Backend> {
    /// Cosines.
    pub cos: View<'a, B, f32>,
    /// Sines.
    pub sin: View<'a, B, f32>,
}

impl<B: Backend> Clone for RopeTable<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for RopeTable<'_, B> {}

/// Checks a shape, the length of its `qkv`, and that the table's cosines and sines cover it.
fn check(
    operator: &'static str,
    shape: &QkvShape,
    [cos, sin]: [usize; 2],
    first_position: usize,
    qkv: usize,
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
