//! Routers by logits on a CPU.

use rayon::prelude::*;

use super::{LogitRouter, Logits, LogitsBackward, LogitsForward, begin, check_backward, exchanged};
use crate::router::cpu::load;
use crate::router::{RouterGradient, RouterRanks, Routers, Routing, exchange};
use crate::{Cpu, Element, Result, check_len};

/// Tokens of one task.
const ROWS: usize = 64;

impl Logits for Cpu {
    fn logits_forward<T: Element>(&self, args: LogitsForward<'_, Self, T>) -> Result<()> {
        const OPERATOR: &str = "logits_forward";
        let LogitsForward { router, logits, tokens, routing, all_reduce } = args;
        begin(OPERATOR, router, tokens, logits.len(), routing)?;
        let all_reduce = exchange(OPERATOR, routing.heads(), all_reduce)?;
        if routing.columns() == 0 {
            return Ok(());
        }
        save(router, logits, routing);
        if let Some(all_reduce) = all_reduce {
            let saved = tokens * router.logits(routing.heads().count);
            all_reduce(&mut routing.saved[..saved])?;
        }
        route(router, routing);
        self.complete_routing(routing)
    }

    fn logits_backward<T: Element>(&self, args: LogitsBackward<'_, Self, T>) -> Result<()> {
        const OPERATOR: &str = "logits_backward";
        let LogitsBackward { router, tokens, d_logits, gradient } = args;
        check_backward(OPERATOR, router, &tokens, d_logits.len(), &gradient)?;
        let RouterGradient { routing, delta, balance_weight, ranks } = gradient;
        let ranks = delta.map_or(Ok(None), |_| exchange(OPERATOR, routing.heads(), ranks))?;
        if routing.columns() == 0 {
            d_logits.fill(T::from_f32(0.0));
            return Ok(());
        }
        let heads = routing.heads();
        let width = exchanged(router, routing);
        let mut exchanged = None;
        if let (Some(delta), Some(RouterRanks { table, all_reduce })) = (delta, ranks) {
            check_len(OPERATOR, "table", table.len(), routing.tokens() * width)?;
            spread(routing, delta, table, width);
            all_reduce(&mut *table)?;
            exchanged = Some(&*table);
        }
        // `<dO, O>` of a head, if it exists.
        let delta_of = |token: usize, head: usize| match (exchanged, delta) {
            (Some(table), _) => {
                let column = (head + width).checked_sub(heads.count);
                column.map_or(0.0, |column| table[token * width + column])
            }
            (None, Some(delta)) => f64::from(delta[token * heads.count + head]),
            (None, None) => 0.0,
        };
        let scale = f64::from(balance_weight) / routing.tokens() as f64;
        let balance: Vec<f64> = load(routing).map(|share| scale * share).collect();
        let (width, columns) = (router.logits(heads.count), routing.columns());
        let rows = d_logits.par_chunks_mut(width).zip(tokens).with_min_len(ROWS);
        rows.for_each(|(d_logits, token)| {
            let row = Row::new(router, heads.count, &routing.saved[token * width..][..width]);
            let selected = &routing.selected[token * columns..][..columns];
            let d = row.backward(selected, &|head| delta_of(token, head), &balance);
            for (slot, d) in d_logits.iter_mut().zip(d) {
                *slot = T::from_f32(d as f32);
            }
        });
        Ok(())
    }
}

/// Writes the logits of the local heads, and zeros for other heads.
fn save<T: Element>(router: LogitRouter, logits: &[T], routing: &mut Routing<Cpu>) {
    let heads = routing.heads();
    let width = router.logits(heads.count);
    let mut is_own = vec![false; width];
    (0..heads.local()).for_each(|local| is_own[heads.index(local)] = true);
    is_own[heads.count..].fill(heads.rank == 0);
    let rows = routing.saved.par_chunks_mut(width).zip(logits.par_chunks_exact(width));
    rows.with_min_len(ROWS).for_each(|(saved, logits)| {
        for ((slot, logit), &own) in saved.iter_mut().zip(logits).zip(&is_own) {
            *slot = if own { f64::from(logit.to_f32()) } else { 0.0 };
        }
    });
}

