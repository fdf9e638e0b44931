//! The parameters of a router and their gradients, whatever type a training accumulates gradients in.

use moh_kernels::linear::LinearBackwardWeight;
use moh_kernels::{Accumulation, Backend, Element, Error, Result, View};

use crate::parameters::{FlatBuffers, ParameterRange};

/// The matrices of a router, in the order of [`Router::parameters`](super::Router::parameters).
pub struct Parameters<'a, B: Backend, T: Element> {
    pub(crate) weights: &'a FlatBuffers<B, T>,
    pub(crate) ranges: &'a [ParameterRange],
}

impl<B: Backend, T: Element> Clone for Parameters<'_, B, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend, T: Element> Copy for Parameters<'_, B, T> {}

impl<'a, B: Backend, T: Element> Parameters<'a, B, T> {
    /// The parameter of index `parameter`, `[outputs, inputs]`.
    pub fn get(&self, parameter: usize) -> Result<View<'a, B, T>> {
        Ok(self.weights.get(range(self.ranges, parameter)?))
    }
}

fn range(ranges: &[ParameterRange], parameter: usize) -> Result<&ParameterRange> {
    ranges.get(parameter).ok_or_else(|| {
        let reason =
            format!("the router has {} parameters, none of index {parameter}", ranges.len());
        Error::shape("router", reason)
    })
}

/// The gradients of a router's parameters.
pub trait ParameterGradients<B: Backend, T: Element> {
    /// Adds `d_y^T x` to the gradient of the parameter of index `parameter` in
    /// [`Router::parameters`](super::Router::parameters), `[outputs, inputs]`: with x `[tokens,
    /// inputs]` and `d_y` `[tokens, outputs]`, the gradient of `y = x W^T`.
    fn add_linear(
        &mut self,
        parameter: usize,
        inputs: usize,
        x: View<'_, B, T>,
        d_y: View<'_, B, T>,
    ) -> Result<()>;
}

pub(crate) struct LayerGradients<'a, B: Backend, G: Element> {
    pub backend: &'a B,
    pub gradients: &'a mut FlatBuffers<B, G>,
    pub ranges: &'a [ParameterRange],
}

impl<B: Backend, T: Element, G: Element> ParameterGradients<B, T> for LayerGradients<'_, B, G> {
    fn add_linear(
        &mut self,
        parameter: usize,
        inputs: usize,
        x: View<'_, B, T>,
        d_y: View<'_, B, T>,
    ) -> Result<()> {
        self.backend.linear_backward_weight(LinearBackwardWeight {
            inputs,
            x: B::reborrow(x),
            d_y: B::reborrow(d_y),
            d_weight: self.gradients.get_mut(range(self.ranges, parameter)?),
            accumulation: Accumulation::Add,
        })
    }
}
