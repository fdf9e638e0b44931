//! Routers select, for every token, the heads that a block's attention computes.
//!
//! A model has one router for each layer, or none if the layer is dense. The configuration names one of
//! [`RouterKind`], such as the paper's router for pretrained models, whose operators are in
//! [`moh_kernels::router`]. Any other one implements [`Router`] and is given to [`Model::with_routers`](crate::Model::with_routers);
//! its parameters are tensors of the block. Attention does not depend on the router: it uses the
//! selection of its [`Routing`].

mod kind;
mod parameters;
mod statistics;

use std::ops::Range;
use std::sync::Arc;

use moh_kernels::ranks::AllReduce;
use moh_kernels::router::logits::{HeadWeights, LogitRouter};
use moh_kernels::router::query_norm::{QueryNormRouter, Selects};
use moh_kernels::router::{RouterGradient, Routing, RoutingShape, SharedHeads};
use moh_kernels::{Backend, Cpu, Element, Heads, QkvShape, Result, View, ViewMut};

pub(crate) use kind::HeadGroups;
pub use kind::RouterKind;
pub(crate) use parameters::LayerGradients;
pub use parameters::{ParameterGradients, Parameters};
pub use statistics::{LayerRouting, RoutingStatistics, entropy};

use crate::layers::RouterSpec;
use crate::{LayerHeads, ModelConfig};

/// Selects the active heads of each token of a layer.
pub trait Router<B: Backend, T: Element>: Send + Sync {
    /// Sizes of the routing of up to `tokens` tokens of a layer with `heads`.
    fn routing_shape(&self, tokens: usize, heads: Heads) -> Result<RoutingShape>;

    /// The heads that every token computes.
    fn shared_heads(&self) -> SharedHeads;

    /// The router's parameters, in a block whose input has `hidden_size` elements. Every
    /// tensor-parallel rank has all of them.
    fn parameters(&self, _hidden_size: usize) -> Vec<RouterParameter> {
        Vec::new()
    }

    /// Routes the tokens: begins the routing, writes its selection, gates and weights, and
    /// completes it ([`moh_kernels::router::Routers::complete_routing`]). When blocks are
    /// recomputed it is called again in the backward pass, and must select the same heads.
    fn forward(&self, backend: &B, args: RouterForward<'_, B, T>) -> Result<()>;

    /// Adds the gradients that reach the block's input, queries, keys and values, and parameters
    /// through the router.
    fn backward(&self, backend: &B, args: RouterBackward<'_, B, T>) -> Result<()>;

    /// Adds `scale` times the router's own loss over the routed tokens to `out`, `[1]`: the paper's
    /// balance loss, unless the router overrides it. [`RouterGradient::balance_weight`] is its
    /// weight in the total loss.
    fn loss(
        &self,
        backend: &B,
        routing: &Routing<B>,
        scale: f64,
        out: ViewMut<'_, B, f64>,
    ) -> Result<()> {
        backend.balance_loss(routing, scale, out)
    }
}

/// A matrix that a router learns. Weight decay applies to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouterParameter {
    /// Its name in the block, such as `self_attn.router.weight`.
    pub name: String,
    /// Its outputs and inputs.
    pub shape: [usize; 2],
}

/// Arguments of a router's forward pass.
pub struct RouterForward<'a, B: Backend, T: Element> {
    /// Shape of `qkv`, of local heads.
    pub shape: &'a QkvShape,
    /// The block's normed input, `[N, C]`.
    pub x: View<'a, B, T>,
    /// Queries before RoPE, keys and values; `[N, (H + 2G) D]`.
    pub qkv: View<'a, B, T>,
    /// The router's parameters.
    pub parameters: Parameters<'a, B, T>,
    /// Overwritten.
    pub routing: &'a mut Routing<B>,
    /// The sum over the ranks that share the heads; given if there are several. A router calls it
    /// the same number of times on each of them.
    pub all_reduce: Option<AllReduce<'a, B>>,
}

