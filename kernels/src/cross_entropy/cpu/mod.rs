//! The CPU body of the fused cross-entropy.

mod vocab_parallel;

use super::{CrossEntropy, CrossEntropyArgs, HeadShape, IGNORED, Lens, check, check_ranks};
use crate::cpu::Cpu;
use crate::error::{Error, Result};
use crate::linear::Accumulation;
use crate::math::{exp, largest, sum};
use crate::matmul::{Destination, Matrix, MatrixMut, matmul_parallel};
use crate::scalar::Element;
use crate::simd::vectorized;

/// Tokens per chunk. With fewer, accumulating the weight's gradient, which each chunk reads and
/// writes, would cost more than a tenth of the time.
const CHUNK: usize = 512;
/// Maximum elements of a chunk's logits, unless one token has more: 256 MiB.
const MOST_SCRATCH: usize = 64 << 20;
/// Elements of a weight whose gradient stays in the last-level cache between chunks, 16 MiB; also
/// the minimum elements of a chunk's logits then.
const CACHED: usize = 4 << 20;
const CACHED_CHUNK: usize = 256;
const CACHED_SCRATCH: usize = 1 << 20;
/// Maximum tokens per task.
const ROWS: usize = 16;
/// Logits that are exponentiated before they are summed.
const BLOCK: usize = 1024;

fn chunk_rows(shape: &HeadShape) -> usize {
    let holds = |elements: usize| elements / shape.largest_share.max(1);
    let chunk = match shape.largest_share.saturating_mul(shape.width) <= CACHED {
        true => holds(CACHED_SCRATCH).clamp(CACHED_CHUNK, CHUNK),
        false => CHUNK,
    };
    chunk.min(shape.tokens).min(holds(MOST_SCRATCH)).max(1)
}

pub(crate) fn scratch(shape: &HeadShape) -> usize {
    chunk_rows(shape) * shape.vocab_size
}

pub(crate) fn sums(shape: &HeadShape, ranks: usize) -> usize {
    vocab_parallel::sums(chunk_rows(shape), ranks)
}

impl CrossEntropy for Cpu {
    fn cross_entropy<T: Element, G: Element>(
        &self,
        args: CrossEntropyArgs<'_, Self, T, G>,
    ) -> Result<()> {
        let CrossEntropyArgs { shape, x, weight, targets, scratch, loss, .. } = args;
        let CrossEntropyArgs { mut gradients, mut ranks, .. } = args;
        let found = Lens {
            x: x.len(),
            weight: weight.len(),
            targets: targets.len(),
            scratch: (scratch.len(), self::scratch(&shape)),
            loss: loss.len(),
            gradients: gradients.as_ref().map(|g| [g.d_x.len(), g.d_weight.len()]),
            sums: ranks.as_ref().map(|ranks| (ranks.sums.len(), self::sums(&shape, ranks.ranks))),
        };
        check(&shape, &found)?;
        check_ranks(&shape, ranks.as_ref())?;
        let HeadShape { width, vocab_size, .. } = shape;
        check_targets(targets, ranks.as_ref().map_or(vocab_size, |ranks| ranks.rows.vocab_size))?;
        if let (0, Some(gradients)) = (targets.len(), &mut gradients)
            && gradients.accumulation == Accumulation::Overwrite
        {
            gradients.d_weight.fill(G::zeroed());
        }
        let rows = chunk_rows(&shape);
        let weight = Matrix::new(weight, vocab_size, width);
        for (part, (x, targets)) in x.chunks(rows * width).zip(targets.chunks(rows)).enumerate() {
            let tokens = targets.len();
            let logits = &mut scratch[..tokens * vocab_size];
            let x = Matrix::new(x, tokens, width);
            let to_logits = MatrixMut::new(logits, tokens, vocab_size);
            matmul_parallel(to_logits, Destination::Overwrite, 1.0, x, weight.transposed());
            let scale = gradients.as_ref().map(|gradients| gradients.scale);
            loss[0] += match &mut ranks {
                None => losses(logits, targets, vocab_size, scale),
                Some(ranks) => vocab_parallel::losses(logits, targets, scale, ranks)?,
            };
            if let Some(gradients) = &mut gradients {
                let d_logits = Matrix::new(logits, tokens, vocab_size);
                let d_weight = MatrixMut::new(gradients.d_weight, vocab_size, width);
                let accumulation =
                    std::mem::replace(&mut gradients.accumulation, Accumulation::Add);
                matmul_parallel(d_weight, accumulation.into(), 1.0, d_logits.transposed(), x);
                let d_x = &mut gradients.d_x[part * rows * width..][..tokens * width];
                let d_x = MatrixMut::new(d_x, tokens, width);
                matmul_parallel(d_x, Destination::Overwrite, 1.0, d_logits, weight);
            }
        }
        Ok(())
    }
}

/// The chunk's summed loss, in an order that depends only on its length; with a scale, replaces the
/// logits by their gradients.
fn losses(logits: &mut [f32], targets: &[u32], vocab_size: usize, scale: Option<f32>) -> f64 {
    if targets.len() > ROWS {
        let half = targets.len().div_ceil(2);
        let (first, second) = logits.split_at_mut(half * vocab_size);
        let (first_targets, second_targets) = targets.split_at(half);
        let (first, second) = rayon::join(
            || losses(first, first_targets, vocab_size, scale),
            || losses(second, second_targets, vocab_size, scale),
        );
        return first + second;
    }
    let rows = logits.chunks_exact_mut(vocab_size).zip(targets);
    rows.map(|(row, &target)| vectorized!(token_loss(row, target, scale))).sum()
}

#[inline(always)]
fn token_loss(row: &mut [f32], target: u32, scale: Option<f32>) -> f64 {
    if target == IGNORED {
        row.fill(0.0);
        return 0.0;
    }
    let target = target as usize;
    let chosen = row[target];
    let (largest, total) = exponentiate(row, Some(target));
    if let Some(scale) = scale {
        let factor = (f64::from(scale) / total) as f32;
        for value in row.iter_mut() {
            *value *= factor;
        }
        row[target] -= scale;
    }
    f64::from(largest) - f64::from(chosen) + total.ln()
}

/// Replaces logits by exponentials relative to the maximum; returns the maximum and their sum.
///
/// The target's term is added in f64: if it is the maximum, the loss is the logarithm of 1 plus the
/// small sum of the others.
#[inline(always)]
fn exponentiate(row: &mut [f32], target: Option<usize>) -> (f32, f64) {
    let largest = largest(row);
    let Some(target) = target else {
        return (largest, f64::from(exponentials(row, largest)));
    };
    let own = exp(row[target] - largest);
    row[target] = f32::NEG_INFINITY;
    let others = exponentials(row, largest);
    row[target] = own;
    (largest, f64::from(others) + f64::from(own))
}

/// Replaces logits by exponentials relative to the maximum and returns their sum.
#[inline(always)]
fn exponentials(row: &mut [f32], largest: f32) -> f32 {
    let mut total = 0.0;
    // The sum reads a block while it is in the first-level cache; one loop for both does not
    // vectorise.
    for block in row.chunks_mut(BLOCK) {
        for logit in block.iter_mut() {
            *logit = exp(*logit - largest);
        }
        total += sum(block);
    }
    total
}

/// Refuses a target without a row.
fn check_targets(targets: &[u32], vocab_size: usize) -> Result<()> {
    match targets.iter().find(|&&id| id != IGNORED && id as usize >= vocab_size) {
        Some(&id) => Err(Error::Vocabulary { id, vocab_size }),
        None => Ok(()),
    }
}
