//! The calibration of a model, layer by layer.

use std::sync::atomic::{AtomicBool, Ordering};

use moh_kernels::router::SharedHeads;
use moh_kernels::{Backend, DType};
use moh_model::{BlockPass, EndsPass, LayerHeads, ModelConfig, MohConfig, SharedChoice};
use ndarray::Array2;
use rayon::prelude::*;

use crate::products::{CalibrationBuffers, IsStopped, ProductSums};
use crate::ridge::Products;
use crate::router_fit::{RouterFit, RouterSums};
use crate::search::LayerSample;
use crate::selection::{Ranking, Scores};
use crate::tokens::Part;
use crate::{CalibrationTokens, Error, Result, matrix};

mod refit;

/// The settings of a calibration: its choices and changes.
#[derive(Debug, Clone, PartialEq)]
pub struct CalibrationOptions {
    /// The given routing.
    pub moh: MohConfig,
    /// The choice of the shared heads.
    pub shared: SharedChoice,
    /// Whether output projections are refitted.
    pub refit: bool,
    /// The element type that stores refitted output projections and fitted routers. They are rounded to it before later
    /// layers are measured, so that the losses apply to the rounded values. `None` keeps them in f32.
    pub stored: Option<DType>,
}

impl CalibrationOptions {
    /// Rounds a fitted matrix to the type that stores it.
    fn round(&self, values: &mut [f32]) {
        if let Some(dtype) = self.stored {
            dtype.round(values);
        }
    }
}

/// The result of a calibration.
#[derive(Debug, Clone, PartialEq)]
pub struct Calibration {
    /// The routing with the chosen heads.
    pub moh: MohConfig,
    /// Each layer, in order.
    pub layers: Vec<LayerCalibration>,
    /// Losses on the held-out calibration tokens.
    pub losses: Losses,
    /// The same losses for each text, if there are several texts; NaN for a text without held-out windows.
    pub losses_of_texts: Vec<Losses>,
}

/// The measurements of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerCalibration {
    /// The shared heads.
    pub shared: SharedHeads,
    /// Routed heads that a token selects.
    pub top_k: usize,
    /// |Y - F W_O^T|^2 / |Y|^2 on the held-out tokens, with the old output projection.
    pub error_before: f64,
    /// The same error with the refitted projection; `None` without a refit.
    pub error: Option<f64>,
    /// Lambda of the refit, in means of the diagonal of F^T F.
    pub ridge: Option<f64>,
    /// The matrix of a learned router, in a layer with routed heads.
    pub router: Option<RouterFit>,
}

/// Mean cross-entropies over the held-out calibration tokens, in nats.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Losses {
    /// Loss of the dense model.
    pub dense: f64,
    /// Loss of the converted model.
    pub calibrated: f64,
}

/// The weight of the first token of a window in fits and in the search; other tokens have the weight 1.
const FIRST_TOKEN: f32 = 32.0;

/// Heads' outputs, and elements, that a thread computes at a time.
const HEADS: usize = 512;
const ELEMENTS: usize = 1 << 15;

/// The caller's callbacks during a calibration.
pub struct Watch<'a> {
    /// Called before each layer, with the number of finished layers and of all layers.
    pub progress: &'a mut dyn FnMut(usize, usize),
    /// Called before each pass; returns whether the calibration stops.
    pub is_stopped: &'a (dyn Fn() -> bool + Sync),
}

/// A layer's result of a calibration.
#[derive(Debug, Clone, PartialEq)]
pub struct FoundLayer {
    /// The layer's measurements.
    pub calibration: LayerCalibration,
    /// The layer's new output projection, `[hidden_size, heads * head_dim]`, if it is refitted.
    pub projection: Option<Vec<f32>>,
}

/// Stores the layers of a calibration, so that an interrupted calibration resumes after them.
pub trait LayerStore<E> {
    /// Returns a layer that an earlier calibration of the same weights, tokens and options has stored. Returns `None`
    /// after the last stored layer.
    fn known(&mut self, layer: usize) -> Result<Option<FoundLayer>, E>;

    /// Stores the next layer, which `known` did not return.
    fn keep(&mut self, found: FoundLayer) -> Result<(), E>;
}

/// The source of a model's weights: writes a tensor by its name.
type Source<'a, E> = &'a mut dyn FnMut(&str, &mut [f32]) -> Result<(), E>;

