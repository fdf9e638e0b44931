//! How many heads each layer gets of a number of active heads for all layers together: what a number costs a layer is
//! measured by the loss that the residual stream behind it ends with.

use moh_kernels::Backend;
use moh_kernels::router::SharedHeads;
use moh_model::{LayerHeads, ModelConfig, RouterKind};

use super::{Choice, Job, KeepsNothing, LossSums, Routed, Steps};
use crate::budget::{allocate, between};
use crate::search::LayerSample;
use crate::selection::Ranking;
use crate::tokens::Part;
use crate::{CalibrationPasses, Error, Result, matrix};

/// Numbers of active heads, evenly spaced, that are measured in a layer beside 1 and the even one; those between cost what
/// is between.
const NUMBERS: usize = 8;
/// Bytes that the residual streams of all numbers in all layers may have, but one pass of each.
const STREAM_BYTES: usize = 1 << 30;

/// What [`Shared::CalibratedTotal`](crate::Shared::CalibratedTotal) measures of each layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Division {
    /// Numbers of active heads, ascending.
    pub numbers: Vec<usize>,
    /// The passes by whose loss numbers are compared, of those that are held out: their residual streams, one for each
    /// number of each layer, go through all later layers.
    pub carried_passes: usize,
    /// The number with which the other layers are converted.
    even: usize,
}

impl Division {
    /// Of `total` active heads in all layers of the model that `config` describes, measured on these passes.
    pub fn new(
        config: &ModelConfig,
        router: RouterKind,
        total: usize,
        passes: &CalibrationPasses,
    ) -> Self {
        let unit = Ranking::new(router, config).unit();
        let (units, layers) = (config.num_attention_heads / unit, config.num_hidden_layers.max(1));
        let even = (total / unit / layers).max(1);
        let numbers: Vec<usize> = measured(units, even).into_iter().map(|n| n * unit).collect();
        let streams = layers.saturating_mul(numbers.len());
        let elements = streams.saturating_mul(config.hidden_size).saturating_mul(passes.pass());
        let bytes = elements.saturating_mul(size_of::<f32>());
        let carried_passes = (STREAM_BYTES / bytes.max(1)).clamp(1, passes.held_out().max(1));
        Division { numbers, carried_passes, even: even * unit }
    }
}

struct Variant {
    active: usize,
    heads: LayerHeads,
    /// The residual stream of the carried passes, behind the last layer that was measured.
    stream: Vec<f32>,
}

