//! From the query, key and value projections to what attention reads: each token's heads are
//! selected, and queries and keys are rotated.
//!
//! A router reads the projection's output, before query norms: normed queries have nearly equal
//! norms, which carry no information about a head.

use moh_kernels::ranks::AllReduce;
use moh_kernels::router::query_norm::{
    QueryNormBackward, QueryNormForward, QueryNormRopeBackward, QueryNormRopeForward,
};
use moh_kernels::router::{RouterGradient, RouterRanks, Routing};
use moh_kernels::{Backend, Element, ViewMut};

use super::attention::{AttentionBuffers, SavedAttention};
use super::rope::Rope;
use super::{ActivationGradients, BackwardContext, Context, QkNorm};
use crate::Error;

/// How queries and keys become those that attention reads.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Rotation {
    /// RoPE, in place.
    Rope,
    /// Norms, then RoPE, in a copy: the backward pass of the norms and the router read the
    /// projection's output. The copy is cheap to recompute.
    NormedRope(QkNorm),
}

impl Rotation {
    /// Queries, keys and values as attention reads them.
    pub fn rotated<'v, S>(&self, projected: &'v S, copy: &'v S) -> &'v S {
        match self {
            Rotation::Rope => projected,
            Rotation::NormedRope(_) => copy,
        }
    }

    /// Selects each token's heads by its queries, in a layer with a router, and rotates queries and
    /// keys.
    pub fn forward<B: Backend, T: Element>(
        &self,
        cx: &Context<'_, B, T>,
        layer: usize,
        buffers: &mut AttentionBuffers<'_, B, T>,
    ) -> Result<(), Error> {
        match self {
            Rotation::Rope => route_and_rotate(cx, layer, buffers.saved),
            Rotation::NormedRope(_) => {
                route(cx, layer, buffers.saved)?;
                self.recompute(cx, &buffers.saved.qkv, buffers.rotated)
            }
        }
    }

    /// Rotates queries and keys again if they are in a copy.
    pub fn recompute<B: Backend, T: Element>(
        &self,
        cx: &Context<'_, B, T>,
        qkv: &B::Buffer<T>,
        rotated: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        let Rotation::NormedRope(norm) = self else { return Ok(()) };
        let all = 0..cx.num_tokens() * cx.tokens.shape.row();
        norm.forward(cx, B::view(qkv, all.clone()), B::view_mut(rotated, all.clone()))?;
        Rope.forward(cx, B::view_mut(rotated, all))
    }

    /// Replaces the gradients of queries and keys in `d_qkv`, as attention reads them, by the
    /// gradients of the projection's output, including the router's.
    pub fn backward<B: Backend, T: Element, G: Element>(
        &self,
        cx: &mut BackwardContext<'_, B, T, G>,
        layer: usize,
        saved: &SavedAttention<B, T>,
        d: &mut ActivationGradients<B, T>,
        d_qkv: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        let all = 0..cx.num_tokens() * cx.tokens.shape.row();
        let qkv = B::view(&saved.qkv, all.clone());
        let mut d_qkv = B::view_mut(d_qkv, all);
        match self {
            Rotation::Rope => route_and_rotate_backward(cx, layer, saved, d, d_qkv),
            Rotation::NormedRope(norm) => {
                Rope.backward(cx, B::reborrow_mut(&mut d_qkv))?;
                norm.backward(cx, qkv, B::reborrow_mut(&mut d_qkv))?;
                route_backward(cx, layer, saved, d, d_qkv)
            }
        }
    }
}