/// Writes selection, gates and weights of all tokens.
fn route(router: LogitRouter, routing: &mut Routing<Cpu>) {
    let (tokens, columns, heads) = (routing.tokens(), routing.columns(), routing.heads());
    if router.weighs() {
        // From now on attention applies the weights.
        let _ = routing.weights_mut();
    }
    let (logits, leading) = (router.logits(heads.count), router.shared.leading());
    let local: Vec<usize> = (0..heads.local()).map(|local| heads.index(local)).collect();
    let Routing { saved, selected, gates, weights, .. } = routing;
    let saved = &saved[..tokens * logits];
    (
        saved.par_chunks_exact(logits),
        selected[..tokens * columns].par_chunks_exact_mut(columns),
        gates[..tokens * columns].par_chunks_exact_mut(columns),
    )
        .into_par_iter()
        .with_min_len(ROWS)
        .for_each(|(logits, selected, gates)| {
            let row = Row::new(router, heads.count, logits);
            row.select(selected);
            for (column, gate) in gates.iter_mut().enumerate() {
                *gate = row.gate(leading + column) as f32;
            }
        });
    if !router.weighs() {
        return;
    }
    let rows = weights[..tokens * local.len()].par_chunks_exact_mut(local.len());
    rows.zip(saved.par_chunks_exact(logits))
        .zip(selected.par_chunks_exact(columns))
        .with_min_len(ROWS)
        .for_each(|((weights, logits), selected)| {
            let row = Row::new(router, heads.count, logits);
            let stages = row.stages(selected);
            for (weight, &head) in weights.iter_mut().zip(&local) {
                *weight = row.weight(&stages, selected, head) as f32;
            }
        });
}

/// Writes the deltas of local heads that are in the table and computed by the token, and zeros
/// for other heads. A row has the last `width` heads.
fn spread(routing: &Routing<Cpu>, delta: &[f32], table: &mut [f64], width: usize) {
    let (heads, columns) = (routing.heads(), routing.columns());
    let (first, leading) = (heads.count - width, routing.shared().leading());
    let rows = table.par_chunks_mut(width).zip(delta.par_chunks(heads.local())).enumerate();
    rows.with_min_len(ROWS).for_each(|(token, (row, delta))| {
        row.fill(0.0);
        let selected = &routing.selected[token * columns..][..columns];
        for (local, &delta) in delta.iter().enumerate() {
            let head = heads.index(local);
            if head >= first && head.checked_sub(leading).is_none_or(|at| selected[at] == 1) {
                row[head - first] = f64::from(delta);
            }
        }
    });
}

/// The logits of a token and the sums of their exponentials.
struct Row<'a> {
    router: LogitRouter,
    heads: usize,
    logits: &'a [f64],
    routed: Softmax,
    shared: Softmax,
}

/// The largest logit of a softmax and the sum of the exponentials relative to it.
#[derive(Clone, Copy)]
struct Softmax {
    largest: f64,
    sum: f64,
}

impl Softmax {
    fn new(logits: impl Iterator<Item = f64> + Clone) -> Self {
        let largest = logits.clone().fold(f64::NEG_INFINITY, f64::max);
        Softmax { largest, sum: logits.map(|logit| (logit - largest).exp()).sum() }
    }

    fn of(self, logit: f64) -> f64 {
        (logit - self.largest).exp() / self.sum
    }
}

/// The sum of the selected probabilities, and the weights of the two stages.
struct Stages {
    kept: f64,
    shared: f64,
    routed: f64,
}

impl<'a> Row<'a> {
    fn new(router: LogitRouter, heads: usize, logits: &'a [f64]) -> Self {
        let of = |is_shared: bool| {
            let heads = (0..heads).filter(move |&head| router.shared.contains(head) == is_shared);
            Softmax::new(heads.map(move |head| logits[head]))
        };
        Row { router, heads, logits, routed: of(false), shared: of(true) }
    }

    fn is_shared(&self, head: usize) -> bool {
        self.router.shared.contains(head)
    }

