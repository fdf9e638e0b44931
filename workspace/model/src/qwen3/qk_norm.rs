//! Query and key norms followed by RoPE, forward and backward.
//!
//! The projection's output is saved unchanged: the backward pass of the norms and the router read
//! it. Normed and rotated queries and keys have a separate buffer, which is cheap to recompute.

use std::ops::Range;

use moh_kernels::qk_norm::{QkNormBackward, QkNormForward};
use moh_kernels::rope::RopeArgs;
use moh_kernels::{Backend, Element, ViewMut};

use crate::Error;
use crate::llama::Tokens;
use crate::model::Model;
use crate::parameters::FlatBuffers;

impl<B: Backend, T: Element> Model<B, T> {
    /// The buffer of a block's weights, and the norms' range in it.
    fn qk_norm_weight(&self, layer: usize) -> (usize, Range<usize>) {
        (self.layout.block_index(layer), self.layout.block.qk_norm.clone())
    }

    /// Norms and rotates the queries and keys of `qkv` into `rotated`, and copies the values.
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

    /// Replaces the gradients of normed and rotated queries and keys by those of the projection's
    /// output, `qkv`, and adds the gradients of the norms' weights.
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
