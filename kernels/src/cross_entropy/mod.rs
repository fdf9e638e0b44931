//! Cross-entropy fused with the output projection: logits exist for one chunk of tokens at a time,
//! whatever the vocabulary, and their gradient is formed where they lay.
//!
//! With p = softmax(x W^T): loss = -log `p[target]`, d_logits = scale (p - onehot(target)),
//! d_x = d_logits W, d_W = d_logits^T x, added to what is there or not: from the second
//! chunk on it is. With x and W in bf16, a device may round d_logits to bf16
//! before it multiplies by them; sums stay f32.
//!
//! Ranks that hold some of the head's rows each exchange, for every chunk, the logarithms of their own
//! sums of exponentials and the target's logit, in one table that they add up: each rank has a
//! column of its own, and the last one is the logit's.

pub(crate) mod cpu;
#[cfg(gpu)]
pub(crate) mod cuda;

use crate::backend::{Accumulation, Backend, ViewMut};
use crate::error::{Result, check_len, ensure};
use crate::ranks::{HeadRanks, VocabularyRows};
use crate::scalar::Element;

/// Tokens whose f32 logits a GPU has at a time; of bf16 logits twice as many fit.
pub const GPU_CHUNK: usize = 1024;

/// A target that has no loss.
pub const IGNORED: u32 = u32::MAX;

/// Shape of the output head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadShape {
    /// Tokens, N.
    pub tokens: usize,
    /// Width of the residual stream, C.
    pub width: usize,
    /// Rows of the head that are held here, V: the vocabulary's, unless ranks divide it.
    pub vocab_size: usize,
    /// Rows of the rank that holds most of them, by which all ranks choose the tokens of a chunk.
    pub largest_share: usize,
}

impl HeadShape {
    /// Of a head whose rows are all held here.
    pub const fn whole(tokens: usize, width: usize, vocab_size: usize) -> Self {
        HeadShape { tokens, width, vocab_size, largest_share: vocab_size }
    }

    /// Of the rows that one of `ranks` ranks holds.
    pub fn of_rows(tokens: usize, width: usize, rows: VocabularyRows, ranks: usize) -> Self {
        let largest_share = rows.vocab_size.div_ceil(ranks);
        HeadShape { tokens, width, vocab_size: rows.count, largest_share }
    }
}

/// Where the gradients of the output head go.
pub struct HeadGradients<'a, B: Backend, T: Element, G: Element> {
    /// Gradient of the total loss with respect to each token's: 1 / (targets of the whole step).
    pub scale: f32,
    /// Overwritten; `[N, C]`.
    pub d_x: ViewMut<'a, B, T>,
    /// `[V, C]`.
    pub d_weight: ViewMut<'a, B, G>,
    /// What becomes of what `d_weight` holds.
    pub accumulation: Accumulation,
}

/// Lengths of the buffers of a call.
struct Lens {
    x: usize,
    weight: usize,
    targets: usize,
    /// As it is, and the least.
    scratch: (usize, usize),
    loss: usize,
    /// Of d_x and d_weight.
    gradients: Option<[usize; 2]>,
    /// Of the ranks' sums, as they are and the least.
    sums: Option<(usize, usize)>,
}

fn check(shape: &HeadShape, lens: &Lens) -> Result<()> {
    const OPERATOR: &str = "cross_entropy";
    let &HeadShape { tokens, width, vocab_size, .. } = shape;
    ensure(OPERATOR, width > 0 && vocab_size > 0, || "the head is empty".into())?;
    check_len(OPERATOR, "x", lens.x, tokens * width)?;
    check_len(OPERATOR, "weight", lens.weight, vocab_size * width)?;
    check_len(OPERATOR, "targets", lens.targets, tokens)?;
    check_len(OPERATOR, "loss", lens.loss, 1)?;
    let (scratch, least) = lens.scratch;
    ensure(OPERATOR, scratch >= least, || {
        format!("scratch of {scratch} numbers, expected {least}")
    })?;
    if let Some((sums, least)) = lens.sums {
        ensure(OPERATOR, sums >= least, || format!("{sums} sums, expected {least}"))?;
    }
    if let Some([d_x, d_weight]) = lens.gradients {
        check_len(OPERATOR, "d_x", d_x, lens.x)?;
        check_len(OPERATOR, "d_weight", d_weight, lens.weight)?;
    }
    Ok(())
}

/// Refuses ranks that do not fit the head.
fn check_ranks<B: Backend>(shape: &HeadShape, ranks: Option<&HeadRanks<'_, B>>) -> Result<()> {
    let Some(HeadRanks { rows, rank: (rank, count), .. }) = ranks else { return Ok(()) };
    let fit = rank < count
        && rows.count == shape.vocab_size
        && rows.first + rows.count <= rows.vocab_size;
    ensure("cross_entropy", fit, || {
        format!("{rows:?} of rank {rank} of {count}, and a head of {} rows", shape.vocab_size)
    })
}
