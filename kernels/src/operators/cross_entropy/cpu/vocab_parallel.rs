//! The losses of a chunk with a vocabulary sharded across ranks.

use super::softmax::Softmax;
use crate::cpu::Cpu;
use crate::cross_entropy::HeadRanks;
use crate::error::Result;

/// The chunk's summed loss on rank 0, zero on the others; with a scale, prepares the gradients of the
/// local logits.
pub(super) fn losses(
    softmax: &mut Softmax<'_>,
    scale: Option<f32>,
    ranks: &mut HeadRanks<'_, Cpu>,
) -> Result<f64> {
    let HeadRanks { rank, ranks: count, sums, all_reduce, .. } = ranks;
    let columns = *count + 1;
    let table = &mut sums[..softmax.targets.len() * columns];
    softmax.fill_table(table, columns, *rank);
    all_reduce(&mut *table)?;
    let loss = softmax.losses_by(table, columns, scale);
    Ok(if *rank == 0 { loss } else { 0.0 })
}
