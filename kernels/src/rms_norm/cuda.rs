//! RMSNorm on a GPU.

use bytemuck::{Pod, Zeroable};

use super::check;
use crate::cuda::{Cuda, CudaView, CudaViewMut, THREADS, name};
use crate::error::{Result, check_len};
use crate::scalar::Element;

/// Parts of the tokens whose gradients of the weight are summed apart, at most.
const PARTS: usize = 64;

/// `Forward` of rms_norm.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Forward {
    x: u64,
    weight: u64,
    y: u64,
    inv_rms: u64,
    width: u64,
    eps: f64,
}

/// `Backward` of rms_norm.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Backward {
    x: u64,
    weight: u64,
    inv_rms: u64,
    d_y: u64,
    d_x: u64,
    partial: u64,
    d_weight: u64,
    tokens: u64,
    width: u64,
    parts: u64,
}

pub(crate) fn forward<T: Element>(
    cuda: &Cuda,
    eps: f64,
    x: CudaView<'_, T>,
    weight: CudaView<'_, T>,
    y: CudaViewMut<'_, T>,
    inv_rms: CudaViewMut<'_, f32>,
) -> Result<()> {
    let width = check("rms_norm_forward", x.len, weight.len, inv_rms.len)?;
    check_len("rms_norm_forward", "y", y.len, x.len)?;
    let parameters = Forward {
        x: x.address,
        weight: weight.address,
        y: y.address,
        inv_rms: inv_rms.address,
        width: width as u64,
        eps,
    };
    cuda.launch(&name::<T>("rms_norm_forward"), [inv_rms.len, 1], 0, &parameters)
}

/// Scratch of the backward pass.
pub(crate) fn scratch_bytes(tokens: usize, width: usize) -> usize {
    tokens.min(PARTS) * width * size_of::<f32>()
}

pub(crate) fn backward<T: Element, G: Element>(
    cuda: &Cuda,
    x: CudaView<'_, T>,
    weight: CudaView<'_, T>,
    inv_rms: CudaView<'_, f32>,
    d_y: CudaView<'_, T>,
    d_x: CudaViewMut<'_, T>,
    d_weight: CudaViewMut<'_, G>,
) -> Result<()> {
    let width = check("rms_norm_backward", x.len, weight.len, inv_rms.len)?;
    check_len("rms_norm_backward", "d_y", d_y.len, x.len)?;
    check_len("rms_norm_backward", "d_x", d_x.len, x.len)?;
    check_len("rms_norm_backward", "d_weight", d_weight.len, width)?;
    let tokens = inv_rms.len;
    let parts = tokens.min(PARTS);
    let parameters = Backward {
        x: x.address,
        weight: weight.address,
        inv_rms: inv_rms.address,
        d_y: d_y.address,
        d_x: d_x.address,
        partial: cuda.scratch(scratch_bytes(tokens, width))?,
        d_weight: d_weight.address,
        tokens: tokens as u64,
        width: width as u64,
        parts: parts as u64,
    };
    let columns = width.div_ceil(THREADS);
    cuda.launch(&name::<T>("rms_norm_backward_input"), [tokens, 1], 0, &parameters)?;
    cuda.launch(&name::<T>("rms_norm_backward_partial"), [columns, parts], 0, &parameters)?;
    cuda.launch(&name::<G>("rms_norm_backward_weight"), [columns, 1], 0, &parameters)
}
