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

use crate::backend::{Backend, View};
use crate::error::{Result, check_len, ensure};
use crate::scalar::Element;

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
    /// Numbers from one token's queries to the next one's.
    pub query_stride: usize,
}

impl AttentionShape {
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
            format!("rows of {query_stride} numbers cannot hold {heads} heads of {head_dim}")
        })?;
        check_len(operator, "out", out, self.tokens() * heads * head_dim)?;
        check_len(operator, "log_sum_exp", log_sum_exp, self.tokens() * heads)
    }

    fn check_queries(&self, operator: &'static str, queries: usize) -> Result<()> {
        let rows = self.tokens();
        let width = self.heads * self.head_dim;
        let needed = if rows == 0 { 0 } else { (rows - 1) * self.query_stride + width };
        ensure(operator, queries >= needed, || {
            format!("queries hold {queries} numbers, expected {needed}")
        })
    }

    /// Keys and values in rows `row_stride` apart.
    fn check_contiguous(
        &self,
        operator: &'static str,
        keys: usize,
        values: usize,
        row_stride: usize,
    ) -> Result<()> {
        let (rows, width) = (self.batch * self.key_length, self.kv_heads * self.head_dim);
        let needed = if rows == 0 { 0 } else { (rows - 1) * row_stride + width };
        ensure(operator, keys >= needed && values >= needed, || {
            format!("{keys} keys and {values} values, expected {needed}")
        })
    }

    fn check_backward(&self, lens: &BackwardLens) -> Result<()> {
        const OPERATOR: &str = "attention_backward";
        let &AttentionShape { heads, kv_heads, head_dim, query_stride, .. } = self;
        self.check(OPERATOR, lens.out, lens.log_sum_exp)?;
        check_len(OPERATOR, "d_out", lens.d_out, lens.out)?;
        check_len(OPERATOR, "qkv", lens.qkv, self.tokens() * query_stride)?;
        check_len(OPERATOR, "d_qkv", lens.d_qkv, lens.qkv)?;
        ensure(OPERATOR, query_stride == (heads + 2 * kv_heads) * head_dim, || {
            format!("rows of {query_stride} numbers are not packed queries, keys and values")
        })?;
        ensure(OPERATOR, self.key_length == self.query_length, || {
            format!("{} queries of {} keys", self.query_length, self.key_length)
        })?;
        lens.delta
            .map_or(Ok(()), |delta| check_len(OPERATOR, "delta", delta, self.tokens() * heads))
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

/// Where keys and values lie.
pub enum KeyValues<'a, B: Backend, T: Element> {
    /// Row r, of token r of all sequences in order, starts at number `r * row_stride`.
    Contiguous {
        /// Keys; G x D numbers a row.
        keys: View<'a, B, T>,
        /// Values; G x D numbers a row.
        values: View<'a, B, T>,
        /// Numbers from one row to the next.
        row_stride: usize,
    },
    /// Rows of `block_length` tokens in blocks; token p of sequence b is row `p % block_length` of
    /// block `block_table[b][p / block_length]`.
    Paged {
        /// Keys, `[blocks, block_length, G * D]`.
        keys: View<'a, B, T>,
        /// Values, `[blocks, block_length, G * D]`.
        values: View<'a, B, T>,
        /// Block numbers, `[B, ceil(key_length / block_length)]`.
        block_table: View<'a, B, u32>,
        /// Tokens of a block.
        block_length: usize,
    },
}

impl<B: Backend, T: Element> Clone for KeyValues<'_, B, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend, T: Element> Copy for KeyValues<'_, B, T> {}

/// Which keys a query sees: from `first_key` of its token to, when causal, its own position.
pub struct Visibility<'a, B: Backend> {
    /// Whether query t sees only keys up to position `query_offset + t`.
    pub causal: bool,
    /// Position of the first query among the keys.
    pub query_offset: usize,
    /// First visible key of each query, `[B*T]`, never decreasing within a sequence and at or
    /// before the query itself: the start of its document.
    pub first_key: Option<View<'a, B, u32>>,
}

impl<B: Backend> Clone for Visibility<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Visibility<'_, B> {}
