//! The router of the paper for pretrained models: a routed head is scored by the norm of its query
//! ([`moh_kernels::router::query_norm`]).

use std::sync::Arc;

use moh_kernels::ranks::Heads;
use moh_kernels::router::query_norm::{
    QueryNormBackward, QueryNormForward, QueryNormRopeBackward, QueryNormRopeForward,
    QueryNormRouter,
};
use moh_kernels::router::{RoutingShape, SharedHeads};
use moh_kernels::{Backend, Element, Result};

use super::Router;
use crate::{LayerHeads, ModelConfig};

/// The router of a layer; `None` without routed heads.
pub(super) fn router<B: Backend, T: Element>(
    config: &ModelConfig,
    layer: usize,
) -> Option<Arc<dyn Router<B, T>>> {
    of_layer(config, layer).map(|router| Arc::new(router) as _)
}

/// As [`router`], whatever the device and the elements.
pub(super) fn of_layer(config: &ModelConfig, layer: usize) -> Option<QueryNormRouter> {
    let LayerHeads { shared, top_k } = config.layer_heads(layer);
    let shared = SharedHeads::first(shared);
    (config.routed_heads(layer) > 0).then_some(QueryNormRouter { shared, top_k })
}

impl<B: Backend, T: Element> Router<B, T> for QueryNormRouter {
    fn routing_shape(&self, tokens: usize, heads: Heads) -> Result<RoutingShape> {
        QueryNormRouter::routing_shape(self, tokens, heads)
    }

    fn forward(&self, backend: &B, args: QueryNormForward<'_, B, T>) -> Result<()> {
        backend.query_norm_forward(*self, args)
    }

    fn backward(&self, backend: &B, args: QueryNormBackward<'_, B, T>) -> Result<()> {
        backend.query_norm_backward(args)
    }

    fn forward_and_rotate(&self, backend: &B, args: QueryNormRopeForward<'_, B, T>) -> Result<()> {
        backend.query_norm_rope_forward(*self, args)
    }

    fn backward_and_rotate(
        &self,
        backend: &B,
        args: QueryNormRopeBackward<'_, B, T>,
    ) -> Result<()> {
        backend.query_norm_rope_backward(args)
    }
}
