//! Linear layers without bias, divided among tensor-parallel ranks by the columns or the rows of
//! the weight's transpose (arXiv 1909.08053): each rank computes some of the outputs, or its part
//! of the sum over the inputs.

use std::ops::Range;

use moh_kernels::linear::{LinearBackwardInput, LinearBackwardWeight, LinearForward};
use moh_kernels::{Accumulation, Backend, Element, View, ViewMut};

use super::{BackwardContext, Context};
use crate::Error;
use crate::parameters::ParameterRange;
use crate::tensors::{Division, TensorList};

/// `y = x W^T` of all tokens, with x `[M, C]` of the rank's own tokens and some of the rows of W
/// `[outputs, C]`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ColumnParallelLinear {
    weight: ParameterRange,
    inputs: usize,
}

impl ColumnParallelLinear {
    /// Lists the matrices, one below another, whose names and outputs are `outputs`; `by` says
    /// what ranks divide them by.
    pub fn new(
        list: &mut TensorList<'_>,
        outputs: &[(&str, usize)],
        inputs: usize,
        by: fn(usize) -> Division,
    ) -> Self {
        let matrix = |&(name, outputs): &(&str, usize)| list.matrix(name, [outputs, inputs], by(0));
        let parts: Vec<_> = outputs.iter().map(matrix).collect();
        ColumnParallelLinear { weight: ParameterRange::joined(parts), inputs }
    }

    /// The weight and its inputs.
    pub fn linear_weight(&self) -> (ParameterRange, usize) {
        (self.weight.clone(), self.inputs)
    }

    /// Number of local outputs.
    pub fn outputs(&self) -> usize {
        self.weight.range.len() / self.inputs
    }

    /// The input of all tokens, from that of the rank's own tokens.
    pub fn gather_input<'v, B: Backend, T: Element>(
        &self,
        cx: &Context<'_, B, T>,
        x: &'v B::Buffer<T>,
        gathered: &'v mut Option<B::Buffer<T>>,
    ) -> Result<View<'v, B, T>, Error> {
        cx.all_gather(self.inputs, x, gathered)
    }

    /// Writes `y`, `[N, outputs]`, of the input of all tokens.
    pub fn forward<B: Backend, T: Element>(
        &self,
        cx: &Context<'_, B, T>,
        x: View<'_, B, T>,
        y: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        let y = B::view_mut(y, 0..cx.num_tokens() * self.outputs());
        forward(cx, &self.weight, self.inputs, x, None, y)
    }

    /// Adds the gradient of the weight, and writes or adds that of `x` to `d_x`, where it returns the
    /// range of the rank's own tokens.
    pub fn backward<B: Backend, T: Element, G: Element>(
        &self,
        cx: &mut BackwardContext<'_, B, T, G>,
        x: &B::Buffer<T>,
        d_y: View<'_, B, T>,
        gathered: &mut Option<B::Buffer<T>>,
        d_x: &mut B::Buffer<T>,
        accumulation: Accumulation,
    ) -> Result<Range<usize>, Error> {
        let x = cx.all_gather(self.inputs, x, gathered)?;
        backward_weight(cx, &self.weight, self.inputs, x, B::reborrow(d_y))?;
        backward_input(cx, &self.weight, self.inputs, d_y, d_x, accumulation)?;
        cx.reduce_scatter(self.inputs, d_x)
    }
}

/// `y = residual + x W^T` of the rank's own tokens, with x `[N, inputs]` of all tokens, of which a
/// rank has some of the columns, as of W `[C, inputs]`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RowParallelLinear {
    weight: ParameterRange,
    outputs: usize,
}

/// The buffers of a sum `y = x + ...`, both `[M, C]`.
pub(crate) struct ResidualSum<'a, B: Backend, T: Element> {
    pub x: &'a B::Buffer<T>,
    pub y: &'a mut B::Buffer<T>,
}

impl RowParallelLinear {
    /// Lists the matrix; `by` says what ranks divide it by.
    pub fn new(
        list: &mut TensorList<'_>,
        name: &str,
        [outputs, inputs]: [usize; 2],
        by: fn(usize) -> Division,
    ) -> Self {
        RowParallelLinear { weight: list.matrix(name, [outputs, inputs], by(1)), outputs }
    }

    /// The weight and its inputs.
    pub fn linear_weight(&self) -> (ParameterRange, usize) {
        (self.weight.clone(), self.inputs())
    }

