//! The CPU body of the fused cross-entropy.

use rayon::prelude::*;

use super::{HeadGradients, HeadShape, IGNORED};
use crate::cpu::Cpu;
use crate::error::{Error, Result, check_len, ensure};
use crate::math::{exp, max, sum};
use crate::matmul::{Destination, Matrix, MatrixMut, matmul_parallel};
use crate::scalar::Element;
use crate::simd::vectorized;

/// Numbers that a chunk's logits may take, unless one token's are more: 32 MiB.
const SCRATCH: usize = 8 << 20;
/// Tokens of a chunk at the most.
const MOST_ROWS: usize = 1024;
/// Tokens of one task.
const ROWS: usize = 16;

fn chunk_rows(shape: &HeadShape) -> usize {
    (SCRATCH / shape.vocab_size.max(1)).clamp(1, MOST_ROWS).min(shape.tokens.max(1))
}

pub(crate) fn scratch(shape: &HeadShape) -> usize {
    chunk_rows(shape) * shape.vocab_size
}

#[allow(clippy::too_many_arguments)]
pub(crate) fn cross_entropy<T: Element, G: Element>(
    shape: &HeadShape,
    x: &[T],
    weight: &[T],
    targets: &[u32],
    scratch: &mut [f32],
    loss: &mut [f64],
    mut gradients: Option<HeadGradients<'_, Cpu, T, G>>,
) -> Result<()> {
    check(shape, x.len(), weight.len(), targets, scratch.len(), loss.len())?;
    let &HeadShape { width, vocab_size, .. } = shape;
    let rows = chunk_rows(shape);
    if let Some(gradients) = &gradients {
        check_len("cross_entropy", "d_x", gradients.d_x.len(), x.len())?;
        check_len("cross_entropy", "d_weight", gradients.d_weight.len(), weight.len())?;
    }
    let weight = Matrix::new(weight, vocab_size, width);
    for (part, (x, targets)) in x.chunks(rows * width).zip(targets.chunks(rows)).enumerate() {
        let tokens = targets.len();
        let logits = &mut scratch[..tokens * vocab_size];
        let x = Matrix::new(x, tokens, width);
        let to_logits = MatrixMut::new(logits, tokens, vocab_size);
        matmul_parallel(to_logits, Destination::Overwrite, 1.0, x, weight.transposed());
        let scale = gradients.as_ref().map(|gradients| gradients.scale);
        loss[0] += losses(logits, targets, vocab_size, scale);
        if let Some(gradients) = &mut gradients {
            let d_logits = Matrix::new(logits, tokens, vocab_size);
            let d_weight = MatrixMut::new(gradients.d_weight, vocab_size, width);
            let accumulate = Destination::Accumulate;
            matmul_parallel(d_weight, accumulate, 1.0, d_logits.transposed(), x);
            let d_x = &mut gradients.d_x[part * rows * width..][..tokens * width];
            let d_x = MatrixMut::new(d_x, tokens, width);
            matmul_parallel(d_x, Destination::Overwrite, 1.0, d_logits, weight);
        }
    }
    Ok(())
}

/// The chunk's summed loss; with a scale, logits become their gradients.
fn losses(logits: &mut [f32], targets: &[u32], vocab_size: usize, scale: Option<f32>) -> f64 {
    let partial: Vec<f64> = (logits.par_chunks_mut(ROWS * vocab_size), targets.par_chunks(ROWS))
        .into_par_iter()
        .map(|(logits, targets)| {
            let rows = logits.chunks_exact_mut(vocab_size).zip(targets);
            rows.map(|(row, &target)| vectorized(|| token_loss(row, target, scale))).sum()
        })
        .collect();
    partial.iter().sum()
}

#[inline(always)]
fn token_loss(row: &mut [f32], target: u32, scale: Option<f32>) -> f64 {
    if target == IGNORED {
        row.fill(0.0);
        return 0.0;
    }
    let target = target as usize;
    let (largest, chosen) = (max(row), row[target]);
    for logit in row.iter_mut() {
        *logit = exp(*logit - largest);
    }
    let total = sum(row);
    if let Some(scale) = scale {
        let factor = scale / total;
        for value in row.iter_mut() {
            *value *= factor;
        }
        row[target] -= scale;
    }
    f64::from(largest) + f64::from(total).ln() - f64::from(chosen)
}

fn check(
    shape: &HeadShape,
    x: usize,
    weight: usize,
    targets: &[u32],
    scratch_len: usize,
    loss: usize,
) -> Result<()> {
    const OPERATOR: &str = "cross_entropy";
    let &HeadShape { tokens, width, vocab_size } = shape;
    ensure(OPERATOR, width > 0 && vocab_size > 0, || "the head is empty".into())?;
    check_len(OPERATOR, "x", x, tokens * width)?;
    check_len(OPERATOR, "weight", weight, vocab_size * width)?;
    check_len(OPERATOR, "targets", targets.len(), tokens)?;
    check_len(OPERATOR, "loss", loss, 1)?;
    ensure(OPERATOR, scratch_len >= scratch(shape), || {
        format!("scratch of {scratch_len} numbers, expected {}", scratch(shape))
    })?;
    match targets.iter().find(|&&id| id != IGNORED && id as usize >= vocab_size) {
        Some(&id) => Err(Error::Vocabulary { id, vocab_size }),
        None => Ok(()),
    }
}
