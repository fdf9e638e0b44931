//! The router of a layer, which selects the heads that attention computes for each token.
//!
//! A router reads the block's normed input x, or the projection's queries.
//!
//! The routers by logits, z = x W^T:
//! - "linear": the gates are straight-through.
//! - "two-stage": weighs the heads (equations 5 and 6, normalised as in the authors' code).
//! - "one-stage": weighs the heads without the weights of the two stages.
//!
//! [`moh_kernels::router::logits`] has the formulas.
//!
//! Row i of `self_attn.router.weight`, `[heads, C]`, belongs to head i, shared or routed. The two rows of
//! `self_attn.router.stages.weight` belong to the two stages. So tensors do not depend on the set of shared heads. Rows
//! that a router does not read get no gradient: shared heads' rows without weights, and the stages' rows without shared
//! heads.

use moh_kernels::ranks::{AllReduce, Heads};
use moh_kernels::router::logits::{HeadWeights, LogitRouter, LogitsBackward, LogitsForward};
use moh_kernels::router::query_norm::{QueryNormBackward, QueryNormForward, QueryNormRouter};
use moh_kernels::router::{RouterGradient, RouterRanks, Routing, RoutingShape, SharedHeads};
use moh_kernels::{Accumulation, AnyBuffer, AnyView, AnyViewMut, Backend, ViewMut, for_element};

use super::{ActivationGradients, BackwardContext, Context, Linear};
use crate::parameters::ParameterRange;
use crate::tensors::{Division, ROUTER, ROUTER_STAGES, TensorList};
use crate::{ModelConfig, Result};

/// The selection of a layer's heads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum RouterSpec {
    /// A router by the norms of queries.
    QueryNorm(QueryNormRouter),
    /// No selection: every token computes these shared heads.
    Static(SharedHeads),
    /// A router by logits. Its matrices are tensors of the block.
    Logits(LogitRouter),
}

impl RouterSpec {
    /// Returns the sizes of the routing of up to `tokens` tokens of a layer with `heads`.
    pub fn routing_shape(&self, tokens: usize, heads: Heads) -> moh_kernels::Result<RoutingShape> {
        match self {
            RouterSpec::QueryNorm(router) => router.routing_shape(tokens, heads),
            RouterSpec::Static(shared) => Ok(RoutingShape {
                tokens,
                heads,
                columns: heads.count - shared.leading(),
                saved_per_token: 0,
                weighted: false,
                logits: 0,
            }),
            RouterSpec::Logits(router) => router.routing_shape(tokens, heads),
        }
    }

    pub fn shared_heads(&self) -> SharedHeads {
        match self {
            RouterSpec::QueryNorm(router) => router.shared,
            RouterSpec::Static(shared) => *shared,
            RouterSpec::Logits(router) => router.shared,
        }
    }
}

/// A router, and the ranges of its parameters.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RouterLayer {
    pub spec: RouterSpec,
    /// Width of the block's input, C.
    width: usize,
    heads: usize,
    /// The ranges of the router's matrices. A router by logits has the heads' matrix, and possibly the stages' after
    /// it.
    parameters: Vec<ParameterRange>,
}

/// The inputs of a router's backward pass.
pub(crate) struct RouterInputs<'a, B: Backend> {
    /// The block's normed input, `[M, C]`.
    pub x: &'a AnyBuffer<B>,
    /// Queries, keys and values, `[N, (H + 2G) D]`: rotated if their gradients are rotated.
    pub qkv: AnyView<'a, B>,
    pub routing: &'a Routing<B>,
}

impl RouterLayer {
    /// Lists the router's parameters, which every tensor-parallel rank has.
    pub fn new(list: &mut TensorList<'_>, config: &ModelConfig, spec: RouterSpec) -> Self {
        let (width, heads) = (config.hidden_size, config.num_attention_heads);
        let mut matrix = |name: &str, shape| list.matrix(name, shape, Division::Replicated);
        let parameters = match &spec {
            RouterSpec::QueryNorm(_) | RouterSpec::Static(_) => Vec::new(),
            RouterSpec::Logits(router) => {
                let weight = matrix(ROUTER, [heads, width]);
                let has_stages = router.weights == HeadWeights::TwoStage;
                let stages = has_stages.then(|| matrix(ROUTER_STAGES, [2, width]));
                [weight].into_iter().chain(stages).collect()
            }
        };
        RouterLayer { spec, width, heads, parameters }
    }

