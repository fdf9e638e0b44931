//! The losses of a chunk with a vocabulary sharded across ranks.

use rayon::prelude::*;

use super::{ROWS, exponentiate};
use crate::cpu::Cpu;
use crate::cross_entropy::{HeadRanks, IGNORED};
use crate::error::Result;
use crate::ranks::VocabularyRows;
use crate::simd::vectorized;

/// Scratch elements of `rows` rows: the table that the ranks sum, and each row's maximum logit.
pub(super) fn sums(rows: usize, ranks: usize) -> usize {
    rows * (ranks + 2)
}

/// The chunk's summed loss on rank 0, zero on the others; with a scale, replaces the local logits
/// by their gradients.
pub(super) fn losses(
    logits: &mut [f32],
    targets: &[u32],
    scale: Option<f32>,
    ranks: &mut HeadRanks<'_, Cpu>,
) -> Result<f64> {
    let HeadRanks { rows, rank, ranks: count, sums, all_reduce } = ranks;
    let (rows, rank, columns) = (*rows, *rank, *count + 1);
    let (table, largest) = sums.split_at_mut(targets.len() * columns);
    let mut chunk = Chunk { logits, targets, table, largest: &mut largest[..targets.len()] };
    chunk.each_row(rows.count, |row, target, sums, largest| {
        sums.fill(0.0);
        *largest = vectorized!(row_sums(row, target, rows, rank, sums));
    });
    all_reduce(&mut *chunk.table)?;
    chunk.each_row(rows.count, |row, target, sums, largest| {
        sums[0] = vectorized!(row_loss(row, target, rows, *largest, sums, scale));
    });
    Ok(if rank == 0 { chunk.table.iter().step_by(columns).sum() } else { 0.0 })
}

/// A chunk's logits and its per-row values.
struct Chunk<'a> {
    logits: &'a mut [f32],
    targets: &'a [u32],
    /// The table that the ranks sum.
    table: &'a mut [f64],
    /// Each row's maximum logit.
    largest: &'a mut [f64],
}

impl Chunk<'_> {
    /// Calls a function on every row of `width` logits, with its target and per-row values.
    fn each_row(
        &mut self,
        width: usize,
        work: impl Fn(&mut [f32], u32, &mut [f64], &mut f64) + Sync,
    ) {
        let columns = self.table.len() / self.targets.len().max(1);
        let parts = (
            self.logits.par_chunks_mut(ROWS * width),
            self.targets.par_chunks(ROWS),
            self.table.par_chunks_mut(ROWS * columns),
            self.largest.par_chunks_mut(ROWS),
        );
        parts.into_par_iter().for_each(|(logits, targets, table, largest)| {
            let tokens = logits.chunks_exact_mut(width).zip(targets);
            let sums = table.chunks_exact_mut(columns).zip(largest);
            for ((row, &target), (sums, largest)) in tokens.zip(sums) {
                work(row, target, sums, largest);
            }
        });
    }
}

/// Replaces a row by exponentials relative to its maximum logit, which it returns. Writes the
/// logarithm of their sum into the rank's column, and the target's logit, if it is local, into the
/// last column.
#[inline(always)]
fn row_sums(
    row: &mut [f32],
    target: u32,
    rows: VocabularyRows,
    rank: usize,
    sums: &mut [f64],
) -> f64 {
    if target == IGNORED {
        return 0.0;
    }
    let local = rows.local(target);
    if let (Some(local), Some(chosen)) = (local, sums.last_mut()) {
        *chosen = f64::from(row[local]);
    }
    let (largest, total) = exponentiate(row, local);
    sums[rank] = f64::from(largest) + total.ln();
    f64::from(largest)
}

/// The token's loss from all ranks' sums; with a scale, replaces the row by its gradient.
#[inline(always)]
fn row_loss(
    row: &mut [f32],
    target: u32,
    rows: VocabularyRows,
    own_largest: f64,
    sums: &[f64],
    scale: Option<f32>,
) -> f64 {
    let Some((chosen, sums)) = sums.split_last().filter(|_| target != IGNORED) else {
        row.fill(0.0);
        return 0.0;
    };
    let largest = sums.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let total = sums.iter().map(|sum| (sum - largest).exp()).sum::<f64>().ln();
    if let Some(scale) = scale {
        let factor = (f64::from(scale) * (own_largest - largest - total).exp()) as f32;
        for value in row.iter_mut() {
            *value *= factor;
        }
        if let Some(local) = rows.local(target) {
            row[local] -= scale;
        }
    }
    largest - chosen + total
}
