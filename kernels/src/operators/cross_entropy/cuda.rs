//! The fused cross-entropy on a GPU. Logits have the type of x, and are computed in chunks of the
//! scratch buffer.

use super::{CrossEntropy, CrossEntropyArgs, HeadGradients, HeadRanks, HeadShape, HeadTeacher};
use crate::cuda::parameters::cross_entropy::{Losses, VocabParallel};
use crate::cuda::parameters::distillation;
use crate::cuda::{Cuda, Matmul, Operand, name};
use crate::linear::Accumulation;
use crate::ranks::VocabularyRows;
use crate::workspace::gpu::{chunk_elements, logit_rows, row_loss_bytes};
use crate::{Element, Memory, Result, adamw};

impl CrossEntropy for Cuda {
    fn cross_entropy<T: Element, G: Element>(
        &self,
        args: CrossEntropyArgs<'_, Self, T, G>,
    ) -> Result<()> {
        args.check(self)?;
        let CrossEntropyArgs { shape, x, weight, targets, scratch, mut loss, .. } = args;
        let CrossEntropyArgs { teacher, mut gradients, mut ranks, .. } = args;
        let HeadShape { tokens, width, vocab_size, .. } = shape;
        if let (0, Some(gradients)) = (tokens, &mut gradients)
            && gradients.accumulation == Accumulation::Overwrite
            && let Some(d_weight) = &mut gradients.d_weight
        {
            self.zero(d_weight.part(0..vocab_size * width))?;
        }
        let losses = self.scratch(row_loss_bytes(tokens))?;
        // The buffer has f32 elements.
        let after = |elements: usize| scratch.address + (elements * size_of::<f32>()) as u64;
        let teacher_logits = after(chunk_elements(&shape));
        let teacher_losses = after(2 * chunk_elements(&shape));
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
            chunk.logits(self)?;
            match &teacher {
                None => chunk.losses::<T>(self, parameters, ranks.as_mut())?,
                Some(teacher) => {
                    let losses = teacher_losses + (first * size_of::<f64>()) as u64;
                    let of_teacher =
                        TeacherChunk { teacher, first, logits: teacher_logits, losses };
                    of_teacher.losses(self, rows, parameters, ranks.as_mut())?;
                }
            }
            if let Some(gradients) = &mut gradients {
                chunk.gradients(self, part(gradients.d_x.address), gradients)?;
            }
        }
        if teacher.is_some() {
            adamw::cuda::sum(self, teacher_losses, tokens, 1.0, loss.part(1..2))?;
        }
        adamw::cuda::sum(self, losses, tokens, 1.0, loss)
    }
}

struct Chunk {
    /// `[tokens of the chunk, V]`.
    logits: Operand,
    /// `[tokens of the chunk, C]`.
    x: Operand,
    /// `[V, C]`.
    weight: Operand,
}

impl Chunk {
    fn logits(&self, cuda: &Cuda) -> Result<()> {
        let Chunk { logits, x, weight } = *self;
        cuda.matmul(&Matmul { out: logits, left: x, right: weight.transposed(), addend: None })
    }

    /// Computes the losses of the logits, and replaces the logits by their gradients if `parameters` request
    /// them.
    fn losses<T: Element>(
        &self,
        cuda: &Cuda,
        parameters: Losses,
        ranks: Option<&mut HeadRanks<'_, Cuda>>,
    ) -> Result<()> {
        let logits = self.logits;
        match ranks {
            None => {
                let blocks = [logits.rows, 1];
                cuda.launch(&name::<T>("cross_entropy_losses"), blocks, 0, &parameters)
            }
            Some(ranks) => vocab_parallel_losses::<T>(cuda, logits.rows, parameters, ranks),
        }
    }

