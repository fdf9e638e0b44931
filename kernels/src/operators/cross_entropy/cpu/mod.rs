//! The CPU body of the fused cross-entropy.
//!
//! A chunk's logits are computed in blocks of the vocabulary, and each block is exponentiated while it
//! is in the caches. After all sums are computed, a block's exponentials become its part of the gradients,
//! again in the caches. Memory therefore transfers a logit twice.

mod distillation;
mod softmax;

use std::ops::Range;

use super::{CrossEntropy, CrossEntropyArgs, HeadShape, HeadTeacher, IGNORED};
use crate::compiled::compiled;
use crate::convert::Convert as _;
use crate::linear::Accumulation;
use crate::matmul::{Destination, Matrix, MatrixMut, matmul_parallel};
use crate::ranks::VocabularyRows;
use crate::{Cpu, DType, Element, Result, check_ids};
use distillation::Distillation;
use softmax::Softmax;

/// Tokens per chunk. Each chunk reads and writes the weight's gradient. With fewer tokens, this accumulation
/// would cost more than a tenth of the time.
const CHUNK: usize = 512;
/// Maximum elements of a chunk's logits, unless one token has more: 256 MiB.
const MAX_SCRATCH: usize = 64 << 20;
/// Elements of a weight with a gradient that stays in the last-level cache between chunks, 16 MiB; also
/// the minimum elements of a chunk's logits in that case.
const CACHED: usize = 4 << 20;
const CACHED_CHUNK: usize = 256;
const CACHED_SCRATCH: usize = 1 << 20;
/// Rows of the vocabulary in a block: a chunk's logits of a block need at most 2 MiB.
const BLOCK: usize = 1024;

fn chunk_rows(shape: &HeadShape) -> usize {
    let holds = |elements: usize| elements / shape.largest_share.max(1);
    let chunk = match shape.largest_share.saturating_mul(shape.width) <= CACHED {
        true => holds(CACHED_SCRATCH).clamp(CACHED_CHUNK, CHUNK),
        false => CHUNK,
    };
    chunk.min(shape.tokens).min(holds(MAX_SCRATCH)).max(1)
}

/// Returns the elements of scratch of a chunk: logits, the teacher's logits, gradients of the inputs, and the
/// statistics of the softmax.
fn lengths(shape: &HeadShape) -> [usize; 4] {
    let (rows, vocab_size) = (chunk_rows(shape), shape.vocab_size);
    let (teacher, statistics) = match shape.has_teacher {
        true => (rows * vocab_size, Distillation::len(rows, vocab_size)),
        false => (0, Softmax::len(rows, vocab_size)),
    };
    [rows * vocab_size, teacher, rows * shape.width, statistics]
}

pub(crate) fn scratch(shape: &HeadShape) -> usize {
    lengths(shape).iter().sum()
}

pub(crate) fn sums(shape: &HeadShape, ranks: usize) -> usize {
    let columns = match shape.has_teacher {
        true => distillation::columns(ranks),
        false => ranks + 1,
    };
    chunk_rows(shape) * columns
}

