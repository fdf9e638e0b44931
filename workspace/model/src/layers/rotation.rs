//! The step from the query, key and value projections to attention: selects each token's heads, and rotates queries and
//! keys.
//!
//! A router reads the projection's output, before query norms: normed queries have nearly equal
//! norms, which carry no information about a head.

use moh_kernels::{AnyBuffer, AnyView, Backend};

use super::attention::{AttentionBuffers, SavedAttention};
use super::router::RouterInputs;
use super::{ActivationGradients, BackwardContext, Context, QkNorm, RouterLayer};
use crate::Result;

/// The step from projected queries and keys to attention's queries and keys.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Rotation {
    /// RoPE, in place.
    Rope,
    /// Norms, then RoPE, in a copy: the backward pass of the norms and the router read the
    /// projection's output. The copy is cheap to recompute.
    NormedRope(QkNorm),
}

impl Rotation {
    /// Returns the queries, keys and values that attention reads.
    pub fn rotated<'v, S>(&self, projected: &'v S, copy: &'v S) -> &'v S {
        match self {
            Rotation::Rope => projected,
            Rotation::NormedRope(_) => copy,
        }
    }

    /// Rotates queries and keys. If there is a router, first selects each token's heads by the block's normed input of
    /// all tokens and by queries, keys and values.
    pub fn forward<B: Backend>(
        &self,
        cx: &Context<'_, B>,
        router: Option<&RouterLayer>,
        x: AnyView<'_, B>,
        buffers: &mut AttentionBuffers<'_, B>,
    ) -> Result<()> {
        let all = 0..cx.num_tokens() * cx.tokens.shape.row();
        let SavedAttention { qkv, routing, logits, .. } = &mut *buffers.saved;
        let in_place = *self == Rotation::Rope;
        if let Some((router, routing)) = router.zip(routing.as_mut()) {
            router.forward(cx, x, qkv.view_mut(all), in_place, routing, logits)?;
        } else if in_place {
            cx.rotate(qkv.view_mut(all))?;
        }
        self.recompute(cx, qkv, buffers.rotated)
    }

    /// Rotates queries and keys again if they are in a copy.
    pub fn recompute<B: Backend>(
        &self,
        cx: &Context<'_, B>,
        qkv: &AnyBuffer<B>,
        rotated: &mut AnyBuffer<B>,
    ) -> Result<()> {
        let Rotation::NormedRope(norm) = self else { return Ok(()) };
        let all = 0..cx.num_tokens() * cx.tokens.shape.row();
        norm.forward(cx, qkv.view(all.clone()), rotated.view_mut(all.clone()))?;
        cx.rotate(rotated.view_mut(all))
    }

    /// Replaces the gradients of attention's queries and keys in `d_qkv` by the gradients of the projection's output,
    /// including the router's. If the router reads the block's normed input, its gradient also reaches `x`
    /// ([`RouterLayer::backward`]).
    pub fn backward<B: Backend>(
        &self,
        cx: &mut BackwardContext<'_, B>,
        router: Option<&RouterLayer>,
        x: &AnyBuffer<B>,
        saved: &mut SavedAttention<B>,
        d: &mut ActivationGradients<B>,
        d_qkv: &mut AnyBuffer<B>,
    ) -> Result<()> {
        let all = 0..cx.num_tokens() * cx.tokens.shape.row();
        let SavedAttention { qkv, routing, logits, .. } = saved;
        let qkv = qkv.view(all.clone());
        let mut d_qkv = d_qkv.view_mut(all);
        let inputs = router
            .zip(routing.as_ref())
            .map(|(router, routing)| (router, RouterInputs { x, qkv, routing }));
        match (self, inputs) {
            (Rotation::Rope, Some((router, inputs))) => {
                router.backward(cx, &inputs, logits, d, d_qkv, true)
            }
            (Rotation::Rope, None) => cx.rotate_back(d_qkv),
            (Rotation::NormedRope(norm), inputs) => {
                cx.rotate_back(d_qkv.reborrow())?;
                norm.backward(cx, qkv, d_qkv.reborrow())?;
                inputs.map_or(Ok(()), |(router, inputs)| {
                    router.backward(cx, &inputs, logits, d, d_qkv, false)
                })
            }
        }
    }
}
