//! Attention of sequences of different lengths, as in generation: each sequence has some new tokens, and keys and
//! values in blocks of one pool.

use std::ops::Range;

use super::{AttentionArgs, AttentionShape, Selection};
#[cfg(gpu)]
use super::{AttentionForward, KeyValues};
use crate::{Element, Memory, QkvShape, Result, View, ViewMut, check_len, ensure};

/// The new tokens of a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// The rows of these tokens in the pass; they follow the rows of the previous sequence.
    pub rows: Range<usize>,
    /// Position of the first new token in the sequence: the number of tokens already in the cache.
    pub position: usize,
    /// The first entry of the sequence's blocks in the block table.
    pub first_block: usize,
    /// Whether the tokens belong to a prompt. The results of a prompt's tokens have the same bits for any
    /// division of the prompt into passes. A generated token is alone in its span. Its result may differ
    /// from the result of the same token in a prompt.
    pub is_prompt: bool,
}

impl Span {
    /// Returns the row, the position and the first block of each sequence with a generated token.
    pub fn generated(spans: &[Span]) -> Vec<u32> {
        // The numbers of rows and blocks of a pass fit 32 bits.
        let numbers =
            |span: &Span| [span.rows.start as u32, span.position as u32, span.first_block as u32];
        spans.iter().filter(|span| !span.is_prompt).flat_map(numbers).collect()
    }
}

/// Arguments of [`super::Attention::attention_of_sequences`].
pub struct SequenceAttention<'a, M: Memory, T: Element> {
    /// Shape of `qkv`, with all tokens of the pass as one sequence.
    pub shape: &'a QkvShape,
    /// The sequences in order; together they have all tokens of the pass.
    pub sequences: &'a [Span],
    /// The heads that each token computes; all if `None`.
    pub selection: Option<Selection<'a, M>>,
    /// The factor of the scores in addition to 1 / sqrt(D).
    pub score_factor: f32,
    /// Rotated queries, keys and values of the new tokens; `[N, (H + 2G) D]`.
    pub qkv: View<'a, M, T>,
    /// Keys, also of the new tokens, `[blocks, G, block_length, D]`.
    pub keys: View<'a, M, T>,
    /// Values, `[blocks, G, block_length, D]`.
    pub values: View<'a, M, T>,
    /// Indices of the sequences' blocks.
    pub block_table: View<'a, M, u32>,
    /// The GPU's table of sequences with a generated token ([`Span::generated`]), `[generated, 3]`.
    pub generated: View<'a, M, u32>,
    /// Tokens of a block.
    pub block_length: usize,
    /// Overwritten; `[N, H D]`.
    pub out: ViewMut<'a, M, T>,
    /// Overwritten with the logarithms of the sums of exponentials; `[N, H]`.
    pub log_sum_exp: ViewMut<'a, M, f32>,
}

/// Returns the shape of attention of a sequence's new tokens over these tokens and all earlier tokens.
pub(super) fn shape_of(shape: &QkvShape, span: &Span) -> AttentionShape {
    let key_length = span.position + span.rows.len();
    let one = QkvShape { batch: 1, length: span.rows.len(), ..*shape };
    AttentionShape::of_qkv(&one, key_length)
}

/// Returns the range of a sequence's blocks in the table.
pub(super) fn blocks_of(span: &Span, block_length: usize) -> Range<usize> {
    let end = span.position + span.rows.len();
    span.first_block..span.first_block + end.div_ceil(block_length)
}

/// Returns the arguments of causal attention for one sequence: `span` selects its new tokens among the tokens of the pass.
pub(super) fn args_of<'v, 'a: 'v, M: Memory>(
    shape: &QkvShape,
    selection: Option<Selection<'a, M>>,
    score_factor: f32,
    span: &Span,
) -> AttentionArgs<'v, M> {
    let part = |width: usize| span.rows.start * width..span.rows.end * width;
    let of_span = |Selection { shared_heads, routed, weights }: Selection<'a, M>| Selection {
        shared_heads,
        routed: M::part(routed, part(shape.heads - shared_heads)),
        weights: weights.map(|weights| M::part(weights, part(shape.heads))),
    };
    AttentionArgs {
        query_offset: span.position,
        selection: selection.map(of_span),
        score_factor,
        ..AttentionArgs::causal(shape_of(shape, span))
    }
}

impl<M: Memory, T: Element> SequenceAttention<'_, M, T> {
    /// Checks the requirements of all devices.
    pub(super) fn check(&self) -> Result<()> {
        const OPERATOR: &str = "attention_of_sequences";
        let &SequenceAttention { shape, sequences, selection, block_length, .. } = self;
        let (tokens, pairs) = (shape.tokens(), shape.tokens() * shape.heads);
        shape.check(OPERATOR)?;
        ensure(OPERATOR, block_length > 0, || "blocks of no token".into())?;
        check_len(OPERATOR, "qkv", M::view_len::<T>(self.qkv), tokens * shape.row())?;
        check_len(OPERATOR, "out", M::view_mut_len::<T>(&self.out), pairs * shape.head_dim)?;
        check_len(OPERATOR, "log_sum_exp", M::view_mut_len::<f32>(&self.log_sum_exp), pairs)?;
        let generated = sequences.iter().filter(|span| !span.is_prompt).count();
        check_len(OPERATOR, "generated", M::view_len::<u32>(self.generated), 3 * generated)?;
        let table = M::view_len::<u32>(self.block_table);
        let mut end = 0;
        for span in sequences {
            let Range { start, end: last } = span.rows;
            ensure(OPERATOR, start == end && start < last, || {
                format!("rows {start}..{last} of a sequence after those up to {end}")
            })?;
            end = last;
            ensure(OPERATOR, span.is_prompt || span.rows.len() == 1, || {
                format!("{} generated tokens of a sequence: one at a time", span.rows.len())
            })?;
            let blocks = blocks_of(span, block_length);
            ensure(OPERATOR, blocks.end <= table, || {
                format!("blocks {blocks:?} of a table of {table}")
            })?;
        }
        ensure(OPERATOR, end == tokens, || {
            format!("sequences of {end} tokens, expected {tokens}")
        })?;
        // The selection of all tokens, before it is divided among the sequences.
        let whole = AttentionShape::of_qkv(shape, shape.length);
        AttentionArgs { selection, ..AttentionArgs::causal(whole) }.check(OPERATOR)
    }

    /// Returns the arguments for the attention of one of the sequences.
    #[cfg(gpu)]
    pub(super) fn of<'v>(&'v mut self, span: &Span) -> AttentionForward<'v, M, T> {
        let shape = shape_of(self.shape, span);
        let part = |width: usize| span.rows.start * width..span.rows.end * width;
        AttentionForward {
            args: args_of(self.shape, self.selection, self.score_factor, span),
            queries: M::part(self.qkv, part(shape.query_stride)),
            key_values: KeyValues::Paged {
                keys: M::reborrow(self.keys),
                values: M::reborrow(self.values),
                block_table: M::part(self.block_table, blocks_of(span, self.block_length)),
                block_length: self.block_length,
            },
            out: M::part_mut(&mut self.out, part(shape.heads * shape.head_dim)),
            log_sum_exp: M::part_mut(&mut self.log_sum_exp, part(shape.heads)),
        }
    }
}
