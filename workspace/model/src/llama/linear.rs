//! A linear layer of a block in the backward pass: its weight is a range of a flat buffer.

use std::ops::Range;

use moh_kernels::linear::{LinearBackwardInput, LinearBackwardWeight};
use moh_kernels::{Backend, Element, View};

use crate::Error;
use crate::model::Model;
use crate::parameters::FlatBuffers;

/// A linear layer of a block's backward pass: its weight, `range` of the flat buffer `flat`, and
/// sizes. Buffers may be longer than the tensors in them.
#[derive(Clone, Copy)]
pub(super) struct Linear<'a> {
    pub flat: usize,
    pub range: &'a Range<usize>,
    pub tokens: usize,
    pub inputs: usize,
}

impl<B: Backend, T: Element> Model<B, T> {
    pub(super) fn linear_backward_weight<G: Element>(
        &self,
        linear: Linear<'_>,
        x: View<'_, B, T>,
        d_y: View<'_, B, T>,
        gradients: &mut FlatBuffers<B, G>,
    ) -> Result<(), Error> {
        let accumulation = gradients.accumulation(linear.flat);
        self.backend.linear_backward_weight(LinearBackwardWeight {
            inputs: linear.inputs,
            x: B::reborrow(x),
            d_y: B::reborrow(d_y),
            d_weight: gradients.view_mut(linear.flat, linear.range.clone()),
            accumulation,
        })?;
        Ok(())
    }

    pub(super) fn linear_backward_input(
        &self,
        linear: Linear<'_>,
        d_y: View<'_, B, T>,
        d_x: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        self.backend.linear_backward_input(LinearBackwardInput {
            inputs: linear.inputs,
            d_y: B::reborrow(d_y),
            weight: self.weights.view(linear.flat, linear.range.clone()),
            d_x: B::view_mut(d_x, 0..linear.tokens * linear.inputs),
        })?;
        Ok(())
    }
}
