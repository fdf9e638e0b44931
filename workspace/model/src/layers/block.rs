//! A block: attention and an MLP, each with a norm before it and added to the residual stream.

use moh_kernels::{AnyBuffer, Backend, Memory, span};

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
pub(crate) struct SavedBlock<M: Memory> {
    pub attention: SavedAttention<M>,
    /// The residual stream after attention, `[M, C]`.
    pub h: AnyBuffer<M>,
    /// Gate and up projections of the MLP, `[N, 2I]`. SwiGLU's output is not saved: its backward pass computes it
    /// together with the gradients.
    pub gate_up: AnyBuffer<M>,
}

impl<M: Memory> SavedBlock<M> {
    pub fn new(memory: &M, sizes: &PassSizes<'_>) -> Result<Self> {
        let width = sizes.share().mlp_width(sizes.config);
        Ok(SavedBlock {
            attention: SavedAttention::new(memory, sizes)?,
            h: sizes.zeros(memory, sizes.stream())?,
            gate_up: sizes.zeros(memory, sizes.tokens() * 2 * width)?,
        })
    }
}

pub(crate) struct RecomputableBlock<M: Memory> {
    pub attention_norm: Normed<M>,
    /// Attention's queries, keys and values where they are not rotated in place, otherwise empty; `[N, (H + 2G) D]`.
    pub rotated: AnyBuffer<M>,
    pub mlp_norm: Normed<M>,
}

impl<M: Memory> RecomputableBlock<M> {
    pub fn new(memory: &M, sizes: &PassSizes<'_>) -> Result<Self> {
        Ok(RecomputableBlock {
            attention_norm: Normed::new(memory, sizes)?,
            rotated: sizes.zeros(memory, sizes.rotated())?,
            mlp_norm: Normed::new(memory, sizes)?,
        })
    }
}

/// The buffers of one block: its own buffers, or buffers that the blocks share and recompute.
pub(crate) struct BlockBuffers<'a, M: Memory> {
    pub saved: &'a mut SavedBlock<M>,
    pub recomputable: &'a mut RecomputableBlock<M>,
    pub scratch: &'a mut Scratch<M>,
}

impl Block {
    pub fn linear_layers(&self) -> impl Iterator<Item = Linear> {
        let Block { attention: Attention { qkv, output, router, .. }, mlp, .. } = self;
        let router = router.as_ref().and_then(RouterLayer::logits);
        [qkv, output, &mlp.gate_up, &mlp.down].into_iter().cloned().chain(router)
    }

    /// Computes the residual stream after the block, `y`, from the residual stream before it, `x`; both `[M, C]`.
    pub fn forward<B: Backend>(
        &self,
        cx: &Context<'_, B>,
        x: &AnyBuffer<B>,
        buffers: BlockBuffers<'_, B>,
        cache: Option<CachedTokens<'_, B>>,
        y: &mut AnyBuffer<B>,
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
    pub fn add_mlp<B: Backend>(
        &self,
        cx: &Context<'_, B>,
        h: &AnyBuffer<B>,
        norm: &mut Normed<B>,
        gate_up: &mut AnyBuffer<B>,
        scratch: &mut Scratch<B>,
        y: &mut AnyBuffer<B>,
    ) -> Result<()> {
        let _span = span::enter("mlp");
        let normed = self.mlp_norm.forward(cx, h, norm)?;
        self.mlp.forward(cx, normed, gate_up, scratch, ResidualSum { x: h, y })
    }

    /// Computes the backward pass: replaces the gradient of `y` in `d.residual` by the gradient of `x`. Adds the
    /// gradients of the parameters, or overwrites stale gradients.
    pub fn backward<B: Backend>(
        &self,
        cx: &mut BackwardContext<'_, B>,
        x: &AnyBuffer<B>,
        buffers: BlockBuffers<'_, B>,
        d: &mut ActivationGradients<B>,
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
    pub fn recompute<B: Backend>(
        &self,
        recompute: Recompute,
        cx: &Context<'_, B>,
        x: &AnyBuffer<B>,
        buffers: &mut BlockBuffers<'_, B>,
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
