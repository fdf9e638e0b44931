//! The MLP: SwiGLU (arXiv 2002.05202) between two linear layers.

use std::ops::Range;

use moh_kernels::{Accumulation, Backend, Element};

use super::{ActivationGradients, BackwardContext, Context, Linear, ResidualSum, Scratch};
use crate::tensors::{Division, TensorList};
use crate::{ModelConfig, Result};

/// `y = residual + down(SwiGLU(gate_up(x)))`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Mlp {
    pub gate_up: Linear,
    pub down: Linear,
}

impl Mlp {
    pub fn new(list: &mut TensorList<'_>, config: &ModelConfig) -> Self {
        let (hidden, width) = (config.hidden_size, config.intermediate_size);
        let gate_up = [("mlp.gate_proj.weight", width), ("mlp.up_proj.weight", width)];
        Mlp {
            gate_up: Linear::by_outputs(list, &gate_up, hidden, Division::Mlp),
            down: Linear::by_inputs(list, "mlp.down_proj.weight", [hidden, width], Division::Mlp),
        }
    }

    /// Adds the MLP of `x`, `[M, C]`, to the residual stream.
    pub fn forward<B: Backend, T: Element>(
        &self,
        cx: &Context<'_, B, T>,
        x: &B::Buffer<T>,
        gate_up: &mut B::Buffer<T>,
        scratch: &mut Scratch<B, T>,
        sum: ResidualSum<'_, B, T>,
    ) -> Result<()> {
        self.recompute(cx, x, gate_up, scratch)?;
        let (n, width) = (cx.num_tokens(), self.down.inputs);
        cx.backend.swiglu_forward(
            width,
            B::view(gate_up, 0..n * 2 * width),
            B::view_mut(&mut scratch.hidden, 0..n * width),
        )?;
        let hidden = B::view(&scratch.hidden, 0..n * width);
        self.down.add_to_stream(cx, hidden, &mut scratch.gathered, sum)
    }

    /// Recomputes the input of the backward pass.
    pub fn recompute<B: Backend, T: Element>(
        &self,
        cx: &Context<'_, B, T>,
        x: &B::Buffer<T>,
        gate_up: &mut B::Buffer<T>,
        scratch: &mut Scratch<B, T>,
    ) -> Result<()> {
        let x = cx.all_gather(self.gate_up.inputs, x, &mut scratch.gathered)?;
        self.gate_up.forward(cx, x, None, gate_up)
    }

    /// Computes the gradient of `x` from the gradient of the residual stream, in `d.hidden`, and returns its range. The
    /// gradients of gate and up overwrite their values.
    pub fn backward<B: Backend, T: Element, G: Element>(
        &self,
        cx: &mut BackwardContext<'_, B, T, G>,
        x: &B::Buffer<T>,
        gate_up: &mut B::Buffer<T>,
        scratch: &mut Scratch<B, T>,
        d: &mut ActivationGradients<B, T>,
    ) -> Result<Range<usize>> {
        let Scratch { hidden, gathered } = scratch;
        let (n, width) = (cx.num_tokens(), self.down.inputs);
        let d_y = cx.all_gather(self.down.outputs, &d.residual, gathered)?;
        self.down.backward_input(cx, d_y, hidden, Accumulation::Overwrite)?;
        let projected = B::view_mut(gate_up, 0..n * 2 * width);
        cx.backend.swiglu_backward(width, projected, B::view_mut(hidden, 0..n * width))?;
        self.down.backward_weight(cx, B::view(hidden, 0..n * width), d_y)?;
        let d_gate_up = B::view(gate_up, 0..n * 2 * width);
        let d_x = &mut d.hidden;
        self.gate_up.backward(cx, x, d_gate_up, gathered, d_x, Accumulation::Overwrite)
    }
}
