//! The MLP: SwiGLU (arXiv 2002.05202) between two linear layers.

use std::ops::Range;

use moh_kernels::{Accumulation, Backend, Element, Memory};

use super::{
    ActivationGradients, BackwardContext, ColumnParallelLinear, Context, ResidualSum,
    RowParallelLinear, Scratch,
};
use crate::parameters::ParameterRange;
use crate::pass_sizes::PassSizes;
use crate::tensors::{Division, TensorList};
use crate::{Error, ModelConfig};

/// `y = residual + down(SwiGLU(gate_up(x)))`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Mlp {
    gate_up: ColumnParallelLinear,
    down: RowParallelLinear,
}

/// What the backward pass reads and is not cheap to recompute. SwiGLU's output is not saved: its
/// backward pass computes it beside the gradients.
pub(crate) struct SavedMlp<M: Memory, T: Element> {
    /// Gate and up projections, `[N, 2I]`.
    pub gate_up: M::Buffer<T>,
}

impl<M: Memory, T: Element> SavedMlp<M, T> {
    /// Allocates the buffers of passes of these sizes.
    pub fn new(memory: &M, sizes: &PassSizes<'_>) -> Result<Self, Error> {
        let width = sizes.share().mlp_width(sizes.config);
        Ok(SavedMlp { gate_up: memory.allocate(sizes.tokens() * 2 * width)? })
    }
}

impl Mlp {
    /// The weights of its linear layers, and their inputs.
    pub fn linear_weights(&self) -> Vec<(ParameterRange, usize)> {
        vec![self.gate_up.linear_weight(), self.down.linear_weight()]
    }

    /// Lists the projections.
    pub fn new(list: &mut TensorList<'_>, config: &ModelConfig) -> Self {
        let (hidden, width) = (config.hidden_size, config.intermediate_size);
        let gate_up = [("mlp.gate_proj.weight", width), ("mlp.up_proj.weight", width)];
        Mlp {
            gate_up: ColumnParallelLinear::new(list, &gate_up, hidden, Division::Mlp),
            down: RowParallelLinear::new(
                list,
                "mlp.down_proj.weight",
                [hidden, width],
                Division::Mlp,
            ),
        }
    }

    /// Adds the MLP of `x`, `[M, C]`, to the residual stream.
    pub fn forward<B: Backend, T: Element>(
        &self,
        cx: &Context<'_, B, T>,
        x: &B::Buffer<T>,
        saved: &mut SavedMlp<B, T>,
        scratch: &mut Scratch<B, T>,
        sum: ResidualSum<'_, B, T>,
    ) -> Result<(), Error> {
        self.recompute(cx, x, saved, scratch)?;
        let (n, width) = (cx.num_tokens(), self.down.inputs());
        cx.backend.swiglu_forward(
            width,
            B::view(&saved.gate_up, 0..n * 2 * width),
            B::view_mut(&mut scratch.hidden, 0..n * width),
        )?;
        let hidden = B::view(&scratch.hidden, 0..n * width);
        self.down.forward(cx, hidden, &mut scratch.gathered, sum)
    }

    /// Recomputes the input of the backward pass.
    pub fn recompute<B: Backend, T: Element>(
        &self,
        cx: &Context<'_, B, T>,
        x: &B::Buffer<T>,
        saved: &mut SavedMlp<B, T>,
        scratch: &mut Scratch<B, T>,
    ) -> Result<(), Error> {
        let x = self.gate_up.gather_input(cx, x, &mut scratch.gathered)?;
        self.gate_up.forward(cx, x, &mut saved.gate_up)
    }

    /// From the gradient of the residual stream computes that of `x` in `d.hidden`, and returns its
    /// range; the gradient of gate and up overwrites their values.
    pub fn backward<B: Backend, T: Element, G: Element>(
        &self,
        cx: &mut BackwardContext<'_, B, T, G>,
        x: &B::Buffer<T>,
        saved: &mut SavedMlp<B, T>,
        scratch: &mut Scratch<B, T>,
        d: &mut ActivationGradients<B, T>,
    ) -> Result<Range<usize>, Error> {
        let Scratch { hidden, gathered } = scratch;
        let (n, width) = (cx.num_tokens(), self.down.inputs());
        let d_y = self.down.gather_gradient(cx, &d.residual, gathered)?;
        self.down.backward_input(cx, d_y, hidden)?;
        let gate_up = B::view_mut(&mut saved.gate_up, 0..n * 2 * width);
        cx.backend.swiglu_backward(width, gate_up, B::view_mut(hidden, 0..n * width))?;
        self.down.backward_weight(cx, B::view(hidden, 0..n * width), d_y)?;
        let d_gate_up = B::view(&saved.gate_up, 0..n * 2 * width);
        let d_x = &mut d.hidden;
        self.gate_up.backward(cx, x, d_gate_up, gathered, d_x, Accumulation::Overwrite)
    }
}
