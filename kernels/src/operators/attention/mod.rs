//! Attention over the heads that a token selected, grouped-query, with the softmax of scaled
//! scores: O = softmax(f q k^T / sqrt(D)) v, with a factor f that is 1 for most models.
//!
//! For each key/value head the selected (token, query head) rows are packed in token order, so
//! work is proportional to the number of selected rows. In dense attention every row is
//! selected. Keys and values exist for every token.
//!
//! Backward, with P the probabilities, dP = dO v^T and delta = sum(P dP) = `<dO, O>`:
//! dS = P (dP - delta), dq = f dS k / sqrt(D), dk = f dS^T q / sqrt(D), dv = P^T dO.

pub(crate) mod cpu;
#[cfg(gpu)]
pub(crate) mod cuda;
mod sequences;

use crate::memory::copy_views;
use crate::{Element, Memory, QkvShape, Result, View, ViewMut, check_len, ensure};
pub use sequences::{SequenceAttention, Span};

/// Shape of an attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// Sequences, B.
    pub batch: usize,
    /// Queries of each sequence, T.
    pub query_length: usize,
    /// Keys of each sequence.
    pub key_length: usize,
    /// Query heads, H.
    pub heads: usize,
    /// Key/value heads, G; divides H.
    pub kv_heads: usize,
    /// Width of a head, D.
    pub head_dim: usize,
    /// Elements from one token's queries to the next token's.
    pub query_stride: usize,
}

impl AttentionShape {
    /// Returns the shape of queries and `key_length` keys of each sequence, in rows of packed queries, keys and
    /// values.
    pub fn of_qkv(qkv: &QkvShape, key_length: usize) -> Self {
        AttentionShape {
            batch: qkv.batch,
            query_length: qkv.length,
            key_length,
            heads: qkv.heads,
            kv_heads: qkv.kv_heads,
            head_dim: qkv.head_dim,
            query_stride: qkv.row(),
        }
    }

    /// Returns the number of query heads that share one key/value head.
    pub fn group_size(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Returns the number of all queries, N.
    pub fn tokens(&self) -> usize {
        self.batch * self.query_length
    }

    fn check(&self, operator: &'static str, out: usize, log_sum_exp: usize) -> Result<()> {
        let &AttentionShape { heads, kv_heads, head_dim, query_stride, .. } = self;
        ensure(operator, kv_heads > 0 && heads > 0 && heads.is_multiple_of(kv_heads), || {
            format!("{heads} query heads do not divide into {kv_heads} key/value heads")
        })?;
        ensure(operator, head_dim > 0 && query_stride >= heads * head_dim, || {
            format!("rows of {query_stride} elements cannot hold {heads} heads of {head_dim}")
        })?;
        check_len(operator, "out", out, self.tokens() * heads * head_dim)?;
        check_len(operator, "log_sum_exp", log_sum_exp, self.tokens() * heads)
    }

    /// Returns the elements from the first to the last of `rows` rows of `width` elements, `stride` apart.
    fn extent(rows: usize, stride: usize, width: usize) -> usize {
        rows.checked_sub(1).map_or(0, |before| before * stride + width)
    }
}

/// The location of keys and values.
pub enum KeyValues<'a, M: Memory, T: Element> {
    /// Row r, of token r of all sequences in order, starts at element `r * row_stride`.
    Contiguous {
        /// Keys; G x D elements a row.
        keys: View<'a, M, T>,
        /// Values; G x D elements a row.
        values: View<'a, M, T>,
        /// Elements from one row to the next.
        row_stride: usize,
    },
    /// Blocks of `block_length` tokens by head, so that a head's rows are contiguous: token p of sequence b is
    /// row `p % block_length` of each head of block `block_table[b][p / block_length]`.
    Paged {
        /// Keys, `[blocks, G, block_length, D]`.
        keys: View<'a, M, T>,
        /// Values, `[blocks, G, block_length, D]`.
        values: View<'a, M, T>,
        /// Indices of blocks, `[B, ceil(key_length / block_length)]`.
        block_table: View<'a, M, u32>,
        /// Tokens of a block.
        block_length: usize,
    },
}