    /// Returns the router of a configuration, with the matrices of the layer's previous router, `before`. Returns
    /// `None` if the router needs matrices and `before` has no matrices.
    pub fn after(
        config: &ModelConfig,
        spec: RouterSpec,
        before: Option<&RouterLayer>,
    ) -> Option<Self> {
        let (width, heads) = (config.hidden_size, config.num_attention_heads);
        let parameters = match (&spec, before) {
            (RouterSpec::QueryNorm(_) | RouterSpec::Static(_), _) => Vec::new(),
            (
                RouterSpec::Logits(_),
                Some(RouterLayer { spec: RouterSpec::Logits(_), parameters, .. }),
            ) => parameters.clone(),
            (RouterSpec::Logits(_), _) => return None,
        };
        Some(RouterLayer { spec, width, heads, parameters })
    }

    /// Returns the linear layer of the logits, the heads' logits first; `None` for a router without logits.
    pub fn logits(&self) -> Option<Linear> {
        let RouterSpec::Logits(router) = &self.spec else { return None };
        Some(self.logits_of(router))
    }

    fn logits_of(&self, router: &LogitRouter) -> Linear {
        let has_stages = router.logits(self.heads) > self.heads;
        let matrices = self.parameters.iter().take(1 + usize::from(has_stages));
        Linear::at(ParameterRange::joined(matrices.cloned()), self.width)
    }

    /// Returns whether tokens select heads, so that there are gates, loads and a balance loss.
    pub fn selects(&self) -> bool {
        !matches!(self.spec, RouterSpec::Static(_))
    }

    /// Returns whether the router's gradient also reaches the block's input, not only queries, keys and values.
    pub fn reads_input(&self) -> bool {
        matches!(self.spec, RouterSpec::Logits(_))
    }

    /// Returns the factor of the balance loss sum_i f_i P_i. It is the number of routed heads for routers that weigh
    /// heads, as in the authors' code of two-stage routing.
    fn balance_factor<B: Backend>(&self, routing: &Routing<B>) -> f64 {
        match &self.spec {
            RouterSpec::Logits(router) if router.weighs() => routing.routed() as f64,
            _ => 1.0,
        }
    }

    /// Adds `scale` times the router's auxiliary loss over the routed tokens to `out`, `[1]`.
    pub fn loss<B: Backend>(
        &self,
        cx: &Context<'_, B>,
        routing: &Routing<B>,
        scale: f64,
        mut out: ViewMut<'_, B, f64>,
    ) -> Result<()> {
        let (scale, out) = (scale * self.balance_factor(routing), B::reborrow_mut(&mut out));
        if self.selects() {
            cx.backend.balance_loss(routing, scale, out)?;
        }
        Ok(())
    }