/// Calibrates the conversion of the dense model that `config` describes, on one device.
///
/// `weights` writes each tensor by its name. Layers that `store` knows are not measured again. Returns `None` if the
/// calibration is stopped.
///
/// # Errors
/// Fails if `weights` or `store` fails, if the routing does not fit the model, if a fit is not possible, or if the
/// device fails.
pub fn calibrate<B: Backend + Clone, E: From<Error> + From<moh_model::Error>>(
    backend: &B,
    config: &ModelConfig,
    options: &CalibrationOptions,
    tokens: &CalibrationTokens,
    weights: Source<'_, E>,
    store: &mut dyn LayerStore<E>,
    watch: Watch<'_>,
) -> Result<Option<Calibration>, E> {
    config.check_moh(&options.moh)?;
    let was_stopped = AtomicBool::new(false);
    let is_stopped = || {
        was_stopped.fetch_or((watch.is_stopped)(), Ordering::Relaxed);
        was_stopped.load(Ordering::Relaxed)
    };
    let mut job = Job::new(backend, config, options, tokens, weights, &is_stopped)?;
    let found = job.run(store, watch.progress);
    if was_stopped.load(Ordering::Relaxed) { Ok(None) } else { found.map(Some) }
}

/// A calibration between two layers.
struct Job<'a, B: Backend, E> {
    backend: &'a B,
    config: &'a ModelConfig,
    options: &'a CalibrationOptions,
    tokens: &'a CalibrationTokens,
    weights: Source<'a, E>,
    block: BlockPass<B>,
    sums: ProductSums<'a, B>,
    /// For the sums of outputs by which sets are judged.
    judged_sums: ProductSums<'a, B>,
    /// For the fit of a router's matrix.
    router_sums: Option<RouterSums<'a, B>>,
    streams: Streams,
    is_stopped: IsStopped<'a>,
}

/// The residual streams before a layer, `[tokens, hidden_size]`.
struct Streams {
    dense: Vec<f32>,
    calibrated: Vec<f32>,
}

/// The products for the fits of a layer.
struct Measured {
    fit: Products,
    ridge: Products,
    held_out: Products,
}

/// A layer with a routing.
struct Routed {
    measured: Measured,
    /// The heads' outputs times their weights, 0 for heads that a token does not compute, `[tokens, heads * head_dim]`.
    outputs: Vec<f32>,
}

impl<'a, B: Backend + Clone, E: From<Error> + From<moh_model::Error>> Job<'a, B, E> {
    fn new(
        backend: &'a B,
        config: &'a ModelConfig,
        options: &'a CalibrationOptions,
        tokens: &'a CalibrationTokens,
        weights: Source<'a, E>,
        is_stopped: IsStopped<'a>,
    ) -> Result<Self, E> {
        let (batch, length) = (tokens.passes.batch, tokens.length());
        let mut ends = EndsPass::new(backend.clone(), config, batch, length, &mut *weights)?;
        let mut dense = Vec::with_capacity(tokens.ids().len() * config.hidden_size);
        for ids in tokens.ids().chunks_exact(tokens.passes.pass()) {
            dense.extend(ends.embed(ids)?);
        }
        // The memory is freed before the block is allocated.
        drop(ends);
        let of_block = ModelConfig { moh: Some(options.moh.clone()), ..config.clone() };
        let CalibrationBuffers { fit, search, router } =
            CalibrationBuffers::new(backend, config, options.moh.router, tokens.passes.pass())
                .map_err(Error::from)?;
        let sums = |buffers| ProductSums::new(backend, buffers, is_stopped);
        let router = router.map(|buffers| {
            RouterSums::new(sums(buffers), config.num_attention_heads, options.moh.router)
        });
        Ok(Job {
            backend,
            config,
            options,
            tokens,
            weights,
            block: BlockPass::new(backend.clone(), &of_block, batch, length)?,
            sums: sums(fit),
            judged_sums: sums(search),
            router_sums: router,
            streams: Streams { calibrated: dense.clone(), dense },
            is_stopped,
        })
    }

