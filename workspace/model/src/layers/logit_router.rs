//! The routers by logits, z = x W^T of the block's normed input x: "linear", whose gates are
//! straight-through, "two-stage", which weighs the heads (equations 5 and 6, normalised as in the authors'
//! code), and "one-stage", which does so without the weights of the two stages.
//! [`moh_kernels::router::logits`] has the formulas.
//!
//! Row i of `self_attn.router.weight`, `[heads, C]`, is that of head i, whether it is shared or routed;
//! the two rows of `self_attn.router.stages.weight` are those of the two stages. So tensors do not depend
//! on the set of shared heads. Rows that a router does not read get no gradient: those of shared heads
//! without weights, and the stages without shared heads.

use moh_kernels::linear::{LinearBackwardInput, LinearBackwardWeight, LinearForward};
use moh_kernels::ranks::AllReduce;
use moh_kernels::router::Routing;
use moh_kernels::router::logits::{HeadWeights, LogitRouter, LogitsBackward, LogitsForward};
use moh_kernels::{Accumulation, Backend, Element, View};

use super::router::{RouterInputs, gradient};
use super::{ActivationGradients, BackwardContext, Context};
use crate::parameters::ParameterRange;
use crate::tensors::{Division, ROUTER, ROUTER_STAGES, TensorList};
use crate::{Error, ModelConfig};

/// A router by logits, and where its matrices are.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct LogitLayer {
    pub router: LogitRouter,
    /// Width of the block's input, C.
    width: usize,
    /// Heads of the layer.
    heads: usize,
    weight: ParameterRange,
    /// Of two-stage routing, after `weight`.
    stages: Option<ParameterRange>,
}

impl LogitLayer {
    /// Lists the router's matrices, which every tensor-parallel rank has.
    pub fn new(list: &mut TensorList<'_>, config: &ModelConfig, router: LogitRouter) -> Self {
        let (width, heads) = (config.hidden_size, config.num_attention_heads);
        let mut matrix = |name, outputs| list.matrix(name, [outputs, width], Division::Replicated);
        let weight = matrix(ROUTER, heads);
        let stages = (router.weights == HeadWeights::TwoStage).then(|| matrix(ROUTER_STAGES, 2));
        LogitLayer { router, width, heads, weight, stages }
    }

    /// The same matrices with other head counts.
    pub fn with_heads(&self, router: LogitRouter) -> Self {
        LogitLayer { router, ..self.clone() }
    }

    /// The rows of the logits, of which there are `router.logits`.
    fn rows(&self) -> ParameterRange {
        let has_stages = self.router.logits(self.heads) > self.heads;
        let stages = self.stages.iter().filter(|_| has_stages);
        ParameterRange::joined(std::iter::once(&self.weight).chain(stages).cloned())
    }

    /// The rows of the logits and their inputs.
    pub fn linear_weight(&self) -> (ParameterRange, usize) {
        (self.rows(), self.width)
    }

    /// What the balance loss sum_i f_i P_i is multiplied by: in the authors' code of two-stage routing
    /// the number of routed heads.
    pub fn balance_factor<B: Backend>(&self, routing: &Routing<B>) -> f64 {
        if self.router.weighs() { routing.routed() as f64 } else { 1.0 }
    }

    /// Selects, and weighs, each token's heads by `x`, `[N, C]` of all tokens.
    pub fn forward<B: Backend, T: Element>(
        &self,
        cx: &Context<'_, B, T>,
        x: View<'_, B, T>,
        routing: &mut Routing<B>,
        logits: &mut B::Buffer<T>,
        all_reduce: Option<AllReduce<'_, B>>,
    ) -> Result<(), Error> {
        self.logits(cx, x, logits)?;
        let tokens = cx.num_tokens();
        let logits = B::view(logits, 0..tokens * self.router.logits(self.heads));
        let args = LogitsForward { logits, tokens, routing, all_reduce };
        Ok(cx.backend.logits_forward(self.router, args)?)
    }

    /// Computes the logits alone, `[N, router.logits]`, by `x`, `[N, C]` of all tokens.
    pub fn logits<B: Backend, T: Element>(
        &self,
        cx: &Context<'_, B, T>,
        x: View<'_, B, T>,
        logits: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        let elements = 0..cx.num_tokens() * self.router.logits(self.heads);
        cx.backend.linear_forward(LinearForward {
            inputs: self.width,
            x: B::reborrow(x),
            weight: cx.weights.get(&self.rows()),
            residual: None,
            y: B::view_mut(logits, elements),
            independent: cx.tokens.independent,
            packed: cx.packed(&self.rows()),
        })?;
        Ok(())
    }

    /// Adds the gradients of the matrices by this rank's own tokens, and writes that of `x` to
    /// `d.hidden`, `[N, C]`: zeros for the tokens of other ranks.
    pub fn backward<B: Backend, T: Element, G: Element>(
        &self,
        cx: &mut BackwardContext<'_, B, T, G>,
        inputs: &RouterInputs<'_, B, T>,
        logits: &mut B::Buffer<T>,
        d: &mut ActivationGradients<B, T>,
    ) -> Result<(), Error> {
        let RouterInputs { x, routing, .. } = *inputs;
        let (width, own, sum) = (self.width, cx.own_tokens(), cx.forward.sum_over_ranks());
        let tokens = own.start()..own.start() + own.local();
        let elements = tokens.start * width..tokens.end * width;
        let d_logits = 0..tokens.len() * self.router.logits(self.heads);
        for matrix in std::iter::once(&self.weight).chain(&self.stages) {
            cx.gradients.clear_stale(cx.forward.backend, matrix)?;
        }
        let mut gradient = gradient(cx, routing, &d.delta, &mut d.deltas, &sum);
        gradient.balance_weight *= self.balance_factor(routing) as f32;
        cx.backend.logits_backward(
            self.router,
            LogitsBackward { tokens, d_logits: B::view_mut(logits, d_logits.clone()), gradient },
        )?;
        let (rows, accumulation) = (self.rows(), Accumulation::Add);
        cx.forward.backend.linear_backward_weight(LinearBackwardWeight {
            inputs: width,
            x: B::view(x, 0..elements.len()),
            d_y: B::view(logits, d_logits.clone()),
            d_weight: cx.gradients.get_mut(&rows),
            accumulation,
        })?;
        cx.backend.zero(B::view_mut(&mut d.hidden, 0..cx.num_tokens() * width))?;
        cx.backend.linear_backward_input(LinearBackwardInput {
            inputs: width,
            d_y: B::view(logits, d_logits),
            weight: cx.weights.get(&rows),
            d_x: B::view_mut(&mut d.hidden, elements),
            accumulation,
        })?;
        Ok(())
    }
}