    /// Marks shared heads and the `top_k` largest logits of the other heads; among equal logits, lower heads
    /// first.
    fn select(&self, selected: &mut [u8]) {
        let leading = self.router.shared.leading();
        for (column, mark) in selected.iter_mut().enumerate() {
            let (head, logit) = (leading + column, self.logits[leading + column]);
            let is_ahead = |&other: &usize| {
                let rival = self.logits[other];
                !self.is_shared(other) && (rival > logit || (rival == logit && other < head))
            };
            let ahead = || (leading..self.heads).filter(is_ahead).count();
            *mark = u8::from(self.is_shared(head) || ahead() < self.router.top_k);
        }
    }

    fn gate(&self, head: usize) -> f64 {
        if self.is_shared(head) { 0.0 } else { self.routed.of(self.logits[head]) }
    }

    fn is_selected(&self, selected: &[u8], head: usize) -> bool {
        !self.is_shared(head) && selected[head - self.router.shared.leading()] == 1
    }

    fn selected_heads(&self, selected: &[u8]) -> impl Iterator<Item = usize> {
        (0..self.heads).filter(move |&head| self.is_selected(selected, head))
    }

    fn stages(&self, selected: &[u8]) -> Stages {
        let kept = self.selected_heads(selected).map(|head| self.gate(head)).sum();
        let Some([a, b]) = self.logits.get(self.heads..).filter(|stages| !stages.is_empty()) else {
            return Stages { kept, shared: 1.0, routed: 1.0 };
        };
        let softmax = Softmax::new([*a, *b].into_iter());
        Stages { kept, shared: 2.0 * softmax.of(*a), routed: 2.0 * softmax.of(*b) }
    }

    /// Returns a shared head's weight before it is multiplied by the stage's weight.
    fn of_shared(&self, head: usize) -> f64 {
        self.router.shared.len() as f64 * self.shared.of(self.logits[head])
    }

    fn of_selected(&self, stages: &Stages, head: usize) -> f64 {
        self.router.top_k as f64 * self.gate(head) / stages.kept
    }

    fn weight(&self, stages: &Stages, selected: &[u8], head: usize) -> f64 {
        match self.is_shared(head) {
            true => stages.shared * self.of_shared(head),
            false if self.is_selected(selected, head) => {
                stages.routed * self.of_selected(stages, head)
            }
            false => 0.0,
        }
    }

    /// Returns the gradients of the logits, from the gradients of the heads' weights, and from the balance loss's
    /// gradients of each column's gate.
    fn backward(&self, selected: &[u8], delta: &dyn Fn(usize) -> f64, balance: &[f64]) -> Vec<f64> {
        let leading = self.router.shared.leading();
        let routed = || (leading..self.heads).filter(|&head| !self.is_shared(head));
        // The gradient of a gate: by the balance loss, and straight-through if the router has no weights.
        let d_gate = |head: usize| {
            let through = !self.router.weighs() && self.is_selected(selected, head);
            balance[head - leading] + if through { delta(head) } else { 0.0 }
        };
        let inner: f64 = routed().map(|head| self.gate(head) * d_gate(head)).sum();
        let mut d = vec![0.0; self.logits.len()];
        for head in routed() {
            d[head] = self.gate(head) * (d_gate(head) - inner);
        }
        if !self.router.weighs() {
            return d;
        }
        let stages = self.stages(selected);
        let shared = || (0..self.heads).filter(|&head| self.is_shared(head));
        let of_shared: f64 = shared().map(|head| self.of_shared(head) * delta(head)).sum();
        let of_selected: f64 = (self.selected_heads(selected))
            .map(|head| self.of_selected(&stages, head) * delta(head))
            .sum();
        // Each stage's values are their number n times a softmax, so d = value (d - <value, d> / n).
        for head in shared() {
            let mean = of_shared / self.router.shared.len() as f64;
            d[head] = stages.shared * self.of_shared(head) * (delta(head) - mean);
        }
        for head in self.selected_heads(selected) {
            let mean = of_selected / self.router.top_k as f64;
            d[head] += stages.routed * self.of_selected(&stages, head) * (delta(head) - mean);
        }
        if let [a, b] = &mut d[self.heads..] {
            let mean = (stages.shared * of_shared + stages.routed * of_selected) / 2.0;
            *a = stages.shared * (of_shared - mean);
            *b = stages.routed * (of_selected - mean);
        }
        d
    }
}