impl<M: Memory, T: Element> KeyValues<'_, M, T> {
    /// Checks the lengths. `blocks` is the number of blocks that the table's entries refer to; `None` if the host
    /// cannot read the table. With `None`, the keys and values must fit the blocks of one sequence, which are all
    /// different.
    fn check(
        &self,
        operator: &'static str,
        shape: &AttentionShape,
        blocks: Option<usize>,
    ) -> Result<()> {
        let width = shape.kv_heads * shape.head_dim;
        let (keys, values, needed) = match *self {
            KeyValues::Contiguous { keys, values, row_stride } => {
                let rows = shape.batch * shape.key_length;
                (keys, values, AttentionShape::extent(rows, row_stride, width))
            }
            KeyValues::Paged { keys, values, block_table, block_length } => {
                ensure(operator, block_length > 0, || "blocks of no token".into())?;
                let of_sequence = shape.key_length.div_ceil(block_length);
                let table = M::view_len::<u32>(block_table);
                check_len(operator, "block_table", table, shape.batch * of_sequence)?;
                (keys, values, blocks.unwrap_or(of_sequence) * block_length * width)
            }
        };
        let (keys, values) = (M::view_len::<T>(keys), M::view_len::<T>(values));
        ensure(operator, keys >= needed && values >= needed, || {
            format!("{keys} keys and {values} values, expected {needed}")
        })
    }
}

copy_views!(KeyValues<M: Memory, T: Element>, Selection<M: Memory>, AttentionArgs<M: Memory>);

/// The heads that each token computes: the result of a router.
pub struct Selection<'a, M: Memory> {
    /// The first local heads, which every token computes.
    pub shared_heads: usize,
    /// Nonzero if a token selected a head after the shared heads; `[B*T, H - shared_heads]`.
    pub routed: View<'a, M, u8>,
    /// Factors of the heads' outputs, `[B*T, H]`; 1 if `None`.
    pub weights: Option<View<'a, M, f32>>,
}

/// Arguments of both the forward and the backward pass of attention.
pub struct AttentionArgs<'a, M: Memory> {
    /// Shape.
    pub shape: AttentionShape,
    /// Whether query t sees only keys up to position `query_offset + t`.
    pub causal: bool,
    /// Position of the first query among the keys.
    pub query_offset: usize,
    /// First visible key of each query, the start of its document, `[B*T]`: non-decreasing within a
    /// sequence, and not after the query itself. If `None`, keys are visible from the first key on.
    pub document_start: Option<View<'a, M, u32>>,
    /// The heads that each token computes; all if `None`.
    pub selection: Option<Selection<'a, M>>,
    /// The factor of the scores in addition to 1 / sqrt(D).
    pub score_factor: f32,
}

impl<M: Memory> AttentionArgs<'_, M> {
    /// Returns arguments of causal attention over whole sequences, with all heads computed.
    pub fn causal(shape: AttentionShape) -> Self {
        AttentionArgs {
            shape,
            causal: true,
            query_offset: 0,
            document_start: None,
            selection: None,
            score_factor: 1.0,
        }
    }

    /// Returns the factor of the products of queries and keys.
    fn scale(&self) -> f32 {
        self.score_factor * (self.shape.head_dim as f32).sqrt().recip()
    }

    fn check(&self, operator: &'static str) -> Result<()> {
        let (tokens, heads) = (self.shape.tokens(), self.shape.heads);
        if let Some(Selection { shared_heads: shared, routed, weights }) = self.selection {
            ensure(operator, shared <= heads, || format!("{shared} shared heads of {heads}"))?;
            let routed = M::view_len::<u8>(routed);
            check_len(operator, "the selection", routed, tokens * (heads - shared))?;
            if let Some(weights) = weights {
                check_len(operator, "weights", M::view_len::<f32>(weights), tokens * heads)?;
            }
        }
        if let Some(starts) = self.document_start {
            check_len(operator, "document_start", M::view_len::<u32>(starts), tokens)?;
        }
        let end = self.query_offset.saturating_add(self.shape.query_length);
        ensure(operator, !self.causal || end <= self.shape.key_length, || {
            format!("queries up to position {end} of {} keys", self.shape.key_length)
        })
    }
}

/// Arguments of [`Attention::attention_forward`].
pub struct AttentionForward<'a, M: Memory, T: Element> {
    /// Shape, visibility and selection.
    pub args: AttentionArgs<'a, M>,
    /// `[B*T, query_stride]` with the query heads first in each row.
    pub queries: View<'a, M, T>,
    /// Keys and values.
    pub key_values: KeyValues<'a, M, T>,
    /// Overwritten; `[B*T, H D]`.
    pub out: ViewMut<'a, M, T>,
    /// Overwritten with the natural logarithm of the sum of exponentials of the scaled scores;
    /// `[B*T, H]`.
    pub log_sum_exp: ViewMut<'a, M, f32>,
}