/// Selects each token's heads, in a layer with a router.
fn route<B: Backend, T: Element>(
    cx: &Context<'_, B, T>,
    layer: usize,
    saved: &mut SavedAttention<B, T>,
) -> Result<(), Error> {
    let (shape, sum) = (&cx.tokens.shape, cx.sum_over_ranks());
    if let (Some(router), Some(routing)) = (&cx.routers[layer], &mut saved.routing) {
        let qkv = B::view(&saved.qkv, 0..shape.tokens() * shape.row());
        let all_reduce = cx.is_tensor_parallel().then_some(&sum as AllReduce<'_, B>);
        router.forward(cx.backend, QueryNormForward { shape, qkv, routing, all_reduce })?;
    }
    Ok(())
}

/// Adds the router's gradients, in a layer with a router.
fn route_backward<B: Backend, T: Element, G: Element>(
    cx: &BackwardContext<'_, B, T, G>,
    layer: usize,
    saved: &SavedAttention<B, T>,
    d: &mut ActivationGradients<B, T>,
    mut d_qkv: ViewMut<'_, B, T>,
) -> Result<(), Error> {
    let (shape, sum) = (&cx.tokens.shape, cx.sum_over_ranks());
    if let (Some(router), Some(routing)) = (&cx.routers[layer], &saved.routing) {
        let qkv = B::view(&saved.qkv, 0..shape.tokens() * shape.row());
        let gradient = router_gradient(cx, routing, d, &sum);
        let d_qkv = B::reborrow_mut(&mut d_qkv);
        router.backward(cx.backend, QueryNormBackward { shape, qkv, d_qkv, gradient })?;
    }
    Ok(())
}

/// Selects each token's heads, in a layer with a router, and rotates queries and keys.
fn route_and_rotate<B: Backend, T: Element>(
    cx: &Context<'_, B, T>,
    layer: usize,
    saved: &mut SavedAttention<B, T>,
) -> Result<(), Error> {
    let sum = cx.sum_over_ranks();
    let len = cx.num_tokens() * cx.tokens.shape.row();
    let rope = Rope.args(cx, B::view_mut(&mut saved.qkv, 0..len));
    match (&cx.routers[layer], &mut saved.routing) {
        (Some(router), Some(routing)) => {
            let all_reduce = cx.is_tensor_parallel().then_some(&sum as AllReduce<'_, B>);
            router.forward_and_rotate(
                cx.backend,
                QueryNormRopeForward { rope, routing, all_reduce },
            )?;
        }
        _ => cx.backend.rope_forward(rope)?,
    }
    Ok(())
}

/// The backward pass of [`route_and_rotate`].
fn route_and_rotate_backward<B: Backend, T: Element, G: Element>(
    cx: &BackwardContext<'_, B, T, G>,
    layer: usize,
    saved: &SavedAttention<B, T>,
    d: &mut ActivationGradients<B, T>,
    mut d_qkv: ViewMut<'_, B, T>,
) -> Result<(), Error> {
    let (sum, len) = (cx.sum_over_ranks(), cx.num_tokens() * cx.tokens.shape.row());
    let rope = Rope.args(cx, B::reborrow_mut(&mut d_qkv));
    match (&cx.routers[layer], &saved.routing) {
        (Some(router), Some(routing)) => {
            let qkv = B::view(&saved.qkv, 0..len);
            let gradient = router_gradient(cx, routing, d, &sum);
            router
                .backward_and_rotate(cx.backend, QueryNormRopeBackward { qkv, rope, gradient })?;
        }
        _ => cx.backend.rope_backward(rope)?,
    }
    Ok(())
}

/// The gradients that reach a layer's router.
fn router_gradient<'v, B: Backend, T: Element, G: Element>(
    cx: &BackwardContext<'_, B, T, G>,
    routing: &'v Routing<B>,
    d: &'v mut ActivationGradients<B, T>,
    all_reduce: AllReduce<'v, B>,
) -> RouterGradient<'v, B> {
    let table = 0..cx.num_tokens() * routing.columns();
    RouterGradient {
        routing,
        delta: cx.straight_through.then(|| B::whole(&d.delta)),
        balance_weight: cx.balance_weight,
        ranks: cx
            .is_tensor_parallel()
            .then(|| RouterRanks { table: B::view_mut(&mut d.deltas, table), all_reduce }),
    }
}
