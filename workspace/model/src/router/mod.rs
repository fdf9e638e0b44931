//! Routers select, for every token, the heads that a block's attention computes.
//!
//! A model has one router for each layer, or none if the layer is dense. The paper's router for
//! pretrained models, [`moh_kernels::router::query_norm`], is part of the configuration; any other
//! one implements [`Router`] and is set with [`Model::set_routers`](crate::Model::set_routers).
//! Attention and block do not depend on the router: they use the selection of its
//! [`moh_kernels::router::Routing`].

mod query_norm;
mod statistics;

use std::sync::Arc;

use moh_kernels::ranks::Heads;
use moh_kernels::router::RoutingShape;
use moh_kernels::router::query_norm::{
    QueryNormBackward, QueryNormForward, QueryNormRopeBackward, QueryNormRopeForward,
};
use moh_kernels::{Backend, Element, Result};

pub use statistics::{LayerRouting, RoutingStatistics};

use crate::ModelConfig;

/// Selects the active heads of each token of a layer.
pub trait Router<B: Backend, T: Element>: Send + Sync {
    /// Sizes of the routing of up to `tokens` tokens of a layer with `heads`.
    ///
    /// # Errors
    /// Fails if the router cannot route these heads.
    fn routing_shape(&self, tokens: usize, heads: Heads) -> Result<RoutingShape>;

    /// Routes the tokens: begins the routing, writes its selection, gates and weights, and
    /// completes it ([`moh_kernels::router::Routers::complete_routing`]). When blocks are
    /// recomputed it is called again in the backward pass, and must select the same heads.
    ///
    /// # Errors
    /// Fails if the device or another rank fails.
    fn forward(&self, backend: &B, args: QueryNormForward<'_, B, T>) -> Result<()>;

    /// Adds the gradients that reach queries, keys and values through the router, all after RoPE.
    ///
    /// # Errors
    /// Fails if the device or another rank fails.
    fn backward(&self, backend: &B, args: QueryNormBackward<'_, B, T>) -> Result<()>;

    /// Routes, then rotates queries and keys. A router that can do both in one pass over the
    /// queries overrides it.
    ///
    /// # Errors
    /// As [`Router::forward`].
    fn forward_and_rotate(&self, backend: &B, args: QueryNormRopeForward<'_, B, T>) -> Result<()> {
        let QueryNormRopeForward { rope, routing, all_reduce } = args;
        let qkv = B::as_view(&rope.qkv);
        self.forward(backend, QueryNormForward { shape: rope.shape, qkv, routing, all_reduce })?;
        backend.rope_forward(rope)
    }

    /// Adds the router's gradients, then replaces the gradients of rotated queries and keys by
    /// those of unrotated ones. A router that can do both in one pass over the queries overrides
    /// it.
    ///
    /// # Errors
    /// As [`Router::backward`].
    fn backward_and_rotate(
        &self,
        backend: &B,
        args: QueryNormRopeBackward<'_, B, T>,
    ) -> Result<()> {
        let QueryNormRopeBackward { qkv, mut rope, mut gradient } = args;
        let (shape, gradient) = (rope.shape, gradient.reborrow());
        let (qkv, d_qkv) = (B::reborrow(qkv), B::reborrow_mut(&mut rope.qkv));
        self.backward(backend, QueryNormBackward { shape, qkv, d_qkv, gradient })?;
        backend.rope_backward(rope)
    }
}

/// The routers of a configuration's layers; `None` for a dense layer, including a layer without
/// routed heads.
pub(crate) type Routers<B, T> = Vec<Option<Arc<dyn Router<B, T>>>>;

/// Creates the routers of a configuration.
pub(crate) fn routers<B: Backend, T: Element>(config: &ModelConfig) -> Routers<B, T> {
    let router = |layer| query_norm::router::<B, T>(config, layer);
    (0..config.num_hidden_layers).map(router).collect()
}

/// Sizes of a routing that fits every layer; `None` if all layers are dense.
///
/// # Errors
/// Heads that a router cannot route.
pub(crate) fn routing_shape<B: Backend, T: Element>(
    routers: &Routers<B, T>,
    tokens: usize,
    heads: Heads,
) -> Result<Option<RoutingShape>> {
    largest(routers.iter().flatten().map(|router| router.routing_shape(tokens, heads)))
}

/// As [`routing_shape`], with the routers that a configuration asks for.
///
/// # Errors
/// As [`routing_shape`].
pub(crate) fn routing_shape_of(
    config: &ModelConfig,
    tokens: usize,
    heads: Heads,
) -> Result<Option<RoutingShape>> {
    let layers =
        (0..config.num_hidden_layers).filter_map(|layer| query_norm::of_layer(config, layer));
    largest(layers.map(|router| router.routing_shape(tokens, heads)))
}

/// Sizes that serve each of the layers.
fn largest(layers: impl Iterator<Item = Result<RoutingShape>>) -> Result<Option<RoutingShape>> {
    let mut shape: Option<RoutingShape> = None;
    for layer in layers {
        let layer = layer?;
        shape = Some(shape.map_or(layer, |shape| RoutingShape {
            columns: shape.columns.max(layer.columns),
            saved_per_token: shape.saved_per_token.max(layer.saved_per_token),
            weighted: shape.weighted || layer.weighted,
            ..shape
        }));
    }
    Ok(shape)
}