impl<M: Memory, T: Element> AttentionForward<'_, M, T> {
    /// Checks the lengths. [`KeyValues::check`] explains `blocks`.
    fn check(&self, blocks: Option<usize>) -> Result<()> {
        const OPERATOR: &str = "attention_forward";
        let AttentionForward { args, queries, key_values, out, log_sum_exp } = self;
        let shape = &args.shape;
        shape.check(OPERATOR, M::view_mut_len::<T>(out), M::view_mut_len::<f32>(log_sum_exp))?;
        args.check(OPERATOR)?;
        key_values.check(OPERATOR, shape, blocks)?;
        let width = shape.heads * shape.head_dim;
        let needed = AttentionShape::extent(shape.tokens(), shape.query_stride, width);
        let queries = M::view_len::<T>(*queries);
        ensure(OPERATOR, queries >= needed, || {
            format!("queries hold {queries} elements, expected {needed}")
        })
    }
}

/// Arguments of [`Attention::attention_backward`].
pub struct AttentionBackward<'a, M: Memory, T: Element> {
    /// Shape, visibility and selection, as in the forward pass.
    pub args: AttentionArgs<'a, M>,
    /// Rotated queries and keys, and values; `[B*T, (H + 2G) D]`.
    pub qkv: View<'a, M, T>,
    /// The output of the forward pass.
    pub out: View<'a, M, T>,
    /// The log-sum-exp of the forward pass.
    pub log_sum_exp: View<'a, M, f32>,
    /// `[B*T, H D]`.
    pub d_out: View<'a, M, T>,
    /// Overwritten. Rows of queries that were not selected are set to zero.
    pub d_qkv: ViewMut<'a, M, T>,
    /// Overwritten with `<d_out, O>`, O the head's output before its weight; 0 if not selected;
    /// `[B*T, H]`.
    pub delta: Option<ViewMut<'a, M, f32>>,
}

impl<M: Memory, T: Element> AttentionBackward<'_, M, T> {
    fn check(&self) -> Result<()> {
        const OPERATOR: &str = "attention_backward";
        let (shape, out) = (&self.args.shape, M::view_len::<T>(self.out));
        let &AttentionShape { query_length, key_length, heads, kv_heads, head_dim, .. } = shape;
        let (row, pairs) = (shape.query_stride, shape.tokens() * heads);
        shape.check(OPERATOR, out, M::view_len::<f32>(self.log_sum_exp))?;
        check_len(OPERATOR, "d_out", M::view_len::<T>(self.d_out), out)?;
        check_len(OPERATOR, "qkv", M::view_len::<T>(self.qkv), shape.tokens() * row)?;
        check_len(OPERATOR, "d_qkv", M::view_mut_len::<T>(&self.d_qkv), shape.tokens() * row)?;
        ensure(OPERATOR, row == (heads + 2 * kv_heads) * head_dim, || {
            format!("rows of {row} elements are not packed queries, keys and values")
        })?;
        ensure(OPERATOR, key_length == query_length, || {
            format!(
                "{query_length} queries but {key_length} keys: the backward pass requires equal lengths"
            )
        })?;
        if let Some(delta) = &self.delta {
            check_len(OPERATOR, "delta", M::view_mut_len::<f32>(delta), pairs)?;
        }
        self.args.check(OPERATOR)
    }
}

/// Attention as an operator of a device.
pub trait Attention: Memory {
    /// Returns the name of the path of the last attention, forward or backward, on a device with
    /// several paths; `None` before the first attention.
    fn last_path(&self) -> Option<&'static str> {
        None
    }

    /// Computes attention of the selected (token, head) pairs. The rows of other pairs are set to zero.
    fn attention_forward<T: Element>(&self, forward: AttentionForward<'_, Self, T>) -> Result<()>;

    /// Computes causal attention of the selected (token, head) pairs of sequences of different lengths; the rows of
    /// other pairs are set to zero.
    fn attention_of_sequences<T: Element>(
        &self,
        args: SequenceAttention<'_, Self, T>,
    ) -> Result<()>;

    /// Computes the gradient of [`Attention::attention_forward`] over the packed `qkv` of a training step.
    fn attention_backward<T: Element>(
        &self,
        backward: AttentionBackward<'_, Self, T>,
    ) -> Result<()>;
}
