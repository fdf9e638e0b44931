//! Linear layers without bias. Tensor-parallel ranks divide them by the columns or the rows of the weight's transpose
//! (arXiv 1909.08053): each rank computes some of the outputs, or its part of the sum over the inputs.

use std::ops::Range;

use moh_kernels::linear::{LinearBackwardInput, LinearBackwardWeight, LinearForward};
use moh_kernels::{Accumulation, AnyBuffer, AnyView, AnyViewMut, Backend, for_element};

use super::{BackwardContext, Context};
use crate::parameters::ParameterRange;
use crate::tensors::{Division, TensorList};
use crate::{FlatBuffers, Result};

/// `y = x W^T` of all tokens, with the local part of W, `[outputs, inputs]`. Buffers may be longer than the
/// tensors in them.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Linear {
    pub weight: ParameterRange,
    pub outputs: usize,
    pub inputs: usize,
}

/// The buffers of a sum `y = x + ...`, both `[M, C]`.
pub(crate) struct ResidualSum<'a, B: Backend> {
    pub x: &'a AnyBuffer<B>,
    pub y: &'a mut AnyBuffer<B>,
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
    pub fn forward<B: Backend>(
        &self,
        cx: &Context<'_, B>,
        x: AnyView<'_, B>,
        residual: Option<AnyView<'_, B>>,
        y: &mut AnyBuffer<B>,
    ) -> Result<()> {
        Ok(for_element!(T: x.element() => cx.backend.linear_forward::<T>(LinearForward {
            inputs: self.inputs,
            x: x.typed(),
            weight: cx.weights.get(&self.weight).typed(),
            residual: residual.map(|residual| residual.typed()),
            y: y.view_mut(0..cx.num_tokens() * self.outputs).typed(),
            independent: cx.tokens.independent,
            packed: cx.packed(&self.weight),
        }))?)
    }

    /// Adds the product of x, `[N, inputs]`, to the residual stream of the rank's own tokens. With tensor parallelism x
    /// has only the rank's columns.
    pub fn add_to_stream<B: Backend>(
        &self,
        cx: &Context<'_, B>,
        x: AnyView<'_, B>,
        gathered: &mut Option<AnyBuffer<B>>,
        sum: ResidualSum<'_, B>,
    ) -> Result<()> {
        let len = cx.own_tokens().local() * self.outputs;
        let residual = sum.x.view(0..len);
        let Some(partial) = gathered else { return self.forward(cx, x, Some(residual), sum.y) };
        self.forward(cx, x, None, partial)?;
        let own = cx.reduce_scatter(self.outputs, partial)?;
        let (partial, y) = (partial.view(own), sum.y.view_mut(0..len));
        Ok(for_element!(T: y.element() => {
            cx.backend.add::<T>(residual.typed(), partial.typed(), y.typed())
        })?)
    }

    /// Adds the gradient of the weight. Writes or adds the gradient of x, `[M, inputs]` for the rank's own tokens, in
    /// `d_x`, and returns its range.
    pub fn backward<B: Backend>(
        &self,
        cx: &mut BackwardContext<'_, B>,
        x: &AnyBuffer<B>,
        d_y: AnyView<'_, B>,
        gathered: &mut Option<AnyBuffer<B>>,
        d_x: &mut AnyBuffer<B>,
        accumulation: Accumulation,
    ) -> Result<Range<usize>> {
        let x = cx.all_gather(self.inputs, x, gathered)?;
        self.backward_weight(cx, x, d_y)?;
        self.backward_input(cx, d_y, d_x, accumulation)?;
        cx.reduce_scatter(self.inputs, d_x)
    }

    pub fn backward_weight<B: Backend>(
        &self,
        cx: &mut BackwardContext<'_, B>,
        x: AnyView<'_, B>,
        d_y: AnyView<'_, B>,
    ) -> Result<()> {
        let accumulation = cx.gradients.accumulation(self.weight.buffer);
        self.add_weight_gradient(cx.forward.backend, cx.gradients, x, d_y, accumulation)
    }

    /// Writes or adds the gradient of the weight, unless it is frozen, from rows of x and of the gradient of y.
    pub fn add_weight_gradient<B: Backend>(
        &self,
        backend: &B,
        gradients: &mut FlatBuffers<B>,
        x: AnyView<'_, B>,
        d_y: AnyView<'_, B>,
        accumulation: Accumulation,
    ) -> Result<()> {
        let Some(d_weight) = gradients.gradients_mut(&self.weight) else { return Ok(()) };
        Ok(for_element!(T: x.element(), G: d_weight.element() => {
            backend.linear_backward_weight::<T, G>(LinearBackwardWeight {
                inputs: self.inputs,
                x: x.typed(),
                d_y: d_y.typed(),
                d_weight: d_weight.typed(),
                accumulation,
            })
        })?)
    }

    /// Writes or adds the gradient of x, `[N, inputs]`.
    pub fn backward_input<B: Backend>(
        &self,
        cx: &Context<'_, B>,
        d_y: AnyView<'_, B>,
        d_x: &mut AnyBuffer<B>,
        accumulation: Accumulation,
    ) -> Result<()> {
        let d_x = d_x.view_mut(0..cx.num_tokens() * self.inputs);
        self.backward_rows(cx, d_y, d_x, accumulation)
    }

    /// Writes or adds the gradient of some rows of x.
    pub fn backward_rows<B: Backend>(
        &self,
        cx: &Context<'_, B>,
        d_y: AnyView<'_, B>,
        mut d_x: AnyViewMut<'_, B>,
        accumulation: Accumulation,
    ) -> Result<()> {
        Ok(for_element!(T: d_y.element() => {
            cx.backend.linear_backward_input::<T>(LinearBackwardInput {
                inputs: self.inputs,
                d_y: d_y.typed(),
                weight: cx.weights.get(&self.weight).typed(),
                d_x: d_x.reborrow().typed(),
                accumulation,
            })
        })?)
    }
}