    /// Number of local inputs.
    pub fn inputs(&self) -> usize {
        self.weight.range.len() / self.outputs
    }

    /// Adds the product to the residual stream.
    pub fn forward<B: Backend, T: Element>(
        &self,
        cx: &Context<'_, B, T>,
        x: View<'_, B, T>,
        gathered: &mut Option<B::Buffer<T>>,
        sum: ResidualSum<'_, B, T>,
    ) -> Result<(), Error> {
        let (width, len) = (self.outputs, cx.own_tokens().local() * self.outputs);
        let residual = B::view(sum.x, 0..len);
        let Some(partial) = gathered else {
            let y = B::view_mut(sum.y, 0..len);
            return forward(cx, &self.weight, self.inputs(), x, Some(residual), y);
        };
        let y = B::view_mut(partial, 0..cx.num_tokens() * width);
        forward(cx, &self.weight, self.inputs(), x, None, y)?;
        let own = cx.reduce_scatter(width, partial)?;
        Ok(cx.backend.add(residual, B::view(partial, own), B::view_mut(sum.y, 0..len))?)
    }

    /// The gradient of the output of all tokens, from that of the residual stream.
    pub fn gather_gradient<'v, B: Backend, T: Element>(
        &self,
        cx: &Context<'_, B, T>,
        d_residual: &'v B::Buffer<T>,
        gathered: &'v mut Option<B::Buffer<T>>,
    ) -> Result<View<'v, B, T>, Error> {
        cx.all_gather(self.outputs, d_residual, gathered)
    }

    /// Writes the gradient of the input, `[N, inputs]`.
    pub fn backward_input<B: Backend, T: Element>(
        &self,
        cx: &Context<'_, B, T>,
        d_y: View<'_, B, T>,
        d_x: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        backward_input(cx, &self.weight, self.inputs(), d_y, d_x, Accumulation::Overwrite)
    }

    /// Adds the gradient of the weight.
    pub fn backward_weight<B: Backend, T: Element, G: Element>(
        &self,
        cx: &mut BackwardContext<'_, B, T, G>,
        x: View<'_, B, T>,
        d_y: View<'_, B, T>,
    ) -> Result<(), Error> {
        backward_weight(cx, &self.weight, self.inputs(), x, d_y)
    }
}

/// Writes `residual + x W^T`, or the product alone.
fn forward<B: Backend, T: Element>(
    cx: &Context<'_, B, T>,
    weight: &ParameterRange,
    inputs: usize,
    x: View<'_, B, T>,
    residual: Option<View<'_, B, T>>,
    mut y: ViewMut<'_, B, T>,
) -> Result<(), Error> {
    Ok(cx.backend.linear_forward(LinearForward {
        inputs,
        x: B::reborrow(x),
        weight: cx.weights.get(weight),
        residual: residual.map(B::reborrow),
        y: B::reborrow_mut(&mut y),
        independent: cx.tokens.independent,
        packed: cx.packed(weight),
    })?)
}

fn backward_weight<B: Backend, T: Element, G: Element>(
    cx: &mut BackwardContext<'_, B, T, G>,
    weight: &ParameterRange,
    inputs: usize,
    x: View<'_, B, T>,
    d_y: View<'_, B, T>,
) -> Result<(), Error> {
    let accumulation = cx.gradients.accumulation(weight.buffer);
    cx.forward.backend.linear_backward_weight(LinearBackwardWeight {
        inputs,
        x: B::reborrow(x),
        d_y: B::reborrow(d_y),
        d_weight: cx.gradients.get_mut(weight),
        accumulation,
    })?;
    Ok(())
}

/// Writes or adds `d_x`, `[N, inputs]`. Buffers may be longer than the tensors in them.
fn backward_input<B: Backend, T: Element>(
    cx: &Context<'_, B, T>,
    weight: &ParameterRange,
    inputs: usize,
    d_y: View<'_, B, T>,
    d_x: &mut B::Buffer<T>,
    accumulation: Accumulation,
) -> Result<(), Error> {
    cx.backend.linear_backward_input(LinearBackwardInput {
        inputs,
        d_y: B::reborrow(d_y),
        weight: cx.weights.get(weight),
        d_x: B::view_mut(d_x, 0..cx.num_tokens() * inputs),
        accumulation,
    })?;
    Ok(())
}
