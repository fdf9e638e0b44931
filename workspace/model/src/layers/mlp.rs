//! The MLP: SwiGLU (arXiv 2002.05202) between two linear layers.

use std::ops::Range;

use moh_kernels::{Accumulation, AnyBuffer, Backend, for_element};

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
    pub fn forward<B: Backend>(
        &self,
        cx: &Context<'_, B>,
        x: &AnyBuffer<B>,
        gate_up: &mut AnyBuffer<B>,
        scratch: &mut Scratch<B>,
        sum: ResidualSum<'_, B>,
    ) -> Result<()> {
        self.recompute(cx, x, gate_up, scratch)?;
        let (n, width) = (cx.num_tokens(), self.down.inputs);
        let (projected, hidden) = (0..n * 2 * width, 0..n * width);
        for_element!(T: gate_up.element() => cx.backend.swiglu_forward::<T>(
            width,
            gate_up.view(projected).typed(),
            scratch.hidden.view_mut(hidden.clone()).typed(),
        ))?;
        let hidden = scratch.hidden.view(hidden);
        self.down.add_to_stream(cx, hidden, &mut scratch.gathered, sum)
    }

    /// Recomputes the input of the backward pass.
    pub fn recompute<B: Backend>(
        &self,
        cx: &Context<'_, B>,
        x: &AnyBuffer<B>,
        gate_up: &mut AnyBuffer<B>,
        scratch: &mut Scratch<B>,
    ) -> Result<()> {
        let x = cx.all_gather(self.gate_up.inputs, x, &mut scratch.gathered)?;
        self.gate_up.forward(cx, x, None, gate_up)
    }

    /// Computes the gradient of `x` from the gradient of the residual stream, in `d.hidden`, and returns its range. The
    /// gradients of gate and up overwrite their values.
    pub fn backward<B: Backend>(
        &self,
        cx: &mut BackwardContext<'_, B>,
        x: &AnyBuffer<B>,
        gate_up: &mut AnyBuffer<B>,
        scratch: &mut Scratch<B>,
        d: &mut ActivationGradients<B>,
    ) -> Result<Range<usize>> {
        let Scratch { hidden, gathered } = scratch;
        let (n, width) = (cx.num_tokens(), self.down.inputs);
        let d_y = cx.all_gather(self.down.outputs, &d.residual, gathered)?;
        self.down.backward_input(cx, d_y, hidden, Accumulation::Overwrite)?;
        let (projected, activated) = (0..n * 2 * width, 0..n * width);
        for_element!(T: gate_up.element() => cx.backend.swiglu_backward::<T>(
            width,
            gate_up.view_mut(projected.clone()).typed(),
            hidden.view_mut(activated.clone()).typed(),
        ))?;
        self.down.backward_weight(cx, hidden.view(activated), d_y)?;
        let d_gate_up = gate_up.view(projected);
        let d_x = &mut d.hidden;
        self.gate_up.backward(cx, x, d_gate_up, gathered, d_x, Accumulation::Overwrite)
    }
}
