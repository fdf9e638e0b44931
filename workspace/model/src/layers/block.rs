//! A block: attention and an MLP, each with a norm before it and added to the residual stream.

use moh_kernels::{Backend, Element, Memory, span};

use super::attention::{AttentionBuffers, SavedAttention};
use super::{
    ActivationGradients, Attention, BackwardContext, CachedTokens, Context, Linear, Mlp, Normed,
    ResidualSum, RmsNorm, RouterLayer, Scratch,
};
use crate::{PassSizes, Recompute, Result};

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
    /// Gate and up projections of the MLP, `[N, 2I]`. SwiGLU's output is not saved: its backward pass computes it
    /// together with the gradients.
    pub gate_up: M::Buffer<T>,
}

impl<M: Memory, T: Element> SavedBlock<M, T> {
    pub fn new(memory: &M, sizes: &PassSizes<'_>) -> Result<Self> {
        let width = sizes.share().mlp_width(sizes.config);
        Ok(SavedBlock {
            attention: SavedAttention::new(memory, sizes)?,
            h: memory.allocate(sizes.stream())?,
            gate_up: memory.allocate(sizes.tokens() * 2 * width)?,
        })
    }
}

pub(crate) struct RecomputableBlock<M: Memory, T: Element> {
    pub attention_norm: Normed<M, T>,
    /// Attention's queries, keys and values where they are not rotated in place, otherwise empty; `[N, (H + 2G) D]`.
    pub rotated: M::Buffer<T>,
    pub mlp_norm: Normed<M, T>,
}

impl<M: Memory, T: Element> RecomputableBlock<M, T> {
    pub fn new(memory: &M, sizes: &PassSizes<'_>) -> Result<Self> {
        Ok(RecomputableBlock {
            attention_norm: Normed::new(memory, sizes)?,
            rotated: memory.allocate(sizes.rotated())?,
            mlp_norm: Normed::new(memory, sizes)?,
        })
    }
}

/// The buffers of one block: its own buffers, or buffers that the blocks share and recompute.
pub(crate) struct BlockBuffers<'a, M: Memory, T: Element> {
    pub saved: &'a mut SavedBlock<M, T>,
    pub recomputable: &'a mut RecomputableBlock<M, T>,
    pub scratch: &'a mut Scratch<M, T>,
}

impl Block {
    pub fn linear_layers(&self) -> impl Iterator<Item = Linear> {
        let Block { attention: Attention { qkv, output, router, .. }, mlp, .. } = self;
        let router = router.as_ref().and_then(RouterLayer::logits);
        [qkv, output, &mlp.gate_up, &mlp.down].into_iter().cloned().chain(router)
    }

    /// Computes the residual stream after the block, `y`, from the residual stream before it, `x`; both `[M, C]`.
    pub fn forward<B: Backend, T: Element>(
        &self,
        cx: &Context<'_, B, T>,
        x: &B::Buffer<T>,
        buffers: BlockBuffers<'_, B, T>,
        cache: Option<CachedTokens<'_, B, T>>,
        y: &mut B::Buffer<T>,
    ) -> Result<()> {
        let BlockBuffers { saved: SavedBlock { attention, h, gate_up }, recomputable, scratch } =
            buffers;
        let RecomputableBlock { attention_norm, rotated, mlp_norm } = recomputable;
        let attention = AttentionBuffers { saved: attention, rotated, cache };

        // h = x + attention(norm(x))
        let span = span::enter("attention");
        let normed = self.attention_norm.forward(cx, x, attention_norm)?;
        self.attention.forward(cx, normed, attention, scratch, ResidualSum { x, y: h })?;
        drop(span);

        self.add_mlp(cx, h, mlp_norm, gate_up, scratch, y)
    }

    /// Computes the second part of [`Self::forward`]: `y = h + mlp(norm(h))`.
    pub fn add_mlp<B: Backend, T: Element>(
        &self,
        cx: &Context<'_, B, T>,
        h: &B::Buffer<T>,
        norm: &mut Normed<B, T>,
        gate_up: &mut B::Buffer<T>,
        scratch: &mut Scratch<B, T>,
        y: &mut B::Buffer<T>,
    ) -> Result<()> {
        let _span = span::enter("mlp");
        let normed = self.mlp_norm.forward(cx, h, norm)?;
        self.mlp.forward(cx, normed, gate_up, scratch, ResidualSum { x: h, y })
    }

    /// Computes the backward pass: replaces the gradient of `y` in `d.residual` by the gradient of `x`. Adds the
    /// gradients of the parameters, or overwrites stale gradients.
    pub fn backward<B: Backend, T: Element, G: Element>(
        &self,
        cx: &mut BackwardContext<'_, B, T, G>,
        x: &B::Buffer<T>,
        buffers: BlockBuffers<'_, B, T>,
        d: &mut ActivationGradients<B, T>,
    ) -> Result<()> {
        let BlockBuffers { saved: SavedBlock { attention, h, gate_up }, recomputable, scratch } =
            buffers;
        let RecomputableBlock { attention_norm, rotated, mlp_norm } = recomputable;
        let attention = AttentionBuffers { saved: attention, rotated, cache: None };

        // dh = dy + norm'(mlp'(dy))
        let span = span::enter("mlp");
        let d_normed = self.mlp.backward(cx, &mlp_norm.y, gate_up, scratch, d)?;
        self.mlp_norm.backward(cx, h, &mlp_norm.inv_rms, d_normed, d)?;
        drop(span);

        // dx = dh + norm'(attention'(dh))
        let _span = span::enter("attention");
        let d_normed = self.attention.backward(cx, &attention_norm.y, attention, scratch, d)?;
        self.attention_norm.backward(cx, x, &attention_norm.inv_rms, d_normed, d)?;
        cx.gradients.mark_written(self.attention_norm.weight.buffer);
        Ok(())
    }

    /// Recomputes the activations that the forward pass did not save.
    pub fn recompute<B: Backend, T: Element>(
        &self,
        recompute: Recompute,
        cx: &Context<'_, B, T>,
        x: &B::Buffer<T>,
        buffers: &mut BlockBuffers<'_, B, T>,
    ) -> Result<()> {
        let BlockBuffers { saved: SavedBlock { attention, h, gate_up }, recomputable, scratch } =
            buffers;
        let RecomputableBlock { attention_norm, rotated, mlp_norm } = recomputable;
        if recompute == Recompute::None {
            return Ok(());
        }
        let normed = self.attention_norm.forward(cx, x, attention_norm)?;
        if recompute == Recompute::Norms {
            self.attention.rotation.recompute(cx, &attention.qkv, rotated)?;
            self.mlp_norm.forward(cx, h, mlp_norm)?;
            return Ok(());
        }
        let attention = AttentionBuffers { saved: attention, rotated, cache: None };
        self.attention.forward(cx, normed, attention, scratch, ResidualSum { x, y: h })?;
        let normed = self.mlp_norm.forward(cx, h, mlp_norm)?;
        self.mlp.recompute(cx, normed, gate_up, scratch)
    }
}