impl<B: Backend + Clone, E: From<Error> + From<moh_model::Error>> Job<'_, B, E> {
    /// Chooses each layer's number of active heads, `total` in all layers together, and begins again before
    /// the first layer.
    pub(super) fn divide(&mut self, total: usize, steps: &mut Steps<'_>) -> Result<(), E> {
        let layers = self.config.num_hidden_layers;
        let (unit, units) = (self.unit(), self.config.num_attention_heads / self.unit());
        let is_possible =
            total.is_multiple_of(unit) && (layers * unit..=layers * units * unit).contains(&total);
        if !is_possible {
            let message = format!(
                "{total} active heads in {layers} layers: must be a multiple of {unit}, at least {unit} a layer and \
                 at most all heads"
            );
            return Err(Error::Invalid(message).into());
        }
        let router = self.options.moh.router;
        let division = Division::new(self.config, router, total, &self.tokens.passes);
        let even = division.even / unit;
        steps.all += layers;
        let start = self.streams.dense.clone();
        let mut variants = Vec::new();
        for layer in 0..layers {
            steps.next();
            self.measure_variants(layer, &division, &mut variants)?;
        }
        let costs = self.costs(&variants, &division)?;
        self.begin_again(&start);
        let nearly_even = |(n, cost): (usize, f64)| match n == even || n == even + 1 {
            true => cost,
            false => f64::INFINITY,
        };
        let only = |costs: &Vec<f64>| (1..).zip(costs.iter().copied()).map(nearly_even).collect();
        let evenly: Vec<Vec<f64>> = costs.iter().map(only).collect();
        let mut candidates = Vec::new();
        for costs in [evenly, costs] {
            let numbers = allocate(&costs, total / unit).ok_or(Error::NOT_FINITE)?;
            candidates.push(self.choices(&numbers, &variants));
        }
        drop(variants);
        candidates.dedup();
        self.best_of(candidates, &start, steps)
    }

    /// Keeps the choices with which the model's loss on the tokens that are held out is the least.
    fn best_of(
        &mut self,
        candidates: Vec<Vec<Choice>>,
        start: &[f32],
        steps: &mut Steps<'_>,
    ) -> Result<(), E> {
        let mut best = f64::INFINITY;
        let mut kept = candidates[0].clone();
        if candidates.len() > 1 {
            steps.all += candidates.len() * self.config.num_hidden_layers;
            for choices in candidates {
                self.chosen.clone_from(&choices);
                self.convert(&mut KeepsNothing, steps)?;
                let held_out: Vec<usize> = self.tokens.passes.of(Part::HeldOut).collect();
                let stream = self.of_passes(&self.streams.calibrated, &held_out);
                let loss = self.losses(&[&stream], &held_out)?[0].mean();
                if loss < best {
                    (best, kept) = (loss, choices);
                }
                self.begin_again(start);
            }
        }
        self.chosen = kept;
        Ok(())
    }

    /// Puts the residual streams before the first layer.
    fn begin_again(&mut self, start: &[f32]) {
        start.clone_into(&mut self.streams.dense);
        start.clone_into(&mut self.streams.calibrated);
    }

    /// Converts a layer with each number of heads, and moves all residual streams behind it.
    fn measure_variants(
        &mut self,
        layer: usize,
        division: &Division,
        variants: &mut Vec<Vec<Variant>>,
    ) -> Result<(), E> {
        let projection = self.load_source(layer)?;
        let router = self.fit_router(layer, &projection)?;
        let sample = self.sample(&projection)?;
        let old = matrix::<f64>(&projection, self.config.query_width());
        let mut of_layer =
            self.variants(&sample, division).map_err(|error| error.in_layer(layer))?;
        let elements = self.tokens.passes.pass() * self.config.hidden_size;
        let (passes, inputs) = (&self.tokens.passes, self.config.query_width());
        let carried = self.carried(division);
        let mut even_outputs = Vec::new();
        // The even number last: its projection is the one that the other streams go through.
        for variant in of_layer.iter_mut().rev() {
            let moh = self.options.moh.of_one_layer(variant.heads);
            self.load(layer, None, router.as_ref())?;
            let routed = self.measure(&moh, variant.active == division.even);
            let Routed { measured, outputs } = routed.map_err(|error| error.in_layer(layer))?;
            self.refit(layer, measured, old.view(), router.as_ref())?;
            for &pass in &carried {
                let x = &self.streams.calibrated[passes.elements(pass, self.config.hidden_size)];
                let of_pass = &outputs[passes.elements(pass, inputs)];
                variant.stream.extend(self.block.after_attention(x, of_pass)?.output);
            }
            even_outputs = outputs;
        }
        let moh = self.options.moh.of_one_layer(of_layer[0].heads);
        for variant in variants.iter_mut().flatten() {
            for x in variant.stream.chunks_exact_mut(elements) {
                x.copy_from_slice(&self.block.forward(x, Some(moh.clone()))?.output);
            }
        }
        self.advance(&even_outputs)?;
        variants.push(of_layer);
        Ok(())
    }

    /// The best heads of each number that is measured, the even number first.
    fn variants(&mut self, sample: &LayerSample, division: &Division) -> Result<Vec<Variant>> {
        let heads = self.config.num_attention_heads;
        let all = LayerHeads { shared: SharedHeads::first(heads), top_k: 0 };
        let mut variants = Vec::new();
        for &active in &division.numbers {
            let heads = match active < heads {
                true => self.best_heads(sample, None, active)?.heads,
                false => all,
            };
            variants.push(Variant { active, heads, stream: Vec::new() });
        }
        variants.sort_by_key(|variant| variant.active != division.even);
        Ok(variants)
    }

    /// The passes by whose loss numbers are compared.
    fn carried(&self, division: &Division) -> Vec<usize> {
        self.tokens.passes.of(Part::HeldOut).take(division.carried_passes).collect()
    }

    /// What 1, 2 ... units cost each layer.
    fn costs(
        &mut self,
        variants: &[Vec<Variant>],
        division: &Division,
    ) -> Result<Vec<Vec<f64>>, E> {
        let (unit, even) = (self.unit(), division.even / self.unit());
        let streams: Vec<&[f32]> = variants.iter().flatten().map(|it| &it.stream[..]).collect();
        let losses = self.losses(&streams, &self.carried(division))?;
        let mut losses = losses.iter().map(LossSums::mean);
        let mut costs = Vec::new();
        for variants in variants {
            let mut of_layer: Vec<(usize, f64)> =
                variants.iter().map(|variant| variant.active / unit).zip(losses.by_ref()).collect();
            let at = of_layer.iter().find(|(units, _)| *units == even).map_or(0.0, |it| it.1);
            of_layer.iter_mut().for_each(|(_, loss)| *loss -= at);
            of_layer.sort_by_key(|(units, _)| *units);
            costs.push(between(&of_layer));
        }
        Ok(costs)
    }

    /// The heads of each layer with these numbers of units.
    fn choices(&self, numbers: &[usize], variants: &[Vec<Variant>]) -> Vec<Choice> {
        let choice = |(&units, variants): (&usize, &Vec<Variant>)| Choice {
            active: units * self.unit(),
            heads: variants.iter().find(|it| it.active == units * self.unit()).map(|it| it.heads),
        };
        numbers.iter().zip(variants).map(choice).collect()
    }

    /// Heads in whose multiples the router makes them active.
    fn unit(&self) -> usize {
        Ranking::new(self.options.moh.router, self.config).unit()
    }
}

/// The numbers of units that are measured: 1, the even number and all of them, and some between.
fn measured(units: usize, even: usize) -> Vec<usize> {
    let step = units.div_ceil(NUMBERS);
    let mut numbers: Vec<usize> = (step..units).step_by(step).chain([1, even, units]).collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

#[cfg(test)]
mod tests {
    use super::measured;

    #[test]
    fn a_few_numbers_are_measured_with_the_ends_and_the_even_one() {
        assert_eq!(measured(1, 1), [1]);
        assert_eq!(measured(8, 6), [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(measured(32, 24), [1, 4, 8, 12, 16, 20, 24, 28, 32]);
        assert_eq!(measured(32, 23), [1, 4, 8, 12, 16, 20, 23, 24, 28, 32]);
        for units in 1..100 {
            assert!((1..=units).all(|even| measured(units, even).len() <= super::NUMBERS + 2));
        }
    }
}