    fn run(
        &mut self,
        store: &mut dyn LayerStore<E>,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Calibration, E> {
        let mut layers = Vec::new();
        for layer in 0..self.config.num_hidden_layers {
            progress(layer, self.config.num_hidden_layers);
            layers.push(match store.known(layer)? {
                Some(known) => self.known_layer(layer, known)?,
                None => {
                    let found = self.layer(layer)?;
                    let calibration = found.calibration.clone();
                    store.keep(found)?;
                    calibration
                }
            });
        }
        let held_out: Vec<usize> = self.tokens.passes.of(Part::HeldOut).collect();
        let streams = [&self.streams.dense, &self.streams.calibrated];
        let [dense, calibrated] = streams.map(|stream| self.of_passes(stream, &held_out));
        let losses = self.losses(&[&dense, &calibrated], &held_out)?;
        let (dense, calibrated) = (&losses[0], &losses[1]);
        let mut losses_of_texts = Vec::new();
        if self.tokens.num_texts() > 1 {
            let texts = dense.of_texts().zip(calibrated.of_texts());
            losses_of_texts.extend(texts.map(|(dense, calibrated)| Losses { dense, calibrated }));
        }
        let moh = MohConfig {
            shared_heads: layers.iter().map(|layer| layer.shared).collect(),
            routed_top_k: layers.iter().map(|layer| layer.top_k).collect(),
            ..self.options.moh.clone()
        };
        let losses = Losses { dense: dense.mean(), calibrated: calibrated.mean() };
        Ok(Calibration { moh, layers, losses, losses_of_texts })
    }

    /// Moves the residual streams behind a layer with a stored result.
    fn known_layer(&mut self, layer: usize, known: FoundLayer) -> Result<LayerCalibration, E> {
        let FoundLayer { calibration, projection } = known;
        self.load(layer, None, calibration.router.as_ref())?;
        let heads = LayerHeads { shared: calibration.shared, top_k: calibration.top_k };
        let moh = self.options.moh.of_layer_alone(layer).of_one_layer(heads);
        let routed = self.measure(&moh).map_err(|error| error.in_layer(layer))?;
        self.load(layer, projection.as_deref(), calibration.router.as_ref())?;
        self.advance(&routed.outputs)?;
        Ok(calibration)
    }

    /// Chooses the shared heads of a layer, refits its output projection, and moves the residual streams behind the
    /// layer.
    fn layer(&mut self, layer: usize) -> Result<FoundLayer, E> {
        let old = self.load_source(layer)?;
        let router = self.fit_router(layer, &old)?;
        let in_layer = |error: Error| error.in_layer(layer);
        let moh = self.choose(layer, &old).map_err(in_layer)?;
        let Routed { measured, outputs } = self.measure(&moh).map_err(in_layer)?;
        let old = matrix::<f64>(&old, self.config.query_width());
        let error_before = measured.held_out.error(old.view());
        let refit = self.refit(layer, measured, old.view(), router.as_ref())?;
        self.advance(&outputs)?;
        let heads = moh.layer(0);
        let routes = heads.shared.len() < self.config.num_attention_heads;
        let calibration = LayerCalibration {
            shared: heads.shared,
            top_k: heads.top_k,
            error_before,
            error: refit.as_ref().map(|refit| refit.error),
            ridge: refit.as_ref().map(|refit| refit.ridge),
            router: router.filter(|_| routes),
        };
        Ok(FoundLayer { calibration, projection: refit.map(|refit| refit.projection) })
    }

    /// Computes the products and heads' outputs of a layer with this routing. Moves the dense model's residual stream
    /// behind the layer.
    fn measure(&mut self, moh: &MohConfig) -> Result<Routed> {
        let (passes, inputs) = (&self.tokens.passes, self.config.query_width());
        let length = self.tokens.length();
        let mut outputs = vec![0f32; passes.tokens() * inputs];
        let mut of_part = |part| {
            for pass in passes.of(part) {
                let stream = passes.elements(pass, self.config.hidden_size);
                let dense = &mut self.streams.dense[stream.clone()];
                let after = self.block.forward(dense, None)?;
                dense.copy_from_slice(&after.output);
                let x = &self.streams.calibrated[stream];
                let of_pass = &mut outputs[passes.elements(pass, inputs)];
                attend(&mut self.block, self.config.head_dim, moh, x, of_pass)?;
                let mut features = of_pass.to_vec();
                let target = weighed(self.config, length, &after.after_attention, x, &mut features);
                self.sums.add(&features, &target)?;
            }
            let products = self.sums.take();
            products.check()?;
            Ok::<_, Error>(products)
        };
        let [fit, ridge, held_out] =
            [of_part(Part::Fit)?, of_part(Part::Ridge)?, of_part(Part::HeldOut)?];
        Ok(Routed { measured: Measured { fit, ridge, held_out }, outputs })
    }

    /// Moves the converted model's residual stream behind the block's layer, given the heads' outputs.
    fn advance(&mut self, outputs: &[f32]) -> Result<()> {
        let pass = self.tokens.passes.pass();
        let streams = self.streams.calibrated.chunks_exact_mut(pass * self.config.hidden_size);
        for (x, outputs) in streams.zip(outputs.chunks_exact(pass * self.config.query_width())) {
            if (self.is_stopped)() {
                return Err(Error::Stopped);
            }
            x.copy_from_slice(&self.block.after_attention(x, outputs)?.output);
        }
        Ok(())
    }

    /// Chooses the heads of a layer, and returns the routing of a model of this layer alone.
    fn choose(&mut self, layer: usize, projection: &[f32]) -> Result<MohConfig> {
        let given = self.options.moh.of_layer_alone(layer);
        let (counts, heads) = (given.layer(0), self.config.num_attention_heads);
        if self.options.shared == SharedChoice::Given || counts.shared.len() == heads {
            return Ok(given);
        }
        let sample = self.sample(projection)?;
        let active = counts.active();
        let numbers = sample.ranking.numbers(self.options.shared, counts.shared.len(), active);
        let best = sample.best_set(&mut self.judged_sums, &numbers, active)?;
        Ok(given.of_one_layer(best.heads))
    }

    /// Returns a sample of the heads' outputs in the dense model, for the tokens of a search.
    fn sample(&mut self, projection: &[f32]) -> Result<LayerSample> {
        let ranking = Ranking::new(self.options.moh.router, self.config);
        let (inputs, width) = (self.config.query_width(), self.config.hidden_size);
        let mut scores = Scores::new(ranking);
        let (mut outputs, mut targets) = (Vec::new(), Vec::new());
        let length = self.tokens.length();
        let window = length * width;
        for windows in self.tokens.search_windows(inputs).chunks_exact(self.tokens.passes.batch) {
            let of_window = |&at: &usize| &self.streams.dense[at * window..(at + 1) * window];
            let x = windows.iter().flat_map(of_window).copied().collect::<Vec<f32>>();
            let queries = self.block.project(&x)?;
            match self.options.moh.router.has_matrices() {
                true => scores.add_logits(&self.block.logits()?),
                false => scores.add(&queries, self.config.head_dim),
            }
            let mut of_pass = self.block.attend()?;
            let after = self.block.after_attention(&x, &of_pass)?.after_attention;
            targets.extend(weighed(self.config, length, &after, &x, &mut of_pass));
            outputs.extend(of_pass);
        }
        let weight = matrix(projection, inputs);
        let targets: Array2<f32> = matrix(&targets, width);
        let pass = self.tokens.passes.pass();
        Ok(LayerSample::new(scores, ranking, outputs, targets.view(), weight, pass))
    }

    /// Returns some passes' part of a residual stream.
    fn of_passes(&self, stream: &[f32], passes: &[usize]) -> Vec<f32> {
        let of_pass = |&pass| &stream[self.tokens.passes.elements(pass, self.config.hidden_size)];
        passes.iter().flat_map(of_pass).copied().collect()
    }

    /// Returns the cross-entropies of each residual stream behind the last layer; each stream has these passes.
    fn losses(&mut self, streams: &[&[f32]], passes: &[usize]) -> Result<Vec<LossSums>, E> {
        let (batch, length) = self.tokens.passes.shape();
        let mut ends =
            EndsPass::new(self.backend.clone(), self.config, batch, length, &mut *self.weights)?;
        let elements = self.tokens.passes.pass() * self.config.hidden_size;
        let of_stream = |stream: &&[f32]| {
            let mut sums = LossSums(vec![(0.0, 0); self.tokens.num_texts()]);
            for (x, &pass) in stream.chunks_exact(elements).zip(passes) {
                for (text, sum) in sums.0.iter_mut().enumerate() {
                    let (targets, number) = self.tokens.targets(pass, text);
                    if number > 0 {
                        sum.0 += ends.cross_entropy(x, &targets)?;
                        sum.1 += number;
                    }
                }
            }
            Ok(sums)
        };
        streams.iter().map(of_stream).collect()
    }
}

/// The sum of cross-entropies of each text, and its number of targets.
struct LossSums(Vec<(f64, usize)>);

impl LossSums {
    /// Returns the mean over all texts.
    fn mean(&self) -> f64 {
        let (sums, numbers): (Vec<f64>, Vec<usize>) = self.0.iter().copied().unzip();
        sums.iter().sum::<f64>() / numbers.iter().sum::<usize>() as f64
    }

