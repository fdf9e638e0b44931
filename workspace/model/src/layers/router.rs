//! The router of a layer, which selects the heads that attention computes for each token.
//!
//! The routers of a configuration ([`RouterKind`](crate::RouterKind)) are called here; any other one
//! implements [`Router`](crate::router::Router). It reads the block's normed input x, and the
//! projection's queries, keys and values.

use moh_kernels::ranks::{AllReduce, Heads};
use moh_kernels::router::logits::LogitRouter;
use moh_kernels::router::query_norm::{
    QueryNormBackward, QueryNormForward, QueryNormRopeBackward, QueryNormRopeForward,
    QueryNormRouter,
};
use moh_kernels::router::{RouterGradient, RouterRanks, Routing, RoutingShape, SharedHeads};
use moh_kernels::{Backend, Element, View, ViewMut};

use super::logit_router::LogitLayer;
use super::rope::Rope;
use super::{ActivationGradients, BackwardContext, Context};
use crate::parameters::ParameterRange;
use crate::router::{
    CustomRouters, LayerGradients, Parameters, Router, RouterBackward, RouterForward,
    RouterParameter,
};
use crate::tensors::{Division, TensorList};
use crate::{Error, ModelConfig};

/// What a layer's router is before the layer has its parameters.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum RouterSpec {
    /// A router by the norms of queries.
    QueryNorm(QueryNormRouter),
    /// None, with these heads shared.
    Static(SharedHeads),
    /// A router by logits, whose matrices are tensors of the block.
    Logits(LogitRouter),
    /// The router of this index among the model's [`CustomRouters`].
    Custom { index: usize, parameters: Vec<RouterParameter> },
}

impl RouterSpec {
    /// Sizes of the routing of up to `tokens` tokens of a layer with `heads`, by a configuration's
    /// router; a custom router says its own.
    pub fn routing_shape(
        &self,
        tokens: usize,
        heads: Heads,
    ) -> Option<moh_kernels::Result<RoutingShape>> {
        match self {
            RouterSpec::QueryNorm(router) => Some(router.routing_shape(tokens, heads)),
            RouterSpec::Static(shared) => Some(Ok(static_shape(*shared, tokens, heads))),
            RouterSpec::Logits(router) => Some(router.routing_shape(tokens, heads)),
            RouterSpec::Custom { .. } => None,
        }
    }
}

/// A router, and where its parameters are.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum RouterLayer {
    QueryNorm(QueryNormRouter),
    Static(SharedHeads),
    Logits(LogitLayer),
    Custom(CustomRouter),
}

/// One of the model's [`CustomRouters`] as a layer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CustomRouter {
    index: usize,
    /// Width of the block's input, C.
    width: usize,
    parameters: Vec<ParameterRange>,
}

/// What a router's backward pass reads.
pub(crate) struct RouterInputs<'a, B: Backend, T: Element> {
    /// The block's normed input, `[M, C]`.
    pub x: &'a B::Buffer<T>,
    /// Queries, keys and values, `[N, (H + 2G) D]`, rotated if their gradients are.
    pub qkv: View<'a, B, T>,
    pub routing: &'a Routing<B>,
}

impl RouterLayer {
    /// Lists the router's parameters, which every tensor-parallel rank has.
    pub fn new(list: &mut TensorList<'_>, config: &ModelConfig, spec: &RouterSpec) -> Self {
        let width = config.hidden_size;
        match spec {
            RouterSpec::QueryNorm(router) => RouterLayer::QueryNorm(*router),
            RouterSpec::Static(shared) => RouterLayer::Static(*shared),
            RouterSpec::Logits(router) => {
                RouterLayer::Logits(LogitLayer::new(list, config, *router))
            }
            RouterSpec::Custom { index, parameters } => {
                let matrix = |RouterParameter { name, shape }: &RouterParameter| {
                    list.matrix(name, *shape, Division::Replicated)
                };
                let parameters = parameters.iter().map(matrix).collect();
                RouterLayer::Custom(CustomRouter { index: *index, width, parameters })
            }
        }
    }

