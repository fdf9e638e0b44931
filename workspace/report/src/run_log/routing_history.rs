//! The history of a validation set's use of heads. It has the inequality of the loads at every evaluation, and the load
//! of each head at some evaluations, evenly spaced. So its memory does not grow with the heads times the evaluations.

use std::collections::BTreeMap;

use moh_checkpoint::run_log::RoutingLine;

use super::routing::RoutingEvaluation;

/// The most evaluations with the load of each head, besides the newest.
const MAX_PICKED: usize = 64;

/// The most sets with a history.
const MAX_SETS: usize = 8;

#[derive(Debug, Clone, PartialEq)]
pub struct RoutingHistory {
    pub set: String,
    /// The inequality of the loads at every evaluation.
    pub spreads: Vec<Spread>,
    /// The loads at some evaluations, including the first and the newest.
    pub picked: Vec<Loads>,
    /// One in so many evaluations is picked.
    stride: usize,
}

/// The inequality of the loads at an evaluation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    pub step: u64,
    /// The mean of the layers' imbalances.
    pub mean: f64,
    /// The largest imbalance of a layer.
    pub most: f64,
    /// The least load of a routed head.
    pub least_load: f64,
}

/// The loads at an evaluation.
#[derive(Debug, Clone, PartialEq)]
pub struct Loads {
    pub step: u64,
    pub layers: BTreeMap<usize, LayerLoads>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct LayerLoads {
    /// The share of the tokens that select each head; `None` for a shared head.
    pub heads: Vec<Option<f32>>,
    pub imbalance: f32,
}

impl RoutingHistory {
    /// Changes the history of `set`, unless there are too many sets.
    pub(super) fn of_set(
        histories: &mut Vec<RoutingHistory>,
        set: &str,
        change: impl FnOnce(&mut RoutingHistory),
    ) {
        if let Some(known) = histories.iter_mut().find(|history| history.set == set) {
            change(known);
        } else if histories.len() < MAX_SETS {
            let set = set.to_owned();
            let mut new = RoutingHistory { set, spreads: vec![], picked: vec![], stride: 1 };
            change(&mut new);
            histories.push(new);
        }
    }

    /// Adds a complete evaluation.
    pub(super) fn add(&mut self, evaluation: &RoutingEvaluation) {
        if self.spreads.len().is_multiple_of(self.stride) {
            if self.picked.len() == MAX_PICKED {
                let mut places = 0..MAX_PICKED;
                self.picked.retain(|_| places.next().is_some_and(|place| place % 2 == 0));
                // The number of evaluations is also a multiple of the new stride, because `MAX_PICKED` is even.
                self.stride *= 2;
            }
            self.picked.push(Loads::new(evaluation));
        }
        self.spreads.push(Spread::new(evaluation));
    }

    /// Adds the newest evaluation, and picks it in any case.
    pub(super) fn finish(&mut self, newest: &RoutingEvaluation) {
        let is_due = self.spreads.len().is_multiple_of(self.stride);
        self.add(newest);
        if !is_due {
            self.picked.push(Loads::new(newest));
        }
    }
}

impl Spread {
    fn new(evaluation: &RoutingEvaluation) -> Self {
        let layers = || evaluation.layers.values();
        let imbalances: Vec<f64> = layers().map(imbalance).collect();
        let sum: f64 = imbalances.iter().sum();
        let loads =
            layers().flat_map(|line| line.selected.iter().map(|&selected| load(line, selected)));
        Spread {
            step: evaluation.step,
            mean: sum / imbalances.len() as f64,
            most: imbalances.into_iter().fold(f64::NAN, f64::max),
            least_load: loads.fold(f64::NAN, f64::min),
        }
    }
}

impl Loads {
    fn new(evaluation: &RoutingEvaluation) -> Self {
        let layer = |line: &RoutingLine| LayerLoads {
            heads: line.heads().map(|head| Some(load(line, head?) as f32)).collect(),
            imbalance: imbalance(line) as f32,
        };
        let layers = evaluation.layers.iter().map(|(&number, line)| (number, layer(line)));
        Loads { step: evaluation.step, layers: layers.collect() }
    }
}

/// Returns the share of tokens that select a head; 0 without tokens.
pub fn load(line: &RoutingLine, selected: u64) -> f64 {
    selected as f64 / line.tokens.max(1) as f64
}

/// Returns the coefficient of variation of a layer's loads: their standard deviation divided by their mean, 0 for equal
/// loads.
fn imbalance(line: &RoutingLine) -> f64 {
    let count = line.selected.len().max(1) as f64;
    let loads = || line.selected.iter().map(|&selected| load(line, selected));
    let mean = loads().sum::<f64>() / count;
    let variance = loads().map(|load| (load - mean).powi(2)).sum::<f64>() / count;
    if mean > 0.0 { variance.sqrt() / mean } else { 0.0 }
}