    /// Computes the gradients from the gradients of the logits. The next chunk adds to d_weight.
    fn gradients<T: Element, G: Element>(
        &self,
        cuda: &Cuda,
        d_x: u64,
        gradients: &mut HeadGradients<'_, Cuda, T, G>,
    ) -> Result<()> {
        let Chunk { logits, x, weight } = *self;
        let out = Operand { address: d_x, ..x };
        cuda.matmul(&Matmul { out, left: logits, right: weight, addend: None })?;
        let Some(d_weight) = &gradients.d_weight else { return Ok(()) };
        let address = d_weight.address;
        let out = Operand::new(address, G::DTYPE, weight.rows, weight.columns);
        let addend = (gradients.accumulation == Accumulation::Add).then_some(address);
        cuda.matmul(&Matmul { out, left: logits.transposed(), right: x, addend })?;
        gradients.accumulation = Accumulation::Add;
        Ok(())
    }
}

/// Computes the losses of a chunk with a vocabulary sharded across ranks.
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
    cuda.zero(sums.part(0..table))?;
    cuda.launch(&name::<T>("vocab_parallel_sums"), [tokens, 1], 0, &parameters)?;
    all_reduce(sums.part(0..table))?;
    cuda.launch(&name::<T>("vocab_parallel_losses"), [tokens, 1], 0, &parameters)
}

/// The teacher's part of a chunk of tokens.
struct TeacherChunk<'c, 'a, T: Element> {
    teacher: &'c HeadTeacher<'a, Cuda, T>,
    first: usize,
    /// Addresses of the teacher's logits, and of the tokens' distillation losses.
    logits: u64,
    losses: u64,
}

impl<T: Element> TeacherChunk<'_, '_, T> {
    /// Computes the teacher's logits and both losses of the student's logits, as [`Chunk::losses`] does without a
    /// teacher.
    fn losses(
        &self,
        cuda: &Cuda,
        tokens: usize,
        losses: Losses,
        ranks: Option<&mut HeadRanks<'_, Cuda>>,
    ) -> Result<()> {
        let &TeacherChunk { teacher, first, .. } = self;
        let HeadTeacher { width, rows, temperature, scale, .. } = *teacher;
        let local = losses.vocab_size as usize;
        let vocabulary = ranks.as_ref().map_or(VocabularyRows::all(local), |ranks| ranks.rows);
        let compared = rows.saturating_sub(vocabulary.first).min(local);
        let x = teacher.x.address + (first * width * size_of::<T>()) as u64;
        if compared > 0 {
            cuda.matmul(&Matmul {
                out: Operand::new(self.logits, T::DTYPE, tokens, compared),
                left: Operand::new(x, T::DTYPE, tokens, width),
                right: Operand::new(teacher.weight.address, T::DTYPE, compared, width).transposed(),
                addend: None,
            })?;
        }
        let parameters = distillation::Losses {
            logits: losses.logits,
            teacher: self.logits,
            targets: losses.targets,
            losses: losses.losses,
            distillation_losses: self.losses,
            vocab_size: losses.vocab_size,
            compared: compared as u64,
            scale: losses.scale,
            teacher_scale: scale,
            temperature,
            with_gradients: losses.with_gradients,
        };
        let Some(HeadRanks { rows, rank, ranks, sums, all_reduce }) = ranks else {
            return cuda.launch(&name::<T>("distillation_losses"), [tokens, 1], 0, &parameters);
        };
        let table = tokens * (4 * *ranks + 1);
        let parameters = distillation::VocabParallel {
            losses: parameters,
            sums: sums.address,
            first_row: rows.first as u64,
            vocab_size: rows.vocab_size as u64,
            rank: *rank as u32,
            ranks: *ranks as u32,
        };
        cuda.zero(sums.part(0..table))?;
        let sums_of_rank = name::<T>("vocab_parallel_distillation_sums");
        cuda.launch(&sums_of_rank, [tokens, 1], 0, &parameters)?;
        all_reduce(sums.part(0..table))?;
        let losses_of_ranks = name::<T>("vocab_parallel_distillation_losses");
        cuda.launch(&losses_of_ranks, [tokens, 1], 0, &parameters)
    }
}