    /// Selects each token's heads by `x`, `[N, C]` of all tokens, and by `qkv` before RoPE. If `rotates`, then rotates
    /// queries and keys in place; routers by norms do both in one pass over the queries. A router by logits writes its
    /// logits to `logits`.
    pub fn forward<B: Backend>(
        &self,
        cx: &Context<'_, B>,
        x: AnyView<'_, B>,
        mut qkv: AnyViewMut<'_, B>,
        rotates: bool,
        routing: &mut Routing<B>,
        logits: &mut AnyBuffer<B>,
    ) -> Result<()> {
        let (shape, sum) = (&cx.tokens.shape, cx.sum_over_ranks());
        let all_reduce = cx.is_tensor_parallel().then_some(&sum as AllReduce<'_, B>);
        match &self.spec {
            &RouterSpec::QueryNorm(router) => {
                let rope = rotates.then(|| cx.rope_table());
                return Ok(for_element!(T: qkv.element() => {
                    let qkv = qkv.reborrow().typed();
                    let args = QueryNormForward { router, shape, qkv, rope, routing, all_reduce };
                    cx.backend.query_norm_forward::<T>(args)
                })?);
            }
            RouterSpec::Static(shared) => {
                cx.backend.route_to_shared(cx.num_tokens(), *shared, routing)?
            }
            &RouterSpec::Logits(router) => {
                let (linear, tokens) = (self.logits_of(&router), cx.num_tokens());
                linear.forward(cx, x, None, logits)?;
                let logits = logits.view(0..tokens * linear.outputs);
                for_element!(T: logits.element() => {
                    let logits = logits.typed();
                    let args = LogitsForward { router, logits, tokens, routing, all_reduce };
                    cx.backend.logits_forward::<T>(args)
                })?
            }
        }
        if rotates {
            cx.rotate(qkv)?;
        }
        Ok(())
    }

    /// Computes the router's gradients:
    /// 1. A router by norms adds them to the gradients of queries, keys and values in `d_qkv`.
    /// 2. A router by logits overwrites `logits` with their gradients, and adds the gradients of its parameters. It
    ///    writes the gradient of the block's input to `d.hidden`, `[N, C]`, with zeros for the tokens of other ranks.
    /// 3. If the forward pass `rotates`, replaces the gradients of rotated queries and keys by the gradients of
    ///    unrotated queries and keys.
    pub fn backward<B: Backend>(
        &self,
        cx: &mut BackwardContext<'_, B>,
        inputs: &RouterInputs<'_, B>,
        logits: &mut AnyBuffer<B>,
        d: &mut ActivationGradients<B>,
        mut d_qkv: AnyViewMut<'_, B>,
        rotates: bool,
    ) -> Result<()> {
        let RouterInputs { x, qkv, routing } = *inputs;
        for parameter in &self.parameters {
            cx.gradients.clear_stale(cx.forward.backend, parameter)?;
        }
        let (width, own) = (self.width, cx.own_tokens());
        let tokens = own.start()..own.start() + own.local();
        let elements = tokens.start * width..tokens.end * width;
        if self.reads_input() {
            d.hidden.view_mut(0..cx.num_tokens() * width).zero(cx.backend)?;
        }
        let (sum, x) = (cx.forward.sum_over_ranks(), x.view(0..elements.len()));
        match &self.spec {
            RouterSpec::Static(_) => {}
            &RouterSpec::QueryNorm(router) => {
                let (shape, rope) = (&cx.tokens.shape, rotates.then(|| cx.rope_table()));
                let gradient = gradient(cx, routing, &d.delta, &mut d.deltas, &sum);
                return Ok(for_element!(T: qkv.element() => {
                    let (qkv, d_qkv) = (qkv.typed(), d_qkv.reborrow().typed());
                    let args = QueryNormBackward { router, shape, qkv, d_qkv, rope, gradient };
                    cx.backend.query_norm_backward::<T>(args)
                })?);
            }
            &RouterSpec::Logits(router) => {
                let linear = self.logits_of(&router);
                let d_logits = 0..tokens.len() * linear.outputs;
                let mut gradient = gradient(cx, routing, &d.delta, &mut d.deltas, &sum);
                gradient.balance_weight *= self.balance_factor(routing) as f32;
                let written = logits.view_mut(d_logits.clone());
                for_element!(T: written.element() => {
                    let d_logits = written.typed();
                    let args = LogitsBackward { router, tokens, d_logits, gradient };
                    cx.backend.logits_backward::<T>(args)
                })?;
                let d_y = logits.view(d_logits);
                let (backend, add) = (cx.forward.backend, Accumulation::Add);
                linear.add_weight_gradient(backend, cx.gradients, x, d_y, add)?;
                linear.backward_rows(cx, d_y, d.hidden.view_mut(elements), add)?
            }
        }
        if rotates {
            cx.rotate_back(d_qkv)?;
        }
        Ok(())
    }
}

/// Returns the gradients that reach a layer's router. Ranks that share the heads exchange the deltas of all heads if
/// the router weighs heads, otherwise the deltas of the columns. A weight has a gradient even if the loss is not
/// straight-through.
fn gradient<'v, B: Backend>(
    cx: &BackwardContext<'_, B>,
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
