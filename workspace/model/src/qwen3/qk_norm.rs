//! Query and key norms with the rotation that follows them, forward and backward.
//!
//! The projection's output is saved as it is: the backward pass of the norms reads it, and so does a
//! router. Normed and rotated queries and keys lie in a buffer of their own, which is cheap to compute
//! again.

use std::ops::Range;

use moh_kernels::qk_norm::{QkNormBackward, QkNormForward};
use moh_kernels::rope::RopeArgs;
use moh_kernels::{Backend, Element, ViewMut};

use crate::Error;
use crate::llama::Tokens;
use crate::model::Model;
use crate::parameters::FlatBuffers;

impl<B: Backend, T: Element> Model<B, T> {
    /// The buffer of a block's weights and the range of the norms' in it.
    fn qk_norm_weight(&self, layer: usize) -> (usize, Range<usize>) {
        (self.layout.block_index(layer), self.layout.block.qk_norm.clone())
    }

    /// Norms and rotates the queries and keys of `qkv` into `rotated`, beside the values.
    pub(crate) fn norm_and_rotate(
        &self,
        layer: usize,
        tokens: &Tokens<'_, B>,
        qkv: &B::Buffer<T>,
        rotated: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        let (shape, (flat, weight)) = (&tokens.shape, self.qk_norm_weight(layer));
        let len = shape.tokens() * shape.row();
        self.backend.qk_norm_forward(QkNormForward {
            shape,
            eps: self.config.rms_norm_eps,
            qkv: B::view(qkv, 0..len),
            weight: self.weights.view(flat, weight),
            normed: B::view_mut(rotated, 0..len),
        })?;
        let table = self.rope_table(tokens.first_position);
        let qkv = B::view_mut(rotated, 0..len);
        Ok(self.backend.rope_forward(RopeArgs { shape, table, qkv })?)
    }

    /// Turns the gradients of normed and rotated queries and keys into those of the projection's output,
    /// `qkv`, in place, and adds those of the norms' weights.
    pub(crate) fn norm_and_rotate_backward<G: Element>(
        &self,
        layer: usize,
        tokens: &Tokens<'_, B>,
        qkv: &B::Buffer<T>,
        mut d_qkv: ViewMut<'_, B, T>,
        gradients: &mut FlatBuffers<B, G>,
    ) -> Result<(), Error> {
        let (shape, (flat, weight)) = (&tokens.shape, self.qk_norm_weight(layer));
        let table = self.rope_table(tokens.first_position);
        let rope = RopeArgs { shape, table, qkv: B::reborrow_mut(&mut d_qkv) };
        self.backend.rope_backward(rope)?;
        gradients.clear_stale(&self.backend, flat, weight.clone())?;
        self.backend.qk_norm_backward(QkNormBackward {
            shape,
            eps: self.config.rms_norm_eps,
            qkv: B::view(qkv, 0..shape.tokens() * shape.row()),
            weight: self.weights.view(flat, weight.clone()),
            d_qkv: B::reborrow_mut(&mut d_qkv),
            d_weight: gradients.view_mut(flat, weight),
        })?;
        Ok(())
    }
}
