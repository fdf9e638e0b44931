//! The fused cross-entropy on a GPU. Logits have the type of x, and are computed in chunks of the
//! scratch buffer.

use super::{
    CrossEntropy, CrossEntropyArgs, HeadGradients, HeadRanks, HeadShape, Lens, check, check_ranks,
};
use crate::adamw;
use crate::cuda::parameters::cross_entropy::{Losses, VocabParallel};
use crate::cuda::{Cuda, Matmul, Operand, name};
use crate::error::Result;
use crate::linear::Accumulation;
use crate::memory::Memory;
use crate::scalar::Element;
use crate::workspace::gpu::{
    cross_entropy_bytes, cross_entropy_scratch, cross_entropy_sums, logit_rows,
};

impl CrossEntropy for Cuda {
    fn cross_entropy<T: Element, G: Element>(
        &self,
        args: CrossEntropyArgs<'_, Self, T, G>,
    ) -> Result<()> {
        let CrossEntropyArgs { shape, x, weight, targets, scratch, loss, .. } = args;
        let CrossEntropyArgs { mut gradients, mut ranks, .. } = args;
        check(
            &shape,
            &Lens {
                x: x.len,
                weight: weight.len,
                targets: targets.len,
                scratch: (scratch.len, cross_entropy_scratch(&shape)),
                loss: loss.len,
                gradients: gradients.as_ref().map(|g| [g.d_x.len, g.d_weight.len]),
                sums: ranks
                    .as_ref()
                    .map(|ranks| (ranks.sums.len, cross_entropy_sums(&shape, ranks.ranks))),
            },
        )?;
        check_ranks(&shape, ranks.as_ref())?;
        let HeadShape { tokens, width, vocab_size, .. } = shape;
        if let (0, Some(gradients)) = (tokens, &mut gradients)
            && gradients.accumulation == Accumulation::Overwrite
        {
            self.zero(gradients.d_weight.first(shape.vocab_size * width))?;
        }
        let losses = self.scratch(cross_entropy_bytes(tokens))?;
        let chunk = logit_rows(&shape, size_of::<T>());
        for first in (0..tokens).step_by(chunk.max(1)) {
            let rows = chunk.min(tokens - first);
            let part = |address: u64| address + (first * width * size_of::<T>()) as u64;
            let chunk = Chunk {
                logits: Operand::new(scratch.address, T::DTYPE, rows, vocab_size),
                x: Operand::new(part(x.address), T::DTYPE, rows, width),
                weight: Operand::new(weight.address, T::DTYPE, vocab_size, width),
            };
            let parameters = Losses {
                logits: scratch.address,
                targets: targets.address + (first * size_of::<u32>()) as u64,
                losses: losses + (first * size_of::<f64>()) as u64,
                vocab_size: vocab_size as u64,
                scale: gradients.as_ref().map_or(0.0, |gradients| gradients.scale),
                with_gradients: u32::from(gradients.is_some()),
            };
            chunk.losses::<T>(self, parameters, ranks.as_mut())?;
            if let Some(gradients) = &mut gradients {
                chunk.gradients(self, part(gradients.d_x.address), gradients)?;
            }
        }
        adamw::cuda::sum(self, losses, tokens, 1.0, loss)
    }
}

/// A chunk of tokens.
struct Chunk {
    /// `[tokens of the chunk, V]`.
    logits: Operand,
    /// `[tokens of the chunk, C]`.
    x: Operand,
    /// `[V, C]`.
    weight: Operand,
}

impl Chunk {
    /// Computes the logits and the losses, and replaces the logits by their gradients if
    /// `parameters` request them.
    fn losses<T: Element>(
        &self,
        cuda: &Cuda,
        parameters: Losses,
        ranks: Option<&mut HeadRanks<'_, Cuda>>,
    ) -> Result<()> {
        let Chunk { logits, x, weight } = *self;
        cuda.matmul(&Matmul { out: logits, left: x, right: weight.transposed(), addend: None })?;
        match ranks {
            None => {
                let blocks = [logits.rows, 1];
                cuda.launch(&name::<T>("cross_entropy_losses"), blocks, 0, &parameters)
            }
            Some(ranks) => vocab_parallel_losses::<T>(cuda, logits.rows, parameters, ranks),
        }
    }

    /// Computes the gradients from those of the logits; the next chunk adds to d_weight.
    fn gradients<T: Element, G: Element>(
        &self,
        cuda: &Cuda,
        d_x: u64,
        gradients: &mut HeadGradients<'_, Cuda, T, G>,
    ) -> Result<()> {
        let Chunk { logits, x, weight } = *self;
        let out = Operand { address: d_x, ..x };
        cuda.matmul(&Matmul { out, left: logits, right: weight, addend: None })?;
        let address = gradients.d_weight.address;
        let out = Operand::new(address, G::DTYPE, weight.rows, weight.columns);
        let addend = (gradients.accumulation == Accumulation::Add).then_some(address);
        cuda.matmul(&Matmul { out, left: logits.transposed(), right: x, addend })?;
        gradients.accumulation = Accumulation::Add;
        Ok(())
    }
}

/// The losses of a chunk with a vocabulary sharded across ranks.
fn vocab_parallel_losses<T: Element>(
    cuda: &Cuda,
    tokens: usize,
    losses: Losses,
    ranks: &mut HeadRanks<'_, Cuda>,
) -> Result<()> {
    let HeadRanks { rows, rank, ranks: count, sums, all_reduce } = ranks;
    let table = tokens * (*count + 1);
    let parameters = VocabParallel {
        losses,
        sums: sums.address,
        first_row: rows.first as u64,
        vocab_size: rows.vocab_size as u64,
        rank: *rank as u32,
        ranks: *count as u32,
    };
    cuda.zero(sums.first(table))?;
    cuda.launch(&name::<T>("vocab_parallel_sums"), [tokens, 1], 0, &parameters)?;
    all_reduce(sums.first(table))?;
    cuda.launch(&name::<T>("vocab_parallel_losses"), [tokens, 1], 0, &parameters)
}
