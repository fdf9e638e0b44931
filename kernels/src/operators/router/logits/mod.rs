//! Routers that score heads by logits z, linear functions of the block's input, one for each head of
//! the layer:
//!
//! ```text
//! p = softmax(z) over the routed heads        gates = p
//! selected = the top-k logits of the routed heads (a tie selects the lower head)
//! ```
//!
//! Without weights, such a router does not change the outputs of heads, and its backward pass is straight-through:
//! the gradient of a selected head's weight, `<dO, O>`, is used as its gate's gradient. With weights, it uses
//! two-stage routing (arXiv 2410.11842, equations 5 and 6, normalised as in the authors' code) with
//! S shared heads and two more logits y,
//!
//! ```text
//! r_i = k p_i / (sum of the selected p)       s = S softmax(z) over the shared heads
//! (a, b) = 2 softmax(y)                       weights = a s_i of shared heads, b r_i of selected heads
//! ```
//!
//! or r without shared heads, which then has no y. One-stage routing has no y either, and a = b = 1.
//! With equal logits every weight is 1. The weights are differentiable, so `<dO, O>` is their gradient.
//! Shared heads also have logits, but a router without weights does not read them. The balance loss adds to the
//! gradient of p.
//!
//! Ranks that share a layer's heads sum tables of the logits. Each rank adds the logits of its own heads, and
//! the first rank adds y. All ranks must select the same heads, but each may round products differently.

mod cpu;
#[cfg(gpu)]
pub(crate) mod cuda;

use std::ops::Range;

use super::{RouterGradient, Routers, Routing, RoutingShape, SharedHeads};
use crate::ranks::AllReduce;
use crate::{Element, Heads, Memory, Result, View, ViewMut, check_len, ensure};

/// A router by logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogitRouter {
    /// Heads that every token computes.
    pub shared: SharedHeads,
    /// Routed heads that a token selects.
    pub top_k: usize,
    /// The factors of the outputs of active heads.
    pub weights: HeadWeights,
}

/// The factors by which a router by logits multiplies the outputs of active heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadWeights {
    /// 1: the gradients of the gates are straight-through.
    One,
    /// The weights within the shared heads and within the selected heads, s and r.
    OneStage,
    /// Weights of both stages: a s and b r.
    TwoStage,
}

impl LogitRouter {
    /// Returns the number of logits of a token in a layer of `heads` heads: one for each head, and two for the stages,
    /// if any.
    pub fn logits(&self, heads: usize) -> usize {
        let has_stages = self.weights == HeadWeights::TwoStage && !self.shared.is_empty();
        heads + if has_stages { 2 } else { 0 }
    }

    /// Returns whether the outputs of heads are multiplied by weights other than 1.
    pub fn weighs(&self) -> bool {
        self.weights != HeadWeights::One
    }

    /// Returns the sizes of the routing of `tokens` tokens in a layer of `heads`: the logits are saved.
    ///
    /// # Errors
    /// Fails if the router does not fit the heads.
    pub fn routing_shape(&self, tokens: usize, heads: Heads) -> Result<RoutingShape> {
        self.check("routing", heads.count)?;
        let columns = heads.count - self.shared.leading();
        let (weighted, logits) = (self.weighs(), self.logits(heads.count));
        let saved_per_token = logits;
        Ok(RoutingShape { tokens, heads, columns, saved_per_token, weighted, logits })
    }

    fn check(&self, operator: &'static str, heads: usize) -> Result<()> {
        let &LogitRouter { shared, top_k, .. } = self;
        shared.check(operator, heads)?;
        let routed = heads - shared.len();
        ensure(operator, top_k <= routed, || format!("top {top_k} of {routed} routed heads"))?;
        ensure(operator, !self.weighs() || routed == 0 || top_k > 0, || {
            "weights are those of selected heads: select at least one".into()
        })
    }
}

/// Arguments of [`Logits::logits_forward`].
pub struct LogitsForward<'a, M: Memory, T: Element> {
    /// The router.
    pub router: LogitRouter,
    /// The logits of all heads, then the logits of the two stages, if any; `[N, logits]`.
    pub logits: View<'a, M, T>,
    /// Number of tokens, N.
    pub tokens: usize,
    /// Overwritten.
    pub routing: &'a mut Routing<M>,
    /// The sum over the ranks that share the heads; required if several ranks share them.
    pub all_reduce: Option<AllReduce<'a, M>>,
}

/// Arguments of [`Logits::logits_backward`].
pub struct LogitsBackward<'a, M: Memory, T: Element> {
    /// The router.
    pub router: LogitRouter,
    /// The tokens with requested gradients, M of N.
    pub tokens: Range<usize>,
    /// Overwritten; `[M, logits]`.
    pub d_logits: ViewMut<'a, M, T>,
    /// The router's other inputs. The table for ranks has an element for each token and column, or
    /// each token and head of the layer if the router weighs them.
    pub gradient: RouterGradient<'a, M>,
}

/// Routers by logits as operators of a device.
pub trait Logits: Routers {
    /// Routes the tokens by their logits.
    fn logits_forward<T: Element>(&self, args: LogitsForward<'_, Self, T>) -> Result<()>;

    /// Computes the gradients of the logits of some tokens.
    fn logits_backward<T: Element>(&self, args: LogitsBackward<'_, Self, T>) -> Result<()>;
}

/// Checks a forward pass of `logits` elements and starts its routing.
fn begin<M: Memory>(
    operator: &'static str,
    router: LogitRouter,
    tokens: usize,
    logits: usize,
    routing: &mut Routing<M>,
) -> Result<()> {
    let heads = routing.heads().count;
    router.check(operator, heads)?;
    check_len(operator, "logits", logits, tokens * router.logits(heads))?;
    routing.begin(tokens, router.shared)?;
    check_routing(operator, router, routing)
}

fn check_backward<M: Memory>(
    operator: &'static str,
    router: LogitRouter,
    tokens: &Range<usize>,
    d_logits: usize,
    gradient: &RouterGradient<'_, M>,
) -> Result<()> {
    let routing = gradient.routing;
    ensure(operator, tokens.start <= tokens.end && tokens.end <= routing.tokens(), || {
        format!("tokens {tokens:?} of {}", routing.tokens())
    })?;
    let logits = router.logits(routing.heads().count);
    check_len(operator, "d_logits", d_logits, tokens.len() * logits)?;
    gradient.check(operator, router.shared)?;
    check_routing(operator, router, routing)
}

/// Rejects a routing without room for the logits or the weights.
fn check_routing<M: Memory>(
    operator: &'static str,
    router: LogitRouter,
    routing: &Routing<M>,
) -> Result<()> {
    routing.check_saved(operator, router.logits(routing.heads().count))?;
    ensure(operator, routing.shape.weighted || !router.weighs(), || {
        "the routing has no room for weights".into()
    })
}

/// Returns the elements of a token in the table that ranks exchange: the last heads of the layer.
fn exchanged<M: Memory>(router: LogitRouter, routing: &Routing<M>) -> usize {
    if router.weighs() { routing.heads().count } else { routing.columns() }
}