impl CrossEntropy for Cpu {
    fn cross_entropy<T: Element, G: Element>(
        &self,
        args: CrossEntropyArgs<'_, Self, T, G>,
    ) -> Result<()> {
        compiled!(cross_entropy::<T, G>(args: CrossEntropyArgs<'_, Cpu, T, G>))
    }
}

fn cross_entropy<T: Element, G: Element>(args: CrossEntropyArgs<'_, Cpu, T, G>) -> Result<()> {
    args.check(&Cpu)?;
    let CrossEntropyArgs { shape, x, weight, targets, scratch, loss, .. } = args;
    let CrossEntropyArgs { teacher, mut gradients, mut ranks, .. } = args;
    let HeadShape { width, vocab_size, .. } = shape;
    let vocabulary = ranks.as_ref().map_or(VocabularyRows::all(vocab_size), |ranks| ranks.rows);
    let ids = targets.iter().copied().filter(|&id| id != IGNORED);
    check_ids(ids, vocabulary.vocab_size)?;
    if let (0, Some(gradients)) = (targets.len(), &mut gradients)
        && gradients.accumulation == Accumulation::Overwrite
        && let Some(d_weight) = &mut gradients.d_weight
    {
        d_weight.fill(G::zeroed());
    }
    let [logits_len, teacher_len, d_x_len, _] = lengths(&shape);
    let (logits, rest) = scratch.split_at_mut(logits_len);
    let (teacher_logits, rest) = rest.split_at_mut(teacher_len);
    let (d_x, statistics) = rest.split_at_mut(d_x_len);
    let rows = chunk_rows(&shape);
    for (part, (x, targets)) in x.chunks(rows * width).zip(targets.chunks(rows)).enumerate() {
        let keeps = gradients.is_some();
        let mut chunk = Chunk { width, x, weight, logits, keeps };
        let scale = gradients.as_ref().map(|gradients| gradients.scale);
        let mut backward = |chunk: &mut Chunk<'_, T>, differentiate: Differentiate<'_>| {
            let Some(gradients) = &mut gradients else { return Ok(()) };
            let accumulation = std::mem::replace(&mut gradients.accumulation, Accumulation::Add);
            let to = &mut gradients.d_x[part * rows * width..][..targets.len() * width];
            let d_weight = gradients.d_weight.as_deref_mut();
            chunk.backward(differentiate, to, d_x, (d_weight, accumulation))
        };
        if let Some(teacher) = &teacher {
            let mut distillation = Distillation::new(statistics, targets, vocabulary, teacher);
            let mut other = teacher_chunk(teacher, &distillation, part * rows, teacher_logits);
            other.keeps = keeps;
            chunk.compare(&mut other, &mut distillation);
            let found = match &mut ranks {
                None => distillation.losses(scale),
                Some(ranks) => distillation.losses_over(ranks, scale)?,
            };
            loss[0] += found[0];
            loss[1] += found[1];
            backward(&mut chunk, &mut |logits, _, block| {
                distillation.differentiate(logits, other.logits_of(block), block);
            })?;
            continue;
        }
        let mut softmax = Softmax::new(statistics, targets, vocabulary);
        chunk.exponentiate(&mut softmax);
        loss[0] += match &mut ranks {
            None => softmax.losses(scale),
            Some(ranks) => softmax.losses_over(ranks, scale)?,
        };
        backward(&mut chunk, &mut |logits, number, block| {
            softmax.differentiate(logits, number, block, scale.unwrap_or_default());
        })?;
    }
    Ok(())
}

/// Replaces the forward pass's data of a block, given the block's number and rows, by the gradients of its logits.
type Differentiate<'a> = &'a mut dyn FnMut(&mut [f32], usize, &Range<usize>);

/// Returns the chunk of tokens from `first` on with the teacher's head, for the rows that are compared.
fn teacher_chunk<'a, T: Element>(
    teacher: &'a HeadTeacher<'_, Cpu, T>,
    distillation: &Distillation<'_>,
    first: usize,
    logits: &'a mut [f32],
) -> Chunk<'a, T> {
    let width = teacher.width;
    let x = &teacher.x[first * width..][..distillation.targets.len() * width];
    let weight = &teacher.weight[..distillation.compared * width];
    Chunk { width, x, weight, logits, keeps: false }
}

struct Chunk<'a, T> {
    width: usize,
    x: &'a [T],
    weight: &'a [T],
    /// The logits, block after block.
    logits: &'a mut [f32],
    /// Whether the logits of all blocks are stored, for their gradients.
    keeps: bool,
}