/// Arguments of a router's backward pass. Tensor-parallel ranks share the tokens: each computes the
/// gradients of the block's input and of the parameters from its own tokens alone.
pub struct RouterBackward<'a, B: Backend, T: Element> {
    /// Shape of `qkv`.
    pub shape: &'a QkvShape,
    /// This rank's own tokens, M of N.
    pub tokens: Range<usize>,
    /// The block's normed input, `[M, C]`.
    pub x: View<'a, B, T>,
    /// Queries, keys and values, either both these and `d_qkv` before RoPE or both after it;
    /// `[N, (H + 2G) D]`.
    pub qkv: View<'a, B, T>,
    /// The router's parameters.
    pub parameters: Parameters<'a, B, T>,
    /// The gradients that reach the routing. Its table for ranks has room for the delta of every
    /// head of the layer, `[N, heads]`, if the router weights heads, else for those of the columns.
    pub gradient: RouterGradient<'a, B>,
    /// Added to; `[M, C]`.
    pub d_x: ViewMut<'a, B, T>,
    /// Added to; `[N, (H + 2G) D]`.
    pub d_qkv: ViewMut<'a, B, T>,
    /// The gradients of the parameters.
    pub d_parameters: &'a mut dyn ParameterGradients<B, T>,
}

/// The routers of a model that its configuration does not have.
pub(crate) type CustomRouters<B, T> = Vec<Arc<dyn Router<B, T>>>;

/// The routers of a configuration's layers; `None` for a dense layer, including a layer without
/// routed heads.
pub(crate) fn of_config(config: &ModelConfig) -> Vec<Option<RouterSpec>> {
    (0..config.num_hidden_layers).map(|layer| of_layer(config, layer)).collect()
}

pub(crate) fn of_layer(config: &ModelConfig, layer: usize) -> Option<RouterSpec> {
    let kind = config.moh.as_ref().filter(|_| config.routed_heads(layer) > 0)?.router;
    let LayerHeads { shared, top_k } = config.layer_heads(layer);
    let by_logits = |weights| RouterSpec::Logits(LogitRouter { shared, top_k, weights });
    let by_norms = |selects| RouterSpec::QueryNorm(QueryNormRouter { shared, top_k, selects });
    Some(match kind {
        RouterKind::QueryNorm => by_norms(Selects::Heads),
        RouterKind::Group => by_norms(Selects::Groups),
        RouterKind::WithinGroup => by_norms(Selects::WithinGroups),
        RouterKind::Static => RouterSpec::Static(shared),
        RouterKind::Linear => by_logits(HeadWeights::One),
        RouterKind::OneStage => by_logits(HeadWeights::OneStage),
        RouterKind::TwoStage => by_logits(HeadWeights::TwoStage),
    })
}

/// Sizes of a routing that fits every layer of a configuration; `None` if all layers are dense.
pub(crate) fn routing_shape_of(
    config: &ModelConfig,
    tokens: usize,
    heads: Heads,
) -> Result<Option<RoutingShape>> {
    // A configuration has none of these.
    let custom = CustomRouters::<Cpu, f32>::new();
    let routers = (0..config.num_hidden_layers).filter_map(|layer| of_layer(config, layer));
    largest(routers.map(|router| router.routing_shape(&custom, tokens, heads)))
}

/// Sizes that serve each of the layers.
pub(crate) fn largest(
    layers: impl Iterator<Item = Result<RoutingShape>>,
) -> Result<Option<RoutingShape>> {
    let mut shape: Option<RoutingShape> = None;
    for layer in layers {
        let layer = layer?;
        shape = Some(shape.map_or(layer, |shape| RoutingShape {
            columns: shape.columns.max(layer.columns),
            saved_per_token: shape.saved_per_token.max(layer.saved_per_token),
            weighted: shape.weighted || layer.weighted,
            logits: shape.logits.max(layer.logits),
            ..shape
        }));
    }
    Ok(shape)
}
