//! The fused cross-entropy on a GPU. Logits are of the type of x, in chunks of the scratch buffer.

use bytemuck::{Pod, Zeroable};

use super::{GPU_CHUNK, HeadGradients, HeadShape, Lens, check, check_ranks};
use crate::adamw;
use crate::backend::{Accumulation, Backend};
use crate::cuda::{Cuda, CudaView, CudaViewMut, Gemm, Operand, name};
use crate::error::Result;
use crate::ranks::HeadRanks;
use crate::scalar::Element;

/// `Losses` of cross_entropy.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Losses {
    logits: u64,
    targets: u64,
    losses: u64,
    vocab_size: u64,
    scale: f32,
    with_gradients: u32,
}

/// `Divided` of cross_entropy.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Divided {
    losses: Losses,
    sums: u64,
    first_row: u64,
    vocab_size: u64,
    rank: u32,
    ranks: u32,
}

/// Tokens of a chunk of logits of `bytes` bytes each.
fn chunk_rows(shape: &HeadShape, bytes: usize) -> usize {
    GPU_CHUNK.min(shape.tokens.max(1)) * size_of::<f32>() / bytes
}

pub(crate) fn sums(shape: &HeadShape, ranks: usize) -> usize {
    // The type of the logits is not known here; those of the smaller one come more at a time.
    chunk_rows(shape, size_of::<half::bf16>()) * (ranks + 1)
}

pub(crate) fn scratch(shape: &HeadShape) -> usize {
    GPU_CHUNK.min(shape.tokens.max(1)) * shape.vocab_size
}

/// Bytes of the tokens' losses, which do not lie in the caller's scratch.
pub(crate) fn own_scratch_bytes(tokens: usize) -> usize {
    tokens * size_of::<f64>()
}

/// The scratch, the loss and the gradients.
type Outputs<'s, 'l, 'g, T, G> =
    (CudaViewMut<'s, f32>, CudaViewMut<'l, f64>, Option<HeadGradients<'g, Cuda, T, G>>);

pub(crate) fn cross_entropy<T: Element, G: Element>(
    cuda: &Cuda,
    shape: &HeadShape,
    x: CudaView<'_, T>,
    weight: CudaView<'_, T>,
    targets: CudaView<'_, u32>,
    (scratch, loss, mut gradients): Outputs<'_, '_, '_, T, G>,
    mut ranks: Option<HeadRanks<'_, Cuda>>,
) -> Result<()> {
    check(
        shape,
        &Lens {
            x: x.len,
            weight: weight.len,
            targets: targets.len,
            scratch: (scratch.len, self::scratch(shape)),
            loss: loss.len,
            gradients: gradients.as_ref().map(|g| [g.d_x.len, g.d_weight.len]),
            sums: ranks.as_ref().map(|ranks| (ranks.sums.len, self::sums(shape, ranks.rank.1))),
        },
    )?;
    check_ranks(shape, ranks.as_ref())?;
    let &HeadShape { tokens, width, vocab_size, .. } = shape;
    if let (0, Some(gradients)) = (tokens, &mut gradients)
        && gradients.accumulation == Accumulation::Overwrite
    {
        cuda.zero(gradients.d_weight.first(shape.vocab_size * width))?;
    }
    let losses = cuda.scratch(own_scratch_bytes(tokens))?;
    let chunk = chunk_rows(shape, size_of::<T>());
    for first in (0..tokens).step_by(chunk.max(1)) {
        let rows = chunk.min(tokens - first);
        let part = |address: u64| address + (first * width * size_of::<T>()) as u64;
        let logits = Operand::new(scratch.address, T::DTYPE, rows, vocab_size);
        let x = Operand::new(part(x.address), T::DTYPE, rows, width);
        let weight = Operand::new(weight.address, T::DTYPE, vocab_size, width);
        cuda.gemm(&Gemm { out: logits, left: x, right: weight.transposed(), addend: None })?;
        let parameters = Losses {
            logits: scratch.address,
            targets: targets.address + (first * size_of::<u32>()) as u64,
            losses: losses + (first * size_of::<f64>()) as u64,
            vocab_size: vocab_size as u64,
            scale: gradients.as_ref().map_or(0.0, |gradients| gradients.scale),
            with_gradients: u32::from(gradients.is_some()),
        };
        match &mut ranks {
            None => cuda.launch(&name::<T>("cross_entropy_losses"), [rows, 1], 0, &parameters)?,
            Some(ranks) => divided_losses::<T>(cuda, rows, parameters, ranks)?,
        }
        if let Some(gradients) = &mut gradients {
            let d_x = Operand::new(part(gradients.d_x.address), T::DTYPE, rows, width);
            cuda.gemm(&Gemm { out: d_x, left: logits, right: weight, addend: None })?;
            let address = gradients.d_weight.address;
            let out = Operand::new(address, G::DTYPE, vocab_size, width);
            let left = logits.transposed();
            let adds = gradients.accumulation == Accumulation::Add;
            cuda.gemm(&Gemm { out, left, right: x, addend: adds.then_some(address) })?;
            gradients.accumulation = Accumulation::Add;
        }
    }
    adamw::cuda::sum(cuda, losses, tokens, 1.0, loss)
}

/// The losses of a chunk whose logits are divided among ranks.
fn divided_losses<T: Element>(
    cuda: &Cuda,
    tokens: usize,
    losses: Losses,
    ranks: &mut HeadRanks<'_, Cuda>,
) -> Result<()> {
    let HeadRanks { rows, rank: (rank, count), sums, all_reduce } = ranks;
    let table = tokens * (*count + 1);
    let parameters = Divided {
        losses,
        sums: sums.address,
        first_row: rows.first as u64,
        vocab_size: rows.vocab_size as u64,
        rank: *rank as u32,
        ranks: *count as u32,
    };
    cuda.zero(sums.first(table))?;
    cuda.launch(&name::<T>("divided_sums"), [tokens, 1], 0, &parameters)?;
    all_reduce(sums.first(table))?;
    cuda.launch(&name::<T>("divided_losses"), [tokens, 1], 0, &parameters)
}
