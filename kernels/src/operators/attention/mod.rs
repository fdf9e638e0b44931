//! Attention over the heads that a token selected, grouped-query, with the softmax of scaled
//! scores: O = softmax(q k^T / sqrt(D)) v.
//!
//! For each key/value head the selected (token, query head) rows are packed in token order, so
//! work is proportional to the number of selected rows; dense attention is the case in which
//! every row is selected. Keys and values exist for every token.
//!
//! Backward, with P the probabilities, dP = dO v^T and delta = sum(P dP) = `<dO, O>`:
//! dS = P (dP - delta), dq = dS k / sqrt(D), dk = dS^T q / sqrt(D), dv = P^T dO.

pub(crate) mod cpu;
#[cfg(gpu)]
pub(crate) mod cuda;
mod sequences;

use crate::error::{Result, check_len, ensure};
use crate::memory::{Memory, View, ViewMut};
use crate::rope::QkvShape;
use crate::scalar::Element;
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
    /// Elements from one token's queries to the next one's.
    pub query_stride: usize,
}

impl AttentionShape {
    /// Queries and `key_length` keys of each sequence, in rows of packed queries, keys and values.
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

    /// Query heads that share one key/value head.
    pub fn group_size(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Queries in all, N.
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

    fn check_queries(&self, operator: &'static str, queries: usize) -> Result<()> {
        let rows = self.tokens();
        let width = self.heads * self.head_dim;
        let needed = if rows == 0 { 0 } else { (rows - 1) * self.query_stride + width };
        ensure(operator, queries >= needed, || {
            format!("queries hold {queries} elements, expected {needed}")
        })
    }

    /// Keys and values in rows `row_stride` apart.
    fn check_contiguous(
        &self,
        operator: &'static str,
        lens: KeyValueLens,
        row_stride: usize,
    ) -> Result<()> {
        let (rows, width) = (self.batch * self.key_length, self.kv_heads * self.head_dim);
        let needed = if rows == 0 { 0 } else { (rows - 1) * row_stride + width };
        lens.check(operator, needed)
    }

    /// Checks keys and values by block table. `blocks` is the number of blocks that the table's
    /// entries refer to, if the host can read them; else that of the longest sequence, which has none
    /// twice.
    fn check_paged(
        &self,
        operator: &'static str,
        lens: KeyValueLens,
        table: usize,
        block_length: usize,
        blocks: Option<usize>,
    ) -> Result<()> {
        ensure(operator, block_length > 0, || "blocks of no token".into())?;
        let of_sequence = self.key_length.div_ceil(block_length);
        check_len(operator, "block_table", table, self.batch * of_sequence)?;
        let rows = blocks.unwrap_or(of_sequence) * block_length;
        lens.check(operator, rows * self.kv_heads * self.head_dim)
    }

    fn check_backward(&self, lens: &BackwardLens) -> Result<()> {
        const OPERATOR: &str = "attention_backward";
        let &AttentionShape { heads, kv_heads, head_dim, query_stride, .. } = self;
        self.check(OPERATOR, lens.out, lens.log_sum_exp)?;
        check_len(OPERATOR, "d_out", lens.d_out, lens.out)?;
        check_len(OPERATOR, "qkv", lens.qkv, self.tokens() * query_stride)?;
        check_len(OPERATOR, "d_qkv", lens.d_qkv, lens.qkv)?;
        ensure(OPERATOR, query_stride == (heads + 2 * kv_heads) * head_dim, || {
            format!("rows of {query_stride} elements are not packed queries, keys and values")
        })?;
        ensure(OPERATOR, self.key_length == self.query_length, || {
            let (queries, keys) = (self.query_length, self.key_length);
            format!("{queries} queries but {keys} keys: the backward pass requires equal lengths")
        })?;
        lens.delta
            .map_or(Ok(()), |delta| check_len(OPERATOR, "delta", delta, self.tokens() * heads))
    }
}

/// Lengths of the buffers of keys and values.
struct KeyValueLens {
    keys: usize,
    values: usize,
}

impl KeyValueLens {
    fn check(&self, operator: &'static str, needed: usize) -> Result<()> {
        let KeyValueLens { keys, values } = *self;
        ensure(operator, keys >= needed && values >= needed, || {
            format!("{keys} keys and {values} values, expected {needed}")
        })
    }
}

/// Lengths of the buffers of a backward pass.
struct BackwardLens {
    qkv: usize,
    out: usize,
    log_sum_exp: usize,
    d_out: usize,
    d_qkv: usize,
    delta: Option<usize>,
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
    /// Blocks of `block_length` tokens by head, so that a head's rows are one after another: token p of sequence b is
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

impl<M: Memory, T: Element> Clone for KeyValues<'_, M, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M: Memory, T: Element> Copy for KeyValues<'_, M, T> {}

/// The heads that each token computes: the result of a router.
pub struct Selection<'a, M: Memory> {
    /// The first local heads, which every token computes.
    pub shared_heads: usize,
    /// Not 0 where a token selected one of the other heads; `[B*T, H - shared_heads]`.
    pub routed: View<'a, M, u8>,
    /// Factors of the heads' outputs, `[B*T, H]`; 1 if `None`.
    pub weights: Option<View<'a, M, f32>>,
}

impl<M: Memory> Clone for Selection<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M: Memory> Copy for Selection<'_, M> {}

/// Arguments of both the forward and the backward pass of attention.
pub struct AttentionArgs<'a, M: Memory> {
    /// Shape.
    pub shape: AttentionShape,
    /// Whether query t sees only keys up to position `query_offset + t`.
    pub causal: bool,
    /// Position of the first query among the keys.
    pub query_offset: usize,
    /// First visible key of each query, the start of its document, `[B*T]`: non-decreasing within a
    /// sequence, and not after the query itself. If `None`, keys are visible from the first one.
    pub document_start: Option<View<'a, M, u32>>,
    /// The heads that each token computes; all if `None`.
    pub selection: Option<Selection<'a, M>>,
}

