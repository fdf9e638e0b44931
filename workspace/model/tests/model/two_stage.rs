//! The router that the paper's authors train vision models with, two-stage routing with learned
//! gates (equations 5 and 6, normalised as in their code), written as a user of the library would:
//! computed on the host in f64, linear layers by the device.

use std::ops::Range;

use moh_kernels::linear::{LinearBackwardInput, LinearForward};
use moh_kernels::ranks::Heads;
use moh_kernels::router::{RouterRanks, RoutingShape, SharedHeads};
use moh_kernels::{Accumulation, Backend, Element, Result, View};
use moh_model::router::{Router, RouterBackward, RouterForward, RouterParameter};

/// With E routed heads and S shared ones, of the block's normed input x:
///
/// ```text
/// p = softmax(W_r x) over the routed heads, of which a token selects the `top_k` largest
/// r = k p / (sum of the selected p)      of the selected heads
/// s = S softmax(W_s x)                   of the shared heads
/// (a, b) = 2 softmax(W_h x)              weights = a s, b r; gates = p
/// ```
pub struct TwoStage {
    pub width: usize,
    pub heads: usize,
    pub shared_heads: usize,
    pub top_k: usize,
}

/// What a token's router computes.
struct Gates {
    p: Vec<f64>,
    selected: Vec<bool>,
    r: Vec<f64>,
    s: Vec<f64>,
    ab: [f64; 2],
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exponentials: Vec<f64> = logits.iter().map(|logit| (logit - largest).exp()).collect();
    let sum: f64 = exponentials.iter().sum();
    exponentials.iter().map(|e| e / sum).collect()
}

/// The gradient of the logits of `y = scale softmax(logits)`.
fn softmax_backward(y: &[f64], d_y: &[f64], scale: f64) -> Vec<f64> {
    let inner: f64 = y.iter().zip(d_y).map(|(y, d)| y * d).sum::<f64>() / scale;
    y.iter().zip(d_y).map(|(y, d)| y * (d - inner)).collect()
}

impl Gates {
    fn new(router: &TwoStage, [routed, shared, stages]: [&[f64]; 3]) -> Self {
        let p = softmax(routed);
        let ahead = |head: usize| {
            let before = |other: &usize| (p[*other], head) > (p[head], *other);
            (0..p.len()).filter(before).count()
        };
        let selected: Vec<bool> = (0..p.len()).map(|head| ahead(head) < router.top_k).collect();
        let kept = |head: usize| if selected[head] { p[head] } else { 0.0 };
        let sum: f64 = (0..p.len()).map(kept).sum();
        let r = (0..p.len()).map(|head| router.top_k as f64 * kept(head) / sum).collect();
        let s = softmax(shared).iter().map(|s| s * shared.len() as f64).collect();
        let ab = softmax(stages);
        Gates { r, s, ab: [2.0 * ab[0], 2.0 * ab[1]], selected, p }
    }

    /// The weights of shared and routed heads.
    fn weights(&self) -> Vec<f64> {
        let [a, b] = self.ab;
        self.s.iter().map(|s| a * s).chain(self.r.iter().map(|r| b * r)).collect()
    }

    /// The gradients of the logits of each parameter, from those of the weights and of p.
    fn backward(&self, d_weights: &[f64], d_p: &[f64]) -> [Vec<f64>; 3] {
        let (d_shared, d_routed) = d_weights.split_at(self.s.len());
        let d_routed: Vec<f64> =
            d_routed.iter().zip(&self.selected).map(|(d, &on)| if on { *d } else { 0.0 }).collect();
        let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
        let scaled = |d: &[f64], factor: f64| d.iter().map(|d| d * factor).collect::<Vec<_>>();
        let [a, b] = self.ab;
        let kept = self.r.iter().sum::<f64>();
        // The softmax over the selected heads alone, and the one over all.
        let routed = softmax_backward(&self.r, &scaled(&d_routed, b), kept.max(f64::MIN_POSITIVE));
        let all = softmax_backward(&self.p, d_p, 1.0);
        let d_stages = [dot(d_shared, &self.s), dot(&d_routed, &self.r)];
        [
            routed.iter().zip(all).map(|(r, p)| r + p).collect(),
            softmax_backward(&self.s, &scaled(d_shared, a), self.s.len() as f64),
            softmax_backward(&self.ab, &d_stages, 2.0),
        ]
    }
}

impl TwoStage {
    fn routed(&self) -> usize {
        self.heads - self.shared_heads
    }

    /// Outputs of each parameter.
    fn outputs(&self) -> [usize; 3] {
        [self.routed(), self.shared_heads, 2]
    }

    /// The gates of each token of `x`, `[tokens, C]`.
    fn gates<B: Backend, T: Element>(
        &self,
        backend: &B,
        tokens: usize,
        x: View<'_, B, T>,
        parameters: moh_model::router::Parameters<'_, B, T>,
    ) -> Result<Vec<Gates>> {
        let mut tables = Vec::new();
        for (parameter, outputs) in self.outputs().into_iter().enumerate() {
            let mut y = backend.allocate::<T>(tokens * outputs)?;
            backend.linear_forward(LinearForward::new(
                self.width,
                B::reborrow(x),
                parameters.get(parameter)?,
                B::whole_mut(&mut y),
            ))?;
            let mut logits = vec![T::from_f32(0.0); tokens * outputs];
            backend.download(B::whole(&y), &mut logits)?;
            tables.push(logits.iter().map(|logit| f64::from(logit.to_f32())).collect::<Vec<_>>());
        }
        let outputs = self.outputs();
        let of_token = |token: usize| {
            let row = |table: usize| &tables[table][token * outputs[table]..][..outputs[table]];
            Gates::new(self, [0, 1, 2].map(row))
        };
        Ok((0..tokens).map(of_token).collect())
    }