impl<T: Element> Chunk<'_, T> {
    fn tokens(&self) -> usize {
        self.x.len() / self.width
    }

    /// Returns the blocks of the vocabulary, each with its number and rows.
    fn blocks(&self) -> impl Iterator<Item = (usize, Range<usize>)> + use<T> {
        let vocab_size = self.weight.len() / self.width;
        let starts = (0..vocab_size).step_by(BLOCK);
        starts.map(move |first| first..vocab_size.min(first + BLOCK)).enumerate()
    }

    /// Returns a block's logits for all tokens, the inputs, and the weight's rows of the block.
    fn block(&mut self, block: &Range<usize>) -> (&mut [f32], Matrix<'_, T>, Matrix<'_, T>) {
        let (tokens, width) = (self.tokens(), self.width);
        let first = if self.keeps { tokens * block.start } else { 0 };
        let logits = &mut self.logits[first..][..tokens * block.len()];
        let weight = &self.weight[block.start * width..block.end * width];
        (logits, Matrix::new(self.x, tokens, width), Matrix::new(weight, block.len(), width))
    }

    fn compute(&mut self, block: &Range<usize>) -> &mut [f32] {
        let tokens = self.tokens();
        let (logits, x, weight) = self.block(block);
        let out = MatrixMut::new(&mut *logits, tokens, block.len());
        matmul_parallel(out, x, weight.transposed());
        logits
    }

    /// Computes the logits, and replaces them by exponentials.
    fn exponentiate(&mut self, softmax: &mut Softmax<'_>) {
        for (number, block) in self.blocks() {
            softmax.exponentiate(self.compute(&block), number, &block);
        }
    }

    /// Computes the logits of both heads, and measures them.
    fn compare(&mut self, teacher: &mut Self, distillation: &mut Distillation<'_>) {
        for (number, block) in self.blocks() {
            let logits = self.compute(&block);
            let compared = distillation.compared_in(&block);
            let others: &[f32] = if compared.is_empty() { &[] } else { teacher.compute(&compared) };
            distillation.measure(logits, others, number, &block);
        }
    }

    /// Returns the stored logits of the compared rows of a block.
    fn logits_of(&self, block: &Range<usize>) -> &[f32] {
        let rows = self.weight.len() / self.width;
        let compared = block.start.min(rows)..block.end.min(rows);
        &self.logits[self.tokens() * compared.start..self.tokens() * compared.end]
    }

    /// Computes the gradients. The inputs' gradients are summed in `sums`, unless they are f32 themselves, and rounded
    /// once.
    fn backward<G: Element>(
        &mut self,
        differentiate: Differentiate<'_>,
        d_x: &mut [T],
        sums: &mut [f32],
        d_weight: (Option<&mut [G]>, Accumulation),
    ) -> Result<()> {
        if T::DTYPE == DType::F32 {
            self.gradients(differentiate, bytemuck::cast_slice_mut(d_x), d_weight);
            return Ok(());
        }
        let sums = &mut sums[..d_x.len()];
        self.gradients(differentiate, sums, d_weight);
        Cpu.convert(sums, d_x)
    }

    fn gradients<G: Element>(
        &mut self,
        differentiate: Differentiate<'_>,
        d_x: &mut [f32],
        (mut d_weight, accumulation): (Option<&mut [G]>, Accumulation),
    ) {
        let (tokens, width) = (self.tokens(), self.width);
        for (number, block) in self.blocks() {
            let (logits, x, weight) = self.block(&block);
            differentiate(logits, number, &block);
            let d_logits = Matrix::new(&*logits, tokens, block.len());
            if let Some(d_weight) = &mut d_weight {
                let d_weight = &mut d_weight[block.start * width..block.end * width];
                let d_weight = MatrixMut::new(d_weight, block.len(), width).with(accumulation);
                matmul_parallel(d_weight, d_logits.transposed(), x);
            }
            let first = number == 0;
            let to = if first { Destination::Overwrite } else { Destination::Accumulate };
            matmul_parallel(MatrixMut::new(d_x, tokens, width).with(to), d_logits, weight);
        }
    }
}
