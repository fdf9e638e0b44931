//! The fused cross-entropy on a GPU. Logits are of the type of x, in chunks of the scratch buffer.

use bytemuck::{Pod, Zeroable};

use super::{HeadGradients, HeadShape, Lens, check};
use crate::adamw;
use crate::cuda::{Cuda, CudaView, CudaViewMut, Gemm, Operand, name};
use crate::error::Result;
use crate::scalar::Element;

/// Tokens of a chunk of f32 logits; of bf16 logits twice as many fit.
const CHUNK: usize = 1024;

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

pub(crate) fn scratch(shape: &HeadShape) -> usize {
    CHUNK.min(shape.tokens.max(1)) * shape.vocab_size
}

#[allow(clippy::too_many_arguments)]
pub(crate) fn cross_entropy<T: Element, G: Element>(
    cuda: &Cuda,
    shape: &HeadShape,
    x: CudaView<'_, T>,
    weight: CudaView<'_, T>,
    targets: CudaView<'_, u32>,
    scratch: CudaViewMut<'_, f32>,
    loss: CudaViewMut<'_, f64>,
    gradients: Option<HeadGradients<'_, Cuda, T, G>>,
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
        },
    )?;
    let &HeadShape { tokens, width, vocab_size } = shape;
    let losses = cuda.scratch(tokens * size_of::<f64>())?;
    let chunk = self::scratch(shape) * size_of::<f32>() / (vocab_size * size_of::<T>());
    let device = cuda.device();
    for first in (0..tokens).step_by(chunk.max(1)) {
        let rows = chunk.min(tokens - first);
        let part = |address: u64| address + (first * width * size_of::<T>()) as u64;
        let logits = Operand::new(scratch.address, T::DTYPE, rows, vocab_size);
        let x = Operand::new(part(x.address), T::DTYPE, rows, width);
        let weight = Operand::new(weight.address, T::DTYPE, vocab_size, width);
        device.gemm(&Gemm { out: logits, left: x, right: weight.transposed(), addend: None })?;
        let parameters = Losses {
            logits: scratch.address,
            targets: targets.address + (first * size_of::<u32>()) as u64,
            losses: losses + (first * size_of::<f64>()) as u64,
            vocab_size: vocab_size as u64,
            scale: gradients.as_ref().map_or(0.0, |gradients| gradients.scale),
            with_gradients: u32::from(gradients.is_some()),
        };
        cuda.launch(&name::<T>("cross_entropy_losses"), [rows, 1], 0, &parameters)?;
        if let Some(gradients) = &gradients {
            let d_x = Operand::new(part(gradients.d_x.address), T::DTYPE, rows, width);
            device.gemm(&Gemm { out: d_x, left: logits, right: weight, addend: None })?;
            let address = gradients.d_weight.address;
            let out = Operand::new(address, G::DTYPE, vocab_size, width);
            let left = logits.transposed();
            device.gemm(&Gemm { out, left, right: x, addend: Some(address) })?;
        }
    }
    adamw::cuda::sum(cuda, losses, tokens, 1.0, loss)
}