    /// `<dO, O>` of all heads of the layer, `[tokens, heads]`, of the local ones of each rank.
    fn deltas<B: Backend>(
        &self,
        backend: &B,
        heads: Heads,
        tokens: usize,
        delta: View<'_, B, f32>,
        ranks: Option<RouterRanks<'_, B>>,
    ) -> Result<Vec<f64>> {
        let mut local = vec![0f32; tokens * heads.local()];
        backend.download(delta, &mut local)?;
        let mut all = vec![0f64; tokens * heads.count];
        for (i, &delta) in local.iter().enumerate() {
            let (token, head) = (i / heads.local(), heads.index(i % heads.local()));
            all[token * heads.count + head] = f64::from(delta);
        }
        if let Some(RouterRanks { mut table, all_reduce }) = ranks {
            backend.upload(&all, B::reborrow_mut(&mut table))?;
            all_reduce(B::reborrow_mut(&mut table))?;
            backend.download(B::as_view(&table), &mut all)?;
        }
        Ok(all)
    }

    /// Adds the gradients of parameter `parameter` and of x, from those of its outputs.
    fn add_gradients<B: Backend, T: Element>(
        &self,
        backend: &B,
        parameter: usize,
        d_logits: &[f64],
        args: &mut RouterBackward<'_, B, T>,
    ) -> Result<()> {
        let d_logits: Vec<T> = d_logits.iter().map(|&d| T::from_f32(d as f32)).collect();
        let mut d_y = backend.allocate::<T>(d_logits.len())?;
        backend.upload(&d_logits, B::whole_mut(&mut d_y))?;
        let x = B::reborrow(args.x);
        args.d_parameters.add_linear(parameter, self.width, x, B::whole(&d_y))?;
        backend.linear_backward_input(LinearBackwardInput {
            inputs: self.width,
            d_y: B::whole(&d_y),
            weight: args.parameters.get(parameter)?,
            d_x: B::reborrow_mut(&mut args.d_x),
            accumulation: Accumulation::Add,
        })
    }
}

impl<B: Backend, T: Element> Router<B, T> for TwoStage {
    fn routing_shape(&self, tokens: usize, heads: Heads) -> Result<RoutingShape> {
        let columns = self.routed();
        Ok(RoutingShape { tokens, heads, columns, saved_per_token: 0, weighted: true, logits: 0 })
    }

    fn shared_heads(&self) -> SharedHeads {
        SharedHeads::first(self.shared_heads)
    }

    fn parameters(&self, hidden_size: usize) -> Vec<RouterParameter> {
        let names = ["routed", "shared", "stages"].map(|name| format!("router.{name}.weight"));
        let shapes = self.outputs().map(|outputs| [outputs, hidden_size]);
        let parameters = names.into_iter().zip(shapes);
        parameters.map(|(name, shape)| RouterParameter { name, shape }).collect()
    }

    fn forward(&self, backend: &B, args: RouterForward<'_, B, T>) -> Result<()> {
        let RouterForward { shape, x, parameters, routing, .. } = args;
        let tokens = shape.tokens();
        let all = self.gates(backend, tokens, x, parameters)?;
        routing.begin(tokens, Router::<B, T>::shared_heads(self))?;
        let heads = routing.heads();
        let local: Vec<usize> = (0..heads.local()).map(|head| heads.index(head)).collect();
        let selected: Vec<u8> =
            all.iter().flat_map(|gates| gates.selected.iter().map(|&on| u8::from(on))).collect();
        let gates: Vec<f32> =
            all.iter().flat_map(|gates| gates.p.iter().map(|&p| p as f32)).collect();
        let of_token = |gates: &Gates| {
            let weights = gates.weights();
            local.iter().map(move |&head| weights[head] as f32).collect::<Vec<_>>()
        };
        let weights: Vec<f32> = all.iter().flat_map(of_token).collect();
        backend.upload(&selected, routing.selected_mut())?;
        backend.upload(&gates, routing.gates_mut())?;
        backend.upload(&weights, routing.weights_mut())?;
        backend.complete_routing(routing)
    }

    fn backward(&self, backend: &B, mut args: RouterBackward<'_, B, T>) -> Result<()> {
        let (all, own) = (args.shape.tokens(), args.tokens.clone());
        let routing = args.gradient.routing;
        let mut selected = vec![0u8; all * self.routed()];
        backend.download(routing.selected(), &mut selected)?;
        let load = |head: usize| {
            let column = selected.iter().skip(head).step_by(self.routed());
            column.map(|&on| f64::from(on)).sum::<f64>() / all as f64
        };
        let weight = f64::from(args.gradient.balance_weight) / all as f64;
        let d_p: Vec<f64> = (0..self.routed()).map(|head| weight * load(head)).collect();
        let ranks = args.gradient.ranks.take();
        let deltas = match args.gradient.delta {
            Some(delta) => self.deltas(backend, routing.heads(), all, delta, ranks)?,
            None => vec![0.0; all * self.heads],
        };
        let gates = self.gates(backend, own.len(), B::reborrow(args.x), args.parameters)?;
        let of_token = |token: usize| -> Range<usize> {
            let token = own.start + token;
            token * self.heads..(token + 1) * self.heads
        };
        let logits: Vec<[Vec<f64>; 3]> = (gates.iter().enumerate())
            .map(|(token, gates)| gates.backward(&deltas[of_token(token)], &d_p))
            .collect();
        (0..3).try_for_each(|parameter| {
            let d: Vec<f64> = logits.iter().flat_map(|d| &d[parameter]).copied().collect();
            self.add_gradients(backend, parameter, &d, &mut args)
        })
    }
}
