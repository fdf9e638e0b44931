//! Routers select, for every token, the heads that a block's attention computes.
//!
//! Each layer has a router, except dense layers. The configuration names a [`RouterKind`], such as the paper's router
//! for pretrained models; [`moh_kernels::router`] has the operators. Attention does not depend on the router: it uses
//! the selection of a [`Routing`](moh_kernels::router::Routing).

mod kind;
mod statistics;

use moh_kernels::router::RoutingShape;
use moh_kernels::router::logits::{HeadWeights, LogitRouter};
use moh_kernels::router::query_norm::{QueryNormRouter, Selects};
use moh_kernels::{Heads, Result};

pub(crate) use kind::HeadGroups;
pub use kind::RouterKind;
pub use statistics::{LayerRouting, RoutingStatistics, entropy};

use crate::layers::RouterSpec;
use crate::{LayerHeads, ModelConfig};

/// Returns the routers of a configuration's layers; `None` for a dense layer, including a layer without
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
        RouterKind::Static => RouterSpec::Static(shared),
        RouterKind::Linear => by_logits(HeadWeights::One),
        RouterKind::OneStage => by_logits(HeadWeights::OneStage),
        RouterKind::TwoStage => by_logits(HeadWeights::TwoStage),
    })
}

/// Returns the sizes of a routing that fits every layer of a configuration; `None` if all layers are dense.
pub(crate) fn routing_shape_of(
    config: &ModelConfig,
    tokens: usize,
    heads: Heads,
) -> Result<Option<RoutingShape>> {
    let routers = (0..config.num_hidden_layers).filter_map(|layer| of_layer(config, layer));
    largest(routers.map(|router| router.routing_shape(tokens, heads)))
}

/// Returns sizes that fit each of the layers.
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