    fn of_texts(&self) -> impl Iterator<Item = f64> {
        self.0.iter().map(|&(sum, number)| sum / number as f64)
    }
}

/// Writes to `outputs` the heads' outputs for the residual stream `x` in a layer with this routing, times their
/// weights. Outputs of heads that a token does not compute are 0.
fn attend<B: Backend>(
    block: &mut BlockPass<B>,
    head_dim: usize,
    moh: &MohConfig,
    x: &[f32],
    outputs: &mut [f32],
) -> Result<()> {
    block.project(x)?;
    let active = block.select(moh.clone())?;
    let weights = match block.weights()? {
        Some(weights) => weights,
        None => active.into_iter().map(f32::from).collect(),
    };
    outputs.copy_from_slice(&block.attend()?);
    let heads = outputs.par_chunks_exact_mut(head_dim).zip(weights);
    heads.with_min_len(HEADS).for_each(|(output, weight)| match weight {
        0.0 => output.fill(0.0),
        1.0 => {}
        _ => output.iter_mut().for_each(|value| *value *= weight),
    });
    Ok(())
}

/// Returns a fit's target, `after - x`.
///
/// `after` is the dense model's stream after attention, `x` the converted model's stream before it. Each token of the
/// target and of the heads' `outputs` is multiplied by the lesser of its factors in the RMSNorms of `after` and `x`.
/// Otherwise the few tokens with a large stream in either model would decide the fit. The first token of a window of
/// `length` tokens weighs as much as [`FIRST_TOKEN`] other tokens, because all other tokens may attend to it.
fn weighed(
    config: &ModelConfig,
    length: usize,
    after: &[f32],
    x: &[f32],
    outputs: &mut [f32],
) -> Vec<f32> {
    let (mut scales, mut target) = (norm_scales(config, [after, x]), difference(after, x));
    scales.iter_mut().step_by(length).for_each(|scale| *scale *= FIRST_TOKEN.sqrt());
    scale(&mut target, &scales);
    scale(outputs, &scales);
    target
}

/// Returns the lesser of each token's factors in the RMSNorms of two residual streams, `[tokens, hidden_size]`.
fn norm_scales(config: &ModelConfig, streams: [&[f32]; 2]) -> Vec<f32> {
    let mean = |x: &[f32]| x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32;
    let scale = |(a, b)| (mean(a).max(mean(b)) + config.rms_norm_eps as f32).sqrt().recip();
    let [a, b] = streams.map(|stream| stream.par_chunks_exact(config.hidden_size));
    a.zip(b).with_min_len(ELEMENTS / config.hidden_size + 1).map(scale).collect()
}

/// Multiplies the rows of a table by `scales`.
fn scale(table: &mut [f32], scales: &[f32]) {
    let width = table.len() / scales.len();
    let rows = table.par_chunks_exact_mut(width).zip(scales).with_min_len(ELEMENTS / width + 1);
    rows.for_each(|(row, scale)| row.iter_mut().for_each(|value| *value *= scale));
}

fn difference(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.par_iter().zip(b).with_min_len(ELEMENTS).map(|(a, b)| a - b).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokens::tests::config;

    #[test]
    fn tokens_weigh_by_the_lesser_norm_factor_and_first_ones_more() {
        let config = config();
        let (width, root) = (config.hidden_size, FIRST_TOKEN.sqrt());
        let stream = |squares: [f32; 4]| squares.map(|x| vec![x; width]).concat();
        // The root mean squares of four tokens in two windows.
        let (after, x) = (stream([2.0, 4.0, 1.0, 8.0]), stream([1.0, 5.0, 2.0, 3.0]));
        let mut outputs = [1f32; 8];
        let target = weighed(&config, 2, &after, &x, &mut outputs);
        let expected = [root / 2.0, 1.0 / 5.0, root / 2.0, 1.0 / 8.0];
        for (token, (expected, difference)) in
            expected.iter().zip([1.0, -1.0, -1.0, 5.0]).enumerate()
        {
            assert!((outputs[2 * token + 1] / expected - 1.0).abs() < 1e-4, "{outputs:?}");
            let found = target[width * token];
            assert!((found / (expected * difference) - 1.0).abs() < 1e-4, "{target:?}");
        }
    }
}
