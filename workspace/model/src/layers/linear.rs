//! Linear layers without bias. Tensor-parallel ranks divide them by the columns or the rows of the weight's transpose
//! (arXiv 1909.08053): each rank computes some of the outputs, or its part of the sum over the inputs.

use std::ops::Range;

use moh_kernels::linear::{LinearBackwardInput, LinearBackwardWeight, LinearForward};
use moh_kernels::{Accumulation, Backend, Element, View};

use super::{BackwardContext, Context};
use crate::Result;
use crate::parameters::ParameterRange;
use crate::tensors::{Division, TensorList};

/// `y = x W^T` of all tokens, with the local part of W, `[outputs, inputs]`. Buffers may be longer than the
/// tensors in them.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Linear {
    pub weight: ParameterRange,
    pub outputs: usize,
    pub inputs: usize,
}

/// The buffers of a sum `y = x + ...`, both `[M, C]`.
pub(crate) struct ResidualSum<'a, B: Backend, T: Element> {
    pub x: &'a B::Buffer<T>,
    pub y: &'a mut B::Buffer<T>,
}

impl Linear {
    /// Returns the layer with the local rows `weight` of a matrix with `inputs` columns.
    pub fn at(weight: ParameterRange, inputs: usize) -> Self {
        Linear { outputs: weight.range.len() / inputs.max(1), weight, inputs }
    }

    /// Lists matrices with the names and outputs of `outputs`, one below another; ranks divide the outputs by `by`.
    pub fn by_outputs(
        list: &mut TensorList<'_>,
        outputs: &[(&str, usize)],
        inputs: usize,
        by: fn(usize) -> Division,
    ) -> Self {
        let matrix = |&(name, outputs): &(&str, usize)| list.matrix(name, [outputs, inputs], by(0));
        let parts: Vec<_> = outputs.iter().map(matrix).collect();
        Self::at(ParameterRange::joined(parts), inputs)
    }

    /// Lists a matrix; ranks divide its inputs by `by`.
    pub fn by_inputs(
        list: &mut TensorList<'_>,
        name: &str,
        [outputs, inputs]: [usize; 2],
        by: fn(usize) -> Division,
    ) -> Self {
        let weight = list.matrix(name, [outputs, inputs], by(1));
        Linear { inputs: weight.range.len() / outputs.max(1), weight, outputs }
    }

    /// Writes `residual + x W^T`, or the product alone, `[N, outputs]`, with x `[N, inputs]`.
    pub fn forward<B: Backend, T: Element>(
        &self,
        cx: &Context<'_, B, T>,
        x: View<'_, B, T>,
        residual: Option<View<'_, B, T>>,
        y: &mut B::Buffer<T>,
    ) -> Result<()> {
        Ok(cx.backend.linear_forward(LinearForward {
            inputs: self.inputs,
            x: B::reborrow(x),
            weight: cx.weights.get(&self.weight),
            residual: residual.map(B::reborrow),
            y: B::view_mut(y, 0..cx.num_tokens() * self.outputs),
            independent: cx.tokens.independent,
            packed: cx.packed(&self.weight),
        })?)
    }

    /// Adds the product of x, `[N, inputs]`, to the residual stream of the rank's own tokens. With tensor parallelism x
    /// has only the rank's columns.
    pub fn add_to_stream<B: Backend, T: Element>(
        &self,
        cx: &Context<'_, B, T>,
        x: View<'_, B, T>,
        gathered: &mut Option<B::Buffer<T>>,
        sum: ResidualSum<'_, B, T>,
    ) -> Result<()> {
        let len = cx.own_tokens().local() * self.outputs;
        let residual = B::view(sum.x, 0..len);
        let Some(partial) = gathered else { return self.forward(cx, x, Some(residual), sum.y) };
        self.forward(cx, x, None, partial)?;
        let own = cx.reduce_scatter(self.outputs, partial)?;
        Ok(cx.backend.add(residual, B::view(partial, own), B::view_mut(sum.y, 0..len))?)
    }

    /// Adds the gradient of the weight. Writes or adds the gradient of x, `[M, inputs]` for the rank's own tokens, in
    /// `d_x`, and returns its range.
    pub fn backward<B: Backend, T: Element, G: Element>(
        &self,
        cx: &mut BackwardContext<'_, B, T, G>,
        x: &B::Buffer<T>,
        d_y: View<'_, B, T>,
        gathered: &mut Option<B::Buffer<T>>,
        d_x: &mut B::Buffer<T>,
        accumulation: Accumulation,
    ) -> Result<Range<usize>> {
        let x = cx.all_gather(self.inputs, x, gathered)?;
        self.backward_weight(cx, x, B::reborrow(d_y))?;
        self.backward_input(cx, d_y, d_x, accumulation)?;
        cx.reduce_scatter(self.inputs, d_x)
    }

    pub fn backward_weight<B: Backend, T: Element, G: Element>(
        &self,
        cx: &mut BackwardContext<'_, B, T, G>,
        x: View<'_, B, T>,
        d_y: View<'_, B, T>,
    ) -> Result<()> {
        let accumulation = cx.gradients.accumulation(self.weight.buffer);
        Ok(cx.forward.backend.linear_backward_weight(LinearBackwardWeight {
            inputs: self.inputs,
            x: B::reborrow(x),
            d_y: B::reborrow(d_y),
            d_weight: cx.gradients.get_mut(&self.weight),
            accumulation,
        })?)
    }

    /// Writes or adds the gradient of x, `[N, inputs]`.
    pub fn backward_input<B: Backend, T: Element>(
        &self,
        cx: &Context<'_, B, T>,
        d_y: View<'_, B, T>,
        d_x: &mut B::Buffer<T>,
        accumulation: Accumulation,
    ) -> Result<()> {
        Ok(cx.backend.linear_backward_input(LinearBackwardInput {
            inputs: self.inputs,
            d_y: B::reborrow(d_y),
            weight: cx.weights.get(&self.weight),
            d_x: B::view_mut(d_x, 0..cx.num_tokens() * self.inputs),
            accumulation,
        })?)
    }
}