    /// The router of a configuration, with the matrices of `before`, the router that the layer had,
    /// if it needs any; `None` if that has none.
    pub fn after(spec: RouterSpec, before: Option<&RouterLayer>) -> Option<Self> {
        match (spec, before) {
            (RouterSpec::QueryNorm(router), _) => Some(RouterLayer::QueryNorm(router)),
            (RouterSpec::Static(shared), _) => Some(RouterLayer::Static(shared)),
            (RouterSpec::Logits(router), Some(RouterLayer::Logits(before))) => {
                Some(RouterLayer::Logits(before.with_heads(router)))
            }
            (RouterSpec::Logits(_) | RouterSpec::Custom { .. }, _) => None,
        }
    }

    /// Sizes of the routing of up to `tokens` tokens of a layer with `heads`.
    pub fn routing_shape<B: Backend, T: Element>(
        &self,
        routers: &CustomRouters<B, T>,
        tokens: usize,
        heads: Heads,
    ) -> moh_kernels::Result<RoutingShape> {
        match self {
            RouterLayer::QueryNorm(router) => router.routing_shape(tokens, heads),
            RouterLayer::Static(shared) => Ok(static_shape(*shared, tokens, heads)),
            RouterLayer::Logits(layer) => layer.router.routing_shape(tokens, heads),
            RouterLayer::Custom(custom) => routers[custom.index].routing_shape(tokens, heads),
        }
    }

    /// The heads that every token computes.
    pub fn shared_heads<B: Backend, T: Element>(
        &self,
        routers: &CustomRouters<B, T>,
    ) -> SharedHeads {
        match self {
            RouterLayer::QueryNorm(router) => router.shared,
            RouterLayer::Static(shared) => *shared,
            RouterLayer::Logits(layer) => layer.router.shared,
            RouterLayer::Custom(custom) => routers[custom.index].shared_heads(),
        }
    }

    /// Whether tokens select heads, so that there are gates, loads and a balance loss.
    pub fn selects(&self) -> bool {
        !matches!(self, RouterLayer::Static(_))
    }

    /// Whether the router's gradient reaches the block's input beside queries, keys and values.
    pub fn reads_input(&self) -> bool {
        matches!(self, RouterLayer::Logits(_) | RouterLayer::Custom(_))
    }

    /// Adds `scale` times the router's auxiliary loss over the routed tokens to `out`, `[1]`.
    pub fn loss<B: Backend, T: Element>(
        &self,
        cx: &Context<'_, B, T>,
        routing: &Routing<B>,
        scale: f64,
        mut out: ViewMut<'_, B, f64>,
    ) -> Result<(), Error> {
        let out = B::reborrow_mut(&mut out);
        match self {
            RouterLayer::QueryNorm(_) => cx.backend.balance_loss(routing, scale, out)?,
            RouterLayer::Static(_) => {}
            RouterLayer::Logits(layer) => {
                let scale = scale * layer.balance_factor(routing);
                cx.backend.balance_loss(routing, scale, out)?
            }
            RouterLayer::Custom(custom) => {
                custom.router(cx).loss(cx.backend, routing, scale, out)?
            }
        }
        Ok(())
    }

