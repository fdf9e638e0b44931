//! The norms of a model, forward and backward, over a rank's local tokens.

use std::ops::Range;

use moh_kernels::rms_norm::{RmsNormBackward, RmsNormForward};
use moh_kernels::{Backend, Element};

use super::block::Tokens;
use crate::Error;
use crate::activations::{Backward, BlockBuffers, Recomputable, Saved};
use crate::model::Model;
use crate::parameters::FlatBuffers;

impl<B: Backend, T: Element> Model<B, T> {
    /// The norm of the local tokens; its weight is a range of a flat buffer.
    pub(crate) fn normalize(
        &self,
        (flat, weight): (usize, &Range<usize>),
        tokens: usize,
        x: &B::Buffer<T>,
        (y, inv_rms): (&mut B::Buffer<T>, &mut B::Buffer<f32>),
    ) -> Result<(), Error> {
        let stream = self.stream_len(tokens);
        self.backend.rms_norm_forward(RmsNormForward {
            eps: self.config.rms_norm_eps,
            x: B::view(x, 0..stream),
            weight: self.weights.view(flat, weight.clone()),
            y: B::view_mut(y, 0..stream),
            inv_rms: B::view_mut(inv_rms, 0..self.token_share(tokens).local()),
        })?;
        Ok(())
    }

    /// Adds a norm's gradients, given the gradient of its output in `d_branch`, to `d_stream` and
    /// to its weight's gradient.
    pub(crate) fn norm_backward<G: Element>(
        &self,
        (flat, range, tokens): (usize, &Range<usize>, usize),
        x: &B::Buffer<T>,
        inv_rms: &B::Buffer<f32>,
        backward: &mut Backward<B, T>,
        gradients: &mut FlatBuffers<B, G>,
    ) -> Result<(), Error> {
        let own = self.reduce_scatter(tokens, &mut backward.d_branch)?;
        let local = own.len();
        gradients.clear_stale(&self.backend, flat, range.clone())?;
        self.backend.rms_norm_backward(RmsNormBackward {
            x: B::view(x, 0..local),
            weight: self.weights.view(flat, range.clone()),
            inv_rms: B::view(inv_rms, 0..self.token_share(tokens).local()),
            d_y: B::view(&backward.d_branch, own),
            d_x: B::view_mut(&mut backward.d_stream, 0..local),
            d_weight: gradients.view_mut(flat, range.clone()),
        })?;
        Ok(())
    }

    pub(super) fn normalize_input(
        &self,
        layer: usize,
        tokens: usize,
        input: &B::Buffer<T>,
        recomputable: &mut Recomputable<B, T>,
    ) -> Result<(), Error> {
        let weight = (self.layout.block_index(layer), &self.layout.block.input_norm);
        let into = (&mut recomputable.input_normed, &mut recomputable.input_inv_rms);
        self.normalize(weight, tokens, input, into)
    }

    pub(super) fn normalize_residual(
        &self,
        layer: usize,
        tokens: usize,
        saved: &Saved<B, T>,
        recomputable: &mut Recomputable<B, T>,
    ) -> Result<(), Error> {
        let weight = (self.layout.block_index(layer), &self.layout.block.post_norm);
        let into = (&mut recomputable.post_normed, &mut recomputable.post_inv_rms);
        self.normalize(weight, tokens, &saved.residual, into)
    }

    /// Recomputes the norms of the forward pass.
    pub(super) fn recompute_norms(
        &self,
        tokens: &Tokens<'_, B>,
        input: &B::Buffer<T>,
        block: &mut BlockBuffers<'_, B, T>,
    ) -> Result<(), Error> {
        let (n, BlockBuffers { layer, saved, recomputable, .. }) = (tokens.shape.tokens(), block);
        self.normalize_input(*layer, n, input, recomputable)?;
        if let Some(rotated) = &mut recomputable.rotated {
            self.norm_and_rotate(*layer, tokens, &saved.qkv, rotated)?;
        }
        self.normalize_residual(*layer, n, saved, recomputable)
    }
}
