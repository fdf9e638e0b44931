//! Cross-entropy fused with the output projection: logits exist for one chunk of tokens at a time,
//! for any vocabulary, and are replaced by their gradients in place.
//!
//! With p = softmax(x W^T): loss = -log `p[target]`, d_logits = scale (p - onehot(target)), d_x =
//! d_logits W, and d_W = d_logits^T x, overwritten or accumulated. From the second chunk on d_W is
//! always accumulated. With x and W in bf16, a device may round d_logits to bf16 before the matmuls; sums
//! stay in f32.
//!
//! For every chunk, ranks with shards of the head's rows exchange the logarithms of their local
//! sums of exponentials, and the target's logit. They sum one table with a column per rank, and a
//! last column for the logit.
//!
//! A teacher adds a loss ([`HeadTeacher`]). Its own head computes its logits chunk by chunk, and no more of them exist
//! at the same time.

pub(crate) mod cpu;
#[cfg(gpu)]
pub(crate) mod cuda;
mod teacher;

pub use teacher::HeadTeacher;

use crate::linear::Accumulation;
use crate::ranks::{AllReduce, VocabularyRows};
use crate::{Element, Memory, Result, View, ViewMut, Workspace, check_len, ensure};

/// Tokens of a GPU's chunk of f32 logits. A chunk of bf16 logits has twice as many.
pub(crate) const GPU_CHUNK: usize = 1024;

/// A target without a loss.
pub const IGNORED: u32 = u32::MAX;

/// Shape of the output head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadShape {
    /// Tokens, N.
    pub tokens: usize,
    /// Width of the residual stream, C.
    pub width: usize,
    /// Local rows of the head, V: the whole vocabulary unless it is sharded.
    pub vocab_size: usize,
    /// The largest number of rows on a rank, from which all ranks derive the same chunks.
    pub largest_share: usize,
    /// Whether the head has a teacher. The teacher's logits also need scratch.
    pub has_teacher: bool,
}

impl HeadShape {
    /// Creates the shape of an unsharded head.
    pub const fn whole(tokens: usize, width: usize, vocab_size: usize) -> Self {
        HeadShape { tokens, width, vocab_size, largest_share: vocab_size, has_teacher: false }
    }

    /// Returns the shard of `rows` on one of `ranks` ranks.
    pub fn of_rows(tokens: usize, width: usize, rows: VocabularyRows, ranks: usize) -> Self {
        let largest_share = rows.vocab_size.div_ceil(ranks);
        let (vocab_size, has_teacher) = (rows.count, false);
        HeadShape { tokens, width, vocab_size, largest_share, has_teacher }
    }

    /// Returns the same head, with a teacher or without.
    pub const fn with_teacher(self, has_teacher: bool) -> Self {
        HeadShape { has_teacher, ..self }
    }
}

/// The outputs of the backward pass.
pub struct HeadGradients<'a, M: Memory, T: Element, G: Element> {
    /// Gradient of the total loss with respect to each token's loss: 1 / (targets of the whole
    /// step).
    pub scale: f32,
    /// Overwritten; `[N, C]`.
    pub d_x: ViewMut<'a, M, T>,
    /// `[V, C]`; `None` for a frozen weight.
    pub d_weight: Option<ViewMut<'a, M, G>>,
    /// Whether `d_weight` is overwritten or accumulated.
    pub accumulation: Accumulation,
}

impl<M: Memory, T: Element, G: Element> HeadGradients<'_, M, T, G> {
    /// Reborrows the gradients.
    pub fn reborrow(&mut self) -> HeadGradients<'_, M, T, G> {
        HeadGradients {
            scale: self.scale,
            d_x: M::reborrow_mut(&mut self.d_x),
            d_weight: self.d_weight.as_mut().map(|d_weight| M::reborrow_mut(d_weight)),
            accumulation: self.accumulation,
        }
    }
}

/// The sharding of a head across ranks.
pub struct HeadRanks<'a, M: Memory> {
    /// The local rows.
    pub rows: VocabularyRows,
    /// This rank's index among the ranks of the head.
    pub rank: usize,
    /// The number of ranks of the head.
    pub ranks: usize,
    /// [`crate::Workspace::cross_entropy_sums`] elements of scratch.
    pub sums: ViewMut<'a, M, f64>,
    /// Sums a buffer over the ranks.
    pub all_reduce: AllReduce<'a, M>,
}

