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

use crate::error::{Result, check_len, ensure};
use crate::linear::Accumulation;
use crate::memory::{Memory, View, ViewMut};
use crate::ranks::{AllReduce, VocabularyRows};
use crate::scalar::Element;

/// Tokens whose f32 logits a GPU has at a time; of bf16 logits twice as many fit.
pub(crate) const GPU_CHUNK: usize = 1024;

/// A target that has no loss.
pub const IGNORED: u32 = u32::MAX;

/// Shape of the output head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadShape {
    /// Tokens, N.
    pub tokens: usize,
    /// Width of the residual stream, C.
    pub width: usize,
    /// Local rows of the head, V: the vocabulary's, unless ranks divide it.
    pub vocab_size: usize,
    /// Rows of the rank that holds most of them, by which all ranks choose the tokens of a chunk.
    pub largest_share: usize,
}

impl HeadShape {
    /// A head whose rows are all local.
    pub const fn whole(tokens: usize, width: usize, vocab_size: usize) -> Self {
        HeadShape { tokens, width, vocab_size, largest_share: vocab_size }
    }

    /// The local `rows` of one of `ranks` ranks.
    pub fn of_rows(tokens: usize, width: usize, rows: VocabularyRows, ranks: usize) -> Self {
        let largest_share = rows.vocab_size.div_ceil(ranks);
        HeadShape { tokens, width, vocab_size: rows.count, largest_share }
    }
}

/// Where the gradients of the output head go.
pub struct HeadGradients<'a, M: Memory, T: Element, G: Element> {
    /// Gradient of the total loss with respect to each token's: 1 / (targets of the whole step).
    pub scale: f32,
    /// Overwritten; `[N, C]`.
    pub d_x: ViewMut<'a, M, T>,
    /// `[V, C]`.
    pub d_weight: ViewMut<'a, M, G>,
    /// Whether `d_weight` is overwritten or added to.
    pub accumulation: Accumulation,
}

impl<M: Memory, T: Element, G: Element> HeadGradients<'_, M, T, G> {
    /// The same with a shorter lifetime.
    pub fn reborrow(&mut self) -> HeadGradients<'_, M, T, G> {
        HeadGradients {
            scale: self.scale,
            d_x: M::reborrow_mut(&mut self.d_x),
            d_weight: M::reborrow_mut(&mut self.d_weight),
            accumulation: self.accumulation,
        }
    }
}

/// What ranks that share the rows of a head need.
pub struct HeadRanks<'a, M: Memory> {
    /// The local rows.
    pub rows: VocabularyRows,
    /// This rank's index among those that share the head.
    pub rank: usize,
    /// How many there are.
    pub ranks: usize,
    /// [`crate::Workspace::cross_entropy_sums`] elements of scratch.
    pub sums: ViewMut<'a, M, f64>,
    /// The sum over the ranks.
    pub all_reduce: AllReduce<'a, M>,
}

/// Arguments of [`CrossEntropy::cross_entropy`].
pub struct CrossEntropyArgs<'a, M: Memory, T: Element, G: Element> {
    /// Shape of the head, of the local rows where ranks share it.
    pub shape: HeadShape,
    /// `[N, C]`.
    pub x: View<'a, M, T>,
    /// `[V, C]`.
    pub weight: View<'a, M, T>,
    /// `[N]`.
    pub targets: View<'a, M, u32>,
    /// [`crate::Workspace::cross_entropy_scratch`] elements.
    pub scratch: ViewMut<'a, M, f32>,
    /// Added to; `[1]`.
    pub loss: ViewMut<'a, M, f64>,
    /// Gradients, where they are wanted.
    pub gradients: Option<HeadGradients<'a, M, T, G>>,
    /// Needed where ranks share the head: rank 0 adds the loss, and the ranks' `d_x` are to be added up.
    pub ranks: Option<HeadRanks<'a, M>>,
}

/// The output projection with its loss as an operator of a device.
pub trait CrossEntropy: Memory {
    /// Cross-entropy of the output projection, by chunks of tokens so that the logits of all of them
    /// never exist at once: `loss[0] += sum_n -log softmax(x[n] weight^T)[targets[n]]` over the targets
    /// that are not [`IGNORED`]; and, where asked for, its gradients.
    fn cross_entropy<T: Element, G: Element>(
        &self,
        args: CrossEntropyArgs<'_, Self, T, G>,
    ) -> Result<()>;
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
        format!("scratch of {scratch} elements, expected {least}")
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
fn check_ranks<M: Memory>(shape: &HeadShape, ranks: Option<&HeadRanks<'_, M>>) -> Result<()> {
    let Some(HeadRanks { rows, rank, ranks: count, .. }) = ranks else { return Ok(()) };
    let fit = rank < count
        && rows.count == shape.vocab_size
        && rows.first + rows.count <= rows.vocab_size;
    ensure("cross_entropy", fit, || {
        format!("{rows:?} of rank {rank} of {count}, and a head of {} rows", shape.vocab_size)
    })
}
