//! Linear layers: y = x W^T with W `[outputs, inputs]`, as checkpoints store it.
//!
//! Backward: d_x = d_y W and d_W = d_y^T x, each written or added directly to the gradient's buffer.

mod cpu;
#[cfg(gpu)]
mod cuda;

pub use crate::matmul::Accumulation;
use crate::{Element, Memory, Result, View, ViewMut, check_len, ensure};

/// Arguments of [`Linear::linear_forward`].
pub struct LinearForward<'a, M: Memory, T: Element> {
    /// Columns of the weight.
    pub inputs: usize,
    /// `[N, inputs]`.
    pub x: View<'a, M, T>,
    /// `[outputs, inputs]`.
    pub weight: View<'a, M, T>,
    /// Added to the result of the matmul; `[N, outputs]`.
    pub residual: Option<View<'a, M, T>>,
    /// Overwritten; `[N, outputs]`.
    pub y: ViewMut<'a, M, T>,
    /// Whether the bits of a token's outputs must not depend on the number of tokens. A GPU ignores this.
    pub independent: bool,
    /// The weight as packed by [`Linear::pack_weight`], which is faster for few tokens. The outputs are then
    /// independent.
    pub packed: Option<View<'a, M, u32>>,
}

impl<'a, M: Memory, T: Element> LinearForward<'a, M, T> {
    /// Creates the arguments of a product without a residual, by the weight itself.
    pub fn new(
        inputs: usize,
        x: View<'a, M, T>,
        weight: View<'a, M, T>,
        y: ViewMut<'a, M, T>,
    ) -> Self {
        LinearForward { inputs, x, weight, residual: None, y, independent: false, packed: None }
    }
}

/// Arguments of [`Linear::linear_backward_input`].
pub struct LinearBackwardInput<'a, M: Memory, T: Element> {
    /// Columns of the weight.
    pub inputs: usize,
    /// `[N, outputs]`.
    pub d_y: View<'a, M, T>,
    /// `[outputs, inputs]`.
    pub weight: View<'a, M, T>,
    /// `[N, inputs]`.
    pub d_x: ViewMut<'a, M, T>,
    /// Whether `d_x` is overwritten or added to.
    pub accumulation: Accumulation,
}

/// Arguments of [`Linear::linear_backward_weight`].
pub struct LinearBackwardWeight<'a, M: Memory, T: Element, G: Element> {
    /// Columns of the weight.
    pub inputs: usize,
    /// `[N, inputs]`.
    pub x: View<'a, M, T>,
    /// `[N, outputs]`.
    pub d_y: View<'a, M, T>,
    /// `[outputs, inputs]`.
    pub d_weight: ViewMut<'a, M, G>,
    /// Whether `d_weight` is overwritten or added to.
    pub accumulation: Accumulation,
}

/// Linear layers as operators of a device.
pub trait Linear: Memory {
    /// Computes `y = x weight^T (+ residual)`.
    fn linear_forward<T: Element>(&self, args: LinearForward<'_, Self, T>) -> Result<()>;

    /// Returns the elements of a packed weight `[outputs, inputs]` of elements `T`; 0 if the device does not pack
    /// weights.
    fn packed_len<T: Element>(&self, _inputs: usize, _outputs: usize) -> usize {
        0
    }

    /// Packs a weight, `[outputs, inputs]`, into [`Linear::packed_len`] elements.
    fn pack_weight<T: Element>(
        &self,
        inputs: usize,
        weight: View<'_, Self, T>,
        packed: ViewMut<'_, Self, u32>,
    ) -> Result<()>;

    /// Computes `d_x = d_y weight` or `d_x += d_y weight`, depending on `accumulation`.
    fn linear_backward_input<T: Element>(
        &self,
        args: LinearBackwardInput<'_, Self, T>,
    ) -> Result<()>;

    /// Computes `d_weight = d_y^T x` or `d_weight += d_y^T x`, depending on `accumulation`; without tokens
    /// `d_y^T x` is zero.
    fn linear_backward_weight<T: Element, G: Element>(
        &self,
        args: LinearBackwardWeight<'_, Self, T, G>,
    ) -> Result<()>;
}

/// Checks the lengths of a layer's `[tokens, inputs]`, weight and `[tokens, outputs]`; returns
/// (tokens, outputs).
fn check(
    operator: &'static str,
    inputs: usize,
    x: usize,
    weight: usize,
    y: usize,
) -> Result<(usize, usize)> {
    ensure(operator, inputs > 0 && weight > 0 && weight.is_multiple_of(inputs), || {
        format!("a weight of {weight} elements does not divide into rows of {inputs} inputs")
    })?;
    ensure(operator, x.is_multiple_of(inputs), || {
        format!("{x} elements do not divide into tokens of {inputs} inputs")
    })?;
    let (tokens, outputs) = (x / inputs, weight / inputs);
    check_len(operator, "the outputs' side", y, tokens * outputs)?;
    Ok((tokens, outputs))
}
