//! A block: attention and an MLP, each with a norm before it and added to the residual stream.

use moh_kernels::{Backend, Element, Memory, span};

use super::attention::{AttentionBuffers, SavedAttention};
use super::mlp::SavedMlp;
use super::{
    ActivationGradients, Attention, BackwardContext, CachedTokens, Context, Mlp, Normed,
    ResidualSum, RmsNorm, Scratch,
};
use crate::Error;
use crate::activations::Recompute;
use crate::parameters::ParameterRange;
use crate::pass_sizes::PassSizes;

/// `h = x + attention(norm(x))`, `y = h + mlp(norm(h))`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Block {
    pub attention_norm: RmsNorm,
    pub attention: Attention,
    pub mlp_norm: RmsNorm,
    pub mlp: Mlp,
}

/// The activations of a block that are expensive to recompute.
pub(crate) struct SavedBlock<M: Memory, T: Element> {
    pub attention: SavedAttention<M, T>,
    /// The residual stream after attention, `[M, C]`.
    pub h: M::Buffer<T>,
    pub mlp: SavedMlp<M, T>,
}

impl<M: Memory, T: Element> SavedBlock<M, T> {
    /// Allocates the buffers of passes of these sizes.
    pub fn new(memory: &M, sizes: &PassSizes<'_>) -> Result<Self, Error> {
        Ok(SavedBlock {
            attention: SavedAttention::new(memory, sizes)?,
            h: memory.allocate(sizes.stream())?,
            mlp: SavedMlp::new(memory, sizes)?,
        })
    }
}

/// The activations of a block that are cheap to recompute.
pub(crate) struct RecomputableBlock<M: Memory, T: Element> {
    pub attention_norm: Normed<M, T>,
    /// Queries and keys as attention reads them, and values, where they are not rotated in place;
    /// `[N, (H + 2G) D]`.
    pub rotated: M::Buffer<T>,
    pub mlp_norm: Normed<M, T>,
}

impl<M: Memory, T: Element> RecomputableBlock<M, T> {
    /// Allocates the buffers of passes of these sizes.
    pub fn new(memory: &M, sizes: &PassSizes<'_>) -> Result<Self, Error> {
        Ok(RecomputableBlock {
            attention_norm: Normed::new(memory, sizes)?,
            rotated: memory.allocate(sizes.rotated())?,
            mlp_norm: Normed::new(memory, sizes)?,
        })
    }
}

/// The buffers of one block: its own, or those that the blocks share and recompute.
pub(crate) struct BlockBuffers<'a, M: Memory, T: Element> {
    pub saved: &'a mut SavedBlock<M, T>,
    pub recomputable: &'a mut RecomputableBlock<M, T>,
    pub scratch: &'a mut Scratch<M, T>,
}

impl Block {
    /// The weights of its linear layers, and their inputs.
    pub fn linear_weights(&self) -> Vec<(ParameterRange, usize)> {
        [self.attention.linear_weights(), self.mlp.linear_weights()].concat()
    }

    /// Computes the residual stream after the block, `y`, from the one before it, `x`; both `[M,
    /// C]`.
    pub fn forward<B: Backend, T: Element>(
        &self,
        cx: &Context<'_, B, T>,
        x: &B::Buffer<T>,
        buffers: BlockBuffers<'_, B, T>,
        cache: Option<CachedTokens<'_, B, T>>,
        y: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        let BlockBuffers { saved: SavedBlock { attention, h, mlp }, recomputable, scratch } =
            buffers;
        let RecomputableBlock { attention_norm, rotated, mlp_norm } = recomputable;
        let attention = AttentionBuffers { saved: attention, rotated, cache };

        // h = x + attention(norm(x))
        let span = span::enter("attention");
        let normed = self.attention_norm.forward(cx, x, attention_norm)?;
        self.attention.forward(cx, normed, attention, scratch, ResidualSum { x, y: h })?;
        drop(span);

        // y = h + mlp(norm(h))
        let _span = span::enter("mlp");
        let normed = self.mlp_norm.forward(cx, h, mlp_norm)?;
        self.mlp.forward(cx, normed, mlp, scratch, ResidualSum { x: h, y })
    }

    /// The backward pass: replaces the gradient of `y` in `d.residual` by that of `x`, and adds the
    /// gradients of the parameters, or overwrites stale ones.
    pub fn backward<B: Backend, T: Element, G: Element>(
        &self,
        cx: &mut BackwardContext<'_, B, T, G>,
        x: &B::Buffer<T>,
        buffers: BlockBuffers<'_, B, T>,
        d: &mut ActivationGradients<B, T>,
    ) -> Result<(), Error> {
        let BlockBuffers { saved: SavedBlock { attention, h, mlp }, recomputable, scratch } =
            buffers;
        let RecomputableBlock { attention_norm, rotated, mlp_norm } = recomputable;
        let attention = AttentionBuffers { saved: attention, rotated, cache: None };

        // dh = dy + norm'(mlp'(dy))
        let span = span::enter("mlp");
        let d_normed = self.mlp.backward(cx, &mlp_norm.y, mlp, scratch, d)?;
        self.mlp_norm.backward(cx, h, &mlp_norm.inv_rms, d_normed, d)?;
        drop(span);

        // dx = dh + norm'(attention'(dh))
        let _span = span::enter("attention");
        let d_normed = self.attention.backward(cx, &attention_norm.y, attention, scratch, d)?;
        self.attention_norm.backward(cx, x, &attention_norm.inv_rms, d_normed, d)?;
        cx.gradients.mark_written(self.attention_norm.buffer());
        Ok(())
    }

    /// Recomputes the activations that the forward pass did not save.
    pub fn recompute<B: Backend, T: Element>(
        &self,
        recompute: Recompute,
        cx: &Context<'_, B, T>,
        x: &B::Buffer<T>,
        buffers: &mut BlockBuffers<'_, B, T>,
    ) -> Result<(), Error> {
        let BlockBuffers { saved: SavedBlock { attention, h, mlp }, recomputable, scratch } =
            buffers;
        let RecomputableBlock { attention_norm, rotated, mlp_norm } = recomputable;
        if recompute == Recompute::None {
            return Ok(());
        }
        let normed = self.attention_norm.forward(cx, x, attention_norm)?;
        if recompute == Recompute::Norms {
            self.attention.recompute(cx, attention, rotated)?;
            self.mlp_norm.forward(cx, h, mlp_norm)?;
            return Ok(());
        }
        let attention = AttentionBuffers { saved: attention, rotated, cache: None };
        self.attention.forward(cx, normed, attention, scratch, ResidualSum { x, y: h })?;
        let normed = self.mlp_norm.forward(cx, h, mlp_norm)?;
        self.mlp.recompute(cx, normed, mlp, scratch)
    }
}
