//! Cases of the routers by logits.

use super::{Case, Sizes, Work, random_elements};
use crate::router::logits::{HeadWeights, LogitRouter, LogitsBackward, LogitsForward};
use crate::router::{RouterGradient, Routing, SharedHeads};
use crate::{Backend, Element, Heads, QkvShape, Result};

/// Returns a router that has routed once, and its routing.
fn routing<B: Backend, T: Element>(
    backend: &B,
    router: LogitRouter,
    shape: QkvShape,
) -> Result<Routing<B>> {
    let (tokens, heads) = (shape.tokens(), shape.heads);
    let mut routing = Routing::new(backend, router.routing_shape(tokens, Heads::all(heads))?)?;
    let logits = random_elements::<B, T>(backend, tokens * router.logits(heads))?;
    let (logits, routed) = (B::whole(&logits), &mut routing);
    let args = LogitsForward { router, logits, tokens, routing: routed, all_reduce: None };
    backend.logits_forward::<T>(args)?;
    Ok(routing)
}

/// Returns the cases of a router without and with weights, forward and backward.
pub(super) fn cases<B: Backend, T: Element>(sizes: Sizes) -> Vec<Case<B>> {
    let (shape, heads, tokens) = (sizes.attention, sizes.attention.heads, sizes.attention.tokens());
    // The saved logits, in f64.
    let moved = Work::moved::<f64>(tokens * heads);
    let routers = [("logits", HeadWeights::One), ("two_stage_logits", HeadWeights::TwoStage)];
    let both = routers.map(|(name, weights)| {
        let (shared, top_k) = (SharedHeads::first(heads / 2), heads / 4);
        let router = LogitRouter { shared, top_k, weights };
        let elements = tokens * router.logits(heads);
        let forward = case!(format!("{name}_forward"), moved, |backend| [
            read logits = random_elements::<B, T>(backend, elements),
            own routing = routing::<B, T>(backend, router, shape),
        ] backend.logits_forward::<T>(LogitsForward {
            router, logits, tokens, routing, all_reduce: None,
        }));
        let backward = case!(format!("{name}_backward"), moved, |backend| [
            write d_logits = random_elements::<B, T>(backend, elements),
            read delta = random_elements::<B, f32>(backend, tokens * heads),
            own routing = routing::<B, T>(backend, router, shape),
        ] backend.logits_backward::<T>(LogitsBackward {
            router,
            tokens: 0..tokens,
            d_logits,
            gradient: RouterGradient {
                routing, delta: Some(delta), balance_weight: 0.01, ranks: None,
            },
        }));
        [forward, backward]
    });
    both.into_iter().flatten().collect()
}