/// Arguments of [`CrossEntropy::cross_entropy`].
pub struct CrossEntropyArgs<'a, M: Memory, T: Element, G: Element> {
    /// Shape of the head, with the local rows if it is sharded.
    pub shape: HeadShape,
    /// `[N, C]`.
    pub x: View<'a, M, T>,
    /// `[V, C]`.
    pub weight: View<'a, M, T>,
    /// `[N]`.
    pub targets: View<'a, M, u32>,
    /// [`crate::Workspace::cross_entropy_scratch`] elements.
    pub scratch: ViewMut<'a, M, f32>,
    /// Added to: the cross-entropy, `[1]`, or with a teacher the cross-entropy and the distillation loss, `[2]`.
    pub loss: ViewMut<'a, M, f64>,
    /// The teacher, if the head has a teacher.
    pub teacher: Option<HeadTeacher<'a, M, T>>,
    /// The gradients, if they are requested.
    pub gradients: Option<HeadGradients<'a, M, T, G>>,
    /// Required if the head is sharded: rank 0 adds the loss, and the caller sums the ranks' `d_x`.
    pub ranks: Option<HeadRanks<'a, M>>,
}

/// The output projection with its loss as an operator of a device.
pub trait CrossEntropy: Memory {
    /// Computes the cross-entropy of the output projection in chunks of tokens, so that not all logits exist at
    /// the same time: `loss[0] += sum_n -log softmax(x[n] weight^T)[targets[n]]` over the targets that are
    /// not [`IGNORED`]. With a teacher, also computes the distillation loss of the same tokens. Computes the gradients
    /// if they are requested.
    fn cross_entropy<T: Element, G: Element>(
        &self,
        args: CrossEntropyArgs<'_, Self, T, G>,
    ) -> Result<()>;
}

impl<M: Workspace, T: Element, G: Element> CrossEntropyArgs<'_, M, T, G> {
    /// Checks the lengths, and that a teacher and ranks fit the head.
    fn check(&self, device: &M) -> Result<()> {
        const OPERATOR: &str = "cross_entropy";
        let HeadShape { tokens, width, vocab_size, .. } = self.shape;
        ensure(OPERATOR, width > 0 && vocab_size > 0, || "the head is empty".into())?;
        check_len(OPERATOR, "x", M::view_len::<T>(self.x), tokens * width)?;
        check_len(OPERATOR, "weight", M::view_len::<T>(self.weight), vocab_size * width)?;
        check_len(OPERATOR, "targets", M::view_len::<u32>(self.targets), tokens)?;
        teacher::check(OPERATOR, &self.shape, self.teacher.as_ref())?;
        let losses = if self.shape.has_teacher { 2 } else { 1 };
        check_len(OPERATOR, "loss", M::view_mut_len::<f64>(&self.loss), losses)?;
        let least = device.cross_entropy_scratch(&self.shape);
        let scratch = M::view_mut_len::<f32>(&self.scratch);
        ensure(OPERATOR, scratch >= least, || {
            format!("scratch of {scratch} elements, expected {least}")
        })?;
        if let Some(HeadGradients { d_x, d_weight, .. }) = &self.gradients {
            check_len(OPERATOR, "d_x", M::view_mut_len::<T>(d_x), tokens * width)?;
            let len = d_weight.as_ref().map(|d_weight| M::view_mut_len::<G>(d_weight));
            len.map_or(Ok(()), |len| check_len(OPERATOR, "d_weight", len, vocab_size * width))?;
        }
        let Some(HeadRanks { rows, rank, ranks, sums, .. }) = &self.ranks else { return Ok(()) };
        let least = device.cross_entropy_sums(&self.shape, *ranks);
        let sums = M::view_mut_len::<f64>(sums);
        ensure(OPERATOR, sums >= least, || format!("{sums} sums, expected {least}"))?;
        let fit =
            rank < ranks && rows.count == vocab_size && rows.first + rows.count <= rows.vocab_size;
        ensure(OPERATOR, fit, || {
            format!("{rows:?} of rank {rank} of {ranks} do not fit a head of {vocab_size} rows")
        })
    }
}
