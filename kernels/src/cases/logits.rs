//! Cases of the routers by logits.

use super::{Case, Sizes, Work, random_elements};
use crate::backend::Backend;
use crate::error::Result;
use crate::ranks::Heads;
use crate::router::logits::{HeadWeights, LogitRouter, LogitsBackward, LogitsForward};
use crate::router::{RouterGradient, Routing, SharedHeads};
use crate::scalar::Element;

/// A router and its buffers.
struct LogitCase<B: Backend, T: Element> {
    router: LogitRouter,
    tokens: usize,
    logits: B::Buffer<T>,
    delta: B::Buffer<f32>,
    routing: Routing<B>,
}

impl<B: Backend, T: Element> LogitCase<B, T> {
    /// Routes once.
    fn new(backend: &B, sizes: Sizes, weights: HeadWeights) -> Result<Self> {
        let heads = sizes.attention.heads;
        let tokens = sizes.attention.tokens();
        let router =
            LogitRouter { shared: SharedHeads::first(heads / 2), top_k: heads / 4, weights };
        let mut case = LogitCase {
            router,
            tokens,
            logits: random_elements::<B, T>(backend, tokens * router.logits(heads))?,
            delta: random_elements::<B, f32>(backend, tokens * heads)?,
            routing: Routing::new(backend, router.routing_shape(tokens, Heads::all(heads))?)?,
        };
        case.forward(backend)?;
        Ok(case)
    }

    fn forward(&mut self, backend: &B) -> Result<()> {
        let LogitCase { tokens, logits, routing, .. } = self;
        let (logits, tokens) = (B::whole(logits), *tokens);
        let args = LogitsForward { logits, tokens, routing, all_reduce: None };
        backend.logits_forward::<T>(self.router, args)
    }

    /// Replaces the logits by their gradients.
    fn backward(&mut self, backend: &B) -> Result<()> {
        let LogitCase { router, tokens, logits, delta, routing } = self;
        let gradient = RouterGradient {
            routing,
            delta: Some(B::whole(delta)),
            balance_weight: 0.01,
            ranks: None,
        };
        let (tokens, d_logits) = (0..*tokens, B::whole_mut(logits));
        backend.logits_backward::<T>(*router, LogitsBackward { tokens, d_logits, gradient })
    }
}

/// Without and with weights, forward and backward.
pub(super) fn cases<B: Backend, T: Element>(sizes: Sizes) -> Vec<Case<B>> {
    // The saved logits, in f64.
    let moved = Work::moved::<f64>(sizes.attention.tokens() * sizes.attention.heads);
    let case = move |weights| move |backend: &B| LogitCase::<B, T>::new(backend, sizes, weights);
    let routers = [("logits", HeadWeights::One), ("two_stage_logits", HeadWeights::TwoStage)];
    let both = routers.map(|(name, weights)| {
        let forward = move |backend: &B| {
            let mut case = case(weights)(backend)?;
            Ok(move |backend: &B| case.forward(backend))
        };
        let backward = move |backend: &B| {
            let mut case = case(weights)(backend)?;
            Ok(move |backend: &B| case.backward(backend))
        };
        [
            Case::new(format!("{name}_forward"), moved, forward),
            Case::new(format!("{name}_backward"), moved, backward),
        ]
    });
    both.into_iter().flatten().collect()
}
