//! AdamW and the squared norm on a GPU.

use bytemuck::{Pod, Zeroable};

use super::{AdamW, Constants, check};
use crate::cuda::{Cuda, CudaView, CudaViewMut, blocks, name};
use crate::error::{Result, check_len};
use crate::scalar::Element;

/// `SquaredNorm` of adamw.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct SquaredNorm {
    x: u64,
    partial: u64,
    count: u64,
}

/// `Sum` of adamw.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Sum {
    x: u64,
    out: u64,
    count: u64,
    scale: f64,
}

/// `Update` of adamw.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Update {
    squared_norm: u64,
    gradients: u64,
    weights: u64,
    remainder: u64,
    first_moment: u64,
    second_moment: u64,
    count: u64,
    clip_norm: f64,
    constants: Constants,
}

pub(crate) fn squared_norm<G: Element>(
    cuda: &Cuda,
    x: CudaView<'_, G>,
    out: CudaViewMut<'_, f64>,
) -> Result<()> {
    check_len("squared_norm", "out", out.len, 1)?;
    let parts = blocks(x.len);
    let partial = cuda.scratch(parts * size_of::<f64>())?;
    let parameters = SquaredNorm { x: x.address, partial, count: x.len as u64 };
    cuda.launch(&name::<G>("squared_norm"), [parts, 1], 0, &parameters)?;
    sum(cuda, partial, parts, 1.0, out)
}

/// `out[0] += scale * sum(x)`, `x` being `count` f64 in scratch memory.
pub(crate) fn sum(
    cuda: &Cuda,
    x: u64,
    count: usize,
    scale: f64,
    out: CudaViewMut<'_, f64>,
) -> Result<()> {
    let parameters = Sum { x, out: out.address, count: count as u64, scale };
    cuda.launch("sum_f64", [1, 1], 0, &parameters)
}

#[allow(clippy::too_many_arguments)]
pub(crate) fn adamw<T: Element, G: Element, M: Element>(
    cuda: &Cuda,
    step: &AdamW,
    squared_norm: CudaView<'_, f64>,
    gradients: CudaView<'_, G>,
    weights: CudaViewMut<'_, T>,
    remainder: Option<CudaViewMut<'_, i16>>,
    first_moment: CudaViewMut<'_, M>,
    second_moment: CudaViewMut<'_, M>,
) -> Result<()> {
    check::<T>(
        gradients.len,
        squared_norm.len,
        weights.len,
        remainder.as_ref().map(|remainder| remainder.len),
        [first_moment.len, second_moment.len],
    )?;
    let parameters = Update {
        squared_norm: squared_norm.address,
        gradients: gradients.address,
        weights: weights.address,
        remainder: remainder.map_or(0, |remainder| remainder.address),
        first_moment: first_moment.address,
        second_moment: second_moment.address,
        count: gradients.len as u64,
        clip_norm: step.clip_norm,
        constants: Constants::new(step),
    };
    let kernel = name::<M>(&name::<G>(&name::<T>("adamw")));
    cuda.launch(&kernel, [blocks(gradients.len), 1], 0, &parameters)
}