    /// Selects each token's heads by `x`, `[N, C]` of all tokens, and by `qkv` before RoPE. `logits` has
    /// room for those of a router by logits.
    pub fn forward<B: Backend, T: Element>(
        &self,
        cx: &Context<'_, B, T>,
        x: View<'_, B, T>,
        qkv: View<'_, B, T>,
        routing: &mut Routing<B>,
        logits: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        let (shape, sum) = (&cx.tokens.shape, cx.sum_over_ranks());
        let all_reduce = cx.is_tensor_parallel().then_some(&sum as AllReduce<'_, B>);
        let (x, qkv) = (B::reborrow(x), B::reborrow(qkv));
        match self {
            RouterLayer::QueryNorm(router) => cx.backend.query_norm_forward(
                *router,
                QueryNormForward { shape, qkv, routing, all_reduce },
            )?,
            RouterLayer::Static(shared) => {
                cx.backend.route_to_shared(cx.num_tokens(), *shared, routing)?
            }
            RouterLayer::Logits(layer) => layer.forward(cx, x, routing, logits, all_reduce)?,
            RouterLayer::Custom(custom) => {
                let parameters = custom.parameters(cx);
                let args = RouterForward { shape, x, qkv, parameters, routing, all_reduce };
                custom.router(cx).forward(cx.backend, args)?;
            }
        }
        Ok(())
    }

    /// As [`Self::forward`], then rotates queries and keys in place; the routers by norms do both in one
    /// pass over the queries.
    pub fn forward_and_rotate<B: Backend, T: Element>(
        &self,
        cx: &Context<'_, B, T>,
        x: View<'_, B, T>,
        mut qkv: ViewMut<'_, B, T>,
        routing: &mut Routing<B>,
        logits: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        let RouterLayer::QueryNorm(router) = self else {
            self.forward(cx, x, B::as_view(&qkv), routing, logits)?;
            return Rope.forward(cx, qkv);
        };
        let (sum, rope) = (cx.sum_over_ranks(), Rope.args(cx, B::reborrow_mut(&mut qkv)));
        let all_reduce = cx.is_tensor_parallel().then_some(&sum as AllReduce<'_, B>);
        let args = QueryNormRopeForward { rope, routing, all_reduce };
        Ok(cx.backend.query_norm_rope_forward(*router, args)?)
    }

    /// Adds the router's gradients to those of queries, keys and values in `d_qkv`, and to those of
    /// its parameters; those of logits overwrite `logits`. A router that reads the block's input writes the gradient of it to `d.hidden`:
    /// `[N, C]`, zeros for the tokens of other ranks.
    pub fn backward<B: Backend, T: Element, G: Element>(
        &self,
        cx: &mut BackwardContext<'_, B, T, G>,
        inputs: &RouterInputs<'_, B, T>,
        logits: &mut B::Buffer<T>,
        d: &mut ActivationGradients<B, T>,
        mut d_qkv: ViewMut<'_, B, T>,
    ) -> Result<(), Error> {
        let RouterInputs { qkv, routing, .. } = *inputs;
        match self {
            RouterLayer::QueryNorm(router) => {
                let (shape, sum) = (&cx.tokens.shape, cx.sum_over_ranks());
                let (qkv, d_qkv) = (B::reborrow(qkv), B::reborrow_mut(&mut d_qkv));
                let gradient = gradient(cx, routing, &d.delta, &mut d.deltas, &sum);
                let args = QueryNormBackward { shape, qkv, d_qkv, gradient };
                Ok(cx.backend.query_norm_backward(*router, args)?)
            }
            RouterLayer::Static(_) => Ok(()),
            RouterLayer::Logits(layer) => layer.backward(cx, inputs, logits, d),
            RouterLayer::Custom(custom) => custom.backward(cx, inputs, d, d_qkv),
        }
    }

    /// As [`Self::backward`], then replaces the gradients of rotated queries and keys by those of
    /// unrotated ones.
    pub fn backward_and_rotate<B: Backend, T: Element, G: Element>(
        &self,
        cx: &mut BackwardContext<'_, B, T, G>,
        inputs: &RouterInputs<'_, B, T>,
        logits: &mut B::Buffer<T>,
        d: &mut ActivationGradients<B, T>,
        mut d_qkv: ViewMut<'_, B, T>,
    ) -> Result<(), Error> {
        let RouterLayer::QueryNorm(router) = self else {
            self.backward(cx, inputs, logits, d, B::reborrow_mut(&mut d_qkv))?;
            return Rope.backward(cx, d_qkv);
        };
        let RouterInputs { qkv, routing, .. } = *inputs;
        let (sum, rope) = (cx.sum_over_ranks(), Rope.args(cx, B::reborrow_mut(&mut d_qkv)));
        let gradient = gradient(cx, routing, &d.delta, &mut d.deltas, &sum);
        let args = QueryNormRopeBackward { qkv: B::reborrow(qkv), rope, gradient };
        Ok(cx.backend.query_norm_rope_backward(*router, args)?)
    }
}

/// Sizes of a routing to the shared heads alone.
fn static_shape(shared: SharedHeads, tokens: usize, heads: Heads) -> RoutingShape {
    let columns = heads.count - shared.leading();
    RoutingShape { tokens, heads, columns, saved_per_token: 0, weighted: false, logits: 0 }
}

impl CustomRouter {
    /// Its implementation.
    fn router<'v, B: Backend, T: Element>(&self, cx: &Context<'v, B, T>) -> &'v dyn Router<B, T> {
        &*cx.routers[self.index]
    }