impl<M: Memory> Clone for AttentionArgs<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M: Memory> Copy for AttentionArgs<'_, M> {}

impl<M: Memory> AttentionArgs<'_, M> {
    /// Causal attention of whole sequences, all heads computed.
    pub fn causal(shape: AttentionShape) -> Self {
        AttentionArgs {
            shape,
            causal: true,
            query_offset: 0,
            document_start: None,
            selection: None,
        }
    }

    /// The factor of the scores, 1 / sqrt(D).
    fn scale(&self) -> f32 {
        (self.shape.head_dim as f32).sqrt().recip()
    }

    fn check(&self, operator: &'static str, lens: &SelectionLens) -> Result<()> {
        let (tokens, heads) = (self.shape.tokens(), self.shape.heads);
        if let Some(selection) = &self.selection {
            let shared = selection.shared_heads;
            ensure(operator, shared <= heads, || format!("{shared} shared heads of {heads}"))?;
            check_len(operator, "the selection", lens.routed, tokens * (heads - shared))?;
        }
        if let Some(weights) = lens.weights {
            check_len(operator, "weights", weights, tokens * heads)?;
        }
        if let Some(document_start) = lens.document_start {
            check_len(operator, "document_start", document_start, tokens)?;
        }
        let end = self.query_offset.saturating_add(self.shape.query_length);
        ensure(operator, !self.causal || end <= self.shape.key_length, || {
            format!("queries up to position {end} of {} keys", self.shape.key_length)
        })
    }
}

/// Lengths of the views of [`AttentionArgs`].
struct SelectionLens {
    routed: usize,
    weights: Option<usize>,
    document_start: Option<usize>,
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

/// Arguments of [`Attention::attention_backward`].
pub struct AttentionBackward<'a, M: Memory, T: Element> {
    /// As in the forward pass.
    pub args: AttentionArgs<'a, M>,
    /// Rotated queries and keys, and values; `[B*T, (H + 2G) D]`.
    pub qkv: View<'a, M, T>,
    /// The output of the forward pass.
    pub out: View<'a, M, T>,
    /// The log-sum-exp of the forward pass.
    pub log_sum_exp: View<'a, M, f32>,
    /// `[B*T, H D]`.
    pub d_out: View<'a, M, T>,
    /// Overwritten; rows of queries that were not selected are set to zero.
    pub d_qkv: ViewMut<'a, M, T>,
    /// Overwritten with `<d_out, O>`, O the head's output before its weight; 0 where not selected;
    /// `[B*T, H]`.
    pub delta: Option<ViewMut<'a, M, f32>>,
}

/// Attention as an operator of a device.
pub trait Attention: Memory {
    /// The name of the path of the last attention, forward or backward, on a device that has
    /// several; `None` before the first.
    fn last_path(&self) -> Option<&'static str> {
        None
    }

    /// Attention of the selected (token, head) pairs; the rows of the others are set to zero.
    fn attention_forward<T: Element>(&self, forward: AttentionForward<'_, Self, T>) -> Result<()>;

    /// Causal attention of the selected (token, head) pairs of sequences of different lengths; the rows of
    /// the others are set to zero.
    fn attention_of_sequences<T: Element>(
        &self,
        args: SequenceAttention<'_, Self, T>,
    ) -> Result<()>;

    /// Gradient of [`Attention::attention_forward`] over the packed `qkv` of a training step.
    fn attention_backward<T: Element>(
        &self,
        backward: AttentionBackward<'_, Self, T>,
    ) -> Result<()>;
}