    fn parameters<'v, B: Backend, T: Element>(
        &'v self,
        cx: &Context<'v, B, T>,
    ) -> Parameters<'v, B, T> {
        Parameters { weights: cx.weights, ranges: &self.parameters }
    }

    fn backward<B: Backend, T: Element, G: Element>(
        &self,
        cx: &mut BackwardContext<'_, B, T, G>,
        inputs: &RouterInputs<'_, B, T>,
        d: &mut ActivationGradients<B, T>,
        mut d_qkv: ViewMut<'_, B, T>,
    ) -> Result<(), Error> {
        let RouterInputs { x, qkv, routing } = *inputs;
        let (width, own, sum) = (self.width, cx.own_tokens(), cx.forward.sum_over_ranks());
        let tokens = own.start()..own.start() + own.local();
        let elements = tokens.start * width..tokens.end * width;
        for parameter in &self.parameters {
            cx.gradients.clear_stale(cx.forward.backend, parameter)?;
        }
        cx.backend.zero(B::view_mut(&mut d.hidden, 0..cx.num_tokens() * width))?;
        let gradient = gradient(cx, routing, &d.delta, &mut d.deltas, &sum);
        let (cx, gradients) = (&cx.forward, &mut *cx.gradients);
        let mut d_parameters =
            LayerGradients { backend: cx.backend, gradients, ranges: &self.parameters };
        self.router(cx).backward(
            cx.backend,
            RouterBackward {
                shape: &cx.tokens.shape,
                x: B::view(x, 0..elements.len()),
                qkv: B::reborrow(qkv),
                parameters: self.parameters(cx),
                gradient,
                tokens,
                d_x: B::view_mut(&mut d.hidden, elements),
                d_qkv: B::reborrow_mut(&mut d_qkv),
                d_parameters: &mut d_parameters,
            },
        )?;
        Ok(())
    }
}

/// The gradients that reach a layer's router. Ranks that share the heads exchange the deltas of all
/// heads if the router weights them, else those of the columns. The gradient of a weight is no
/// straight-through one.
pub(super) fn gradient<'v, B: Backend, T: Element, G: Element>(
    cx: &BackwardContext<'_, B, T, G>,
    routing: &'v Routing<B>,
    delta: &'v B::Buffer<f32>,
    deltas: &'v mut B::Buffer<f64>,
    all_reduce: AllReduce<'v, B>,
) -> RouterGradient<'v, B> {
    let columns = if routing.is_weighted() { routing.heads().count } else { routing.columns() };
    let table = 0..cx.num_tokens() * columns;
    RouterGradient {
        routing,
        delta: (cx.straight_through || routing.is_weighted()).then(|| B::whole(delta)),
        balance_weight: cx.balance_weight,
        ranks: (cx.is_tensor_parallel())
            .then(|| RouterRanks { table: B::view_mut(deltas, table), all_reduce }),
    }
}
