//! The calibration of a model, layer by layer.

use std::ops::ControlFlow;

use moh_kernels::router::SharedHeads;
use moh_kernels::{Backend, DType};
use moh_model::{BlockPass, EndsPass, LayerHeads, ModelConfig, MohConfig};
use ndarray::Array2;

use crate::products::{CalibrationBuffers, ProductSums};
use crate::router_fit::{RouterFit, RouterSums};
use crate::search::{Found, LayerSample};
use crate::selection::{Ranking, Scores};
use crate::{CalibrationTokens, Error, Result, matrix};

mod costs;
mod loading;
#[cfg(test)]
mod tests;

pub use costs::Division;

/// Which heads are shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shared {
    /// Those of the configuration.
    Given,
    /// As many as in the configuration, chosen by measurement.
    Calibrated,
    /// Chosen by measurement, their number too; as many heads are active as in the configuration.
    CalibratedNumber,
    /// Chosen by measurement, their number and that of the active heads too: so many heads are active in
    /// all layers together, a multiple of those that the router selects together.
    CalibratedTotal(usize),
}

/// What a calibration chooses and changes.
#[derive(Debug, Clone, PartialEq)]
pub struct CalibrationOptions {
    /// The routing, of which [`Self::shared`] says what is kept.
    pub moh: MohConfig,
    /// Which heads are shared.
    pub shared: Shared,
    /// Whether output projections are refitted.
    pub refit: bool,
    /// The element type that stores refitted output projections and fitted routers. They are rounded to it before
    /// later layers are measured, and the losses are those of the rounded values. `None` keeps them in f32.
    pub stored: Option<DType>,
}

impl CalibrationOptions {
    /// Rounds a matrix that was fitted to the type that stores it.
    fn round(&self, values: &mut [f32]) {
        if let Some(dtype) = self.stored {
            dtype.round(values);
        }
    }
}

/// What a calibration has chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct Calibration {
    /// The routing with the chosen heads.
    pub moh: MohConfig,
    /// Each layer, in order.
    pub layers: Vec<LayerCalibration>,
    /// Losses on the calibration tokens.
    pub losses: Losses,
}

/// What was measured of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerCalibration {
    /// The shared heads.
    pub shared: SharedHeads,
    /// Routed heads that a token selects.
    pub top_k: usize,
    /// |Y - F W_O^T|^2 / |Y|^2 on the calibration tokens with the old output projection.
    pub error_before: f64,
    /// The same with the refitted one; `None` if none was.
    pub error: Option<f64>,
    /// The matrix of a learned router, in a layer with routed heads.
    pub router: Option<RouterFit>,
}

/// Mean cross-entropies over the calibration tokens, in nats.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Losses {
    /// Of the dense model.
    pub dense: f64,
    /// Of the routing that was given, with the source's weights.
    pub given: f64,
    /// Of the result.
    pub calibrated: f64,
}

/// The source of a model's weights: writes a tensor by its name.
type Source<'a, E> = &'a mut dyn FnMut(&str, &mut [f32]) -> Result<(), E>;

/// Called with a layer and its new output projection.
type OnProjection<'a, E> = &'a mut dyn FnMut(usize, &[f32]) -> Result<(), E>;

/// Calibrates the conversion of the dense model that `config` describes, on one device.
///
/// `weights` writes each tensor by its name. `refitted` is called with each layer and its new output
/// projection, `[hidden_size, heads * head_dim]`, and `progress` with the layers that are done and all; it
/// can stop the calibration with `ControlFlow::Break`, which gives `Ok(None)`. With
/// [`Shared::CalibratedTotal`] layers are measured, and conversions compared, before; so they count several
/// times, and `weights` is asked again.
///
/// # Errors
/// Fails if `weights` or `refitted` fails, if the routing does not fit the model, if a fit is not
/// possible, and if the device fails.
pub fn calibrate<B: Backend + Clone, E: From<Error> + From<moh_model::Error>>(
    backend: &B,
    config: &ModelConfig,
    options: &CalibrationOptions,
    tokens: &CalibrationTokens,
    weights: Source<'_, E>,
    refitted: OnProjection<'_, E>,
    progress: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Option<Calibration>, E> {
    let layers = config.num_hidden_layers;
    config.check_moh(&options.moh)?;
    let mut job = Job::new(backend, config, options, tokens, weights)?;
    let mut steps = Steps { progress, done: 0, all: layers };
    if let Shared::CalibratedTotal(total) = options.shared
        && job.divide(total, &mut steps)?.is_none()
    {
        return Ok(None);
    }
    let Some(found) = job.convert(refitted, &mut steps)? else { return Ok(None) };
    let Streams { dense, given, calibrated } = std::mem::take(&mut job.streams);
    let losses = job.losses(&[&dense, &given, &calibrated])?;
    let losses = Losses { dense: losses[0], given: losses[1], calibrated: losses[2] };
    let moh = MohConfig {
        shared_heads: found.iter().map(|layer| layer.shared).collect(),
        routed_top_k: found.iter().map(|layer| layer.top_k).collect(),
        ..options.moh.clone()
    };
    Ok(Some(Calibration { moh, layers: found, losses }))
}

/// The work on layers, as a caller sees it.
struct Steps<'p> {
    progress: &'p mut dyn FnMut(usize, usize) -> ControlFlow<()>,
    done: usize,
    all: usize,
}

impl Steps<'_> {
    /// Tells of the next layer; whether the work goes on.
    fn next(&mut self) -> bool {
        let next = (self.progress)(self.done, self.all).is_continue();
        self.done += 1;
        next
    }
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
    /// Of the outputs by which sets are judged.
    judged_sums: ProductSums<'a, B>,
    /// Of a router whose matrix is fitted.
    router_sums: Option<RouterSums<'a, B>>,
    /// The heads of each layer that are chosen already.
    chosen: Vec<Choice>,
    streams: Streams,
}

/// What is known of a layer's heads before its set is searched for.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Choice {
    active: usize,
    /// Which ones, if a search has found them.
    heads: Option<LayerHeads>,
}

/// The residual streams before a layer, `[tokens, hidden_size]`.
#[derive(Default)]
struct Streams {
    dense: Vec<f32>,
    /// Of the routing that was given, with the source's weights.
    given: Vec<f32>,
    calibrated: Vec<f32>,
}

impl<'a, B: Backend + Clone, E: From<Error> + From<moh_model::Error>> Job<'a, B, E> {
    fn new(
        backend: &'a B,
        config: &'a ModelConfig,
        options: &'a CalibrationOptions,
        tokens: &'a CalibrationTokens,
        weights: Source<'a, E>,
    ) -> Result<Self, E> {
        let (batch, length) = (tokens.batch, tokens.length());
        let mut ends = EndsPass::new(backend.clone(), config, batch, length, &mut *weights)?;
        let mut dense = Vec::with_capacity(tokens.ids().len() * config.hidden_size);
        for ids in tokens.ids().chunks_exact(tokens.pass()) {
            dense.extend(ends.embed(ids)?);
        }
        // Before the block takes its place.
        drop(ends);
        let of_block = ModelConfig { moh: Some(options.moh.clone()), ..config.clone() };
        let CalibrationBuffers { fit, search, router } =
            CalibrationBuffers::new(backend, config, options.moh.router, tokens.pass())
                .map_err(Error::from)?;
        let sums = |buffers| ProductSums::new(backend, buffers);
        let router = router.map(|buffers| {
            RouterSums::new(sums(buffers), config.num_attention_heads, options.moh.router)
        });
        let of_layer = |layer| Choice { active: options.moh.layer(layer).active(), heads: None };
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
            chosen: (0..config.num_hidden_layers).map(of_layer).collect(),
            streams: Streams { given: dense.clone(), calibrated: dense.clone(), dense },
        })
    }

    /// Converts the layers in order; `None` if the work is stopped.
    fn convert(
        &mut self,
        refitted: OnProjection<'_, E>,
        steps: &mut Steps<'_>,
    ) -> Result<Option<Vec<LayerCalibration>>, E> {
        let mut found = Vec::new();
        for layer in 0..self.config.num_hidden_layers {
            if !steps.next() {
                return Ok(None);
            }
            found.push(self.layer(layer, refitted)?);
        }
        Ok(Some(found))
    }

    /// Chooses the shared heads of a layer, refits its output projection, and moves the residual streams
    /// behind it.
    fn layer(
        &mut self,
        layer: usize,
        refitted: OnProjection<'_, E>,
    ) -> Result<LayerCalibration, E> {
        let old = self.load_source(layer)?;
        let router = self.fit_router(layer, &old)?;
        let in_layer = |error: Error| error.in_layer(layer);
        let moh = self.choose(layer, &old).map_err(in_layer)?;
        let products = self.measure(layer, &moh)?;
        let old = matrix::<f64>(&old, self.config.query_width());
        let error_before = products.error(old.view());
        let fitted = self.refit(layer, &products, old.view(), router.as_ref())?;
        if let Some((new, _)) = &fitted {
            refitted(layer, new)?;
        }
        let elements = self.tokens.pass() * self.config.hidden_size;
        for x in self.streams.calibrated.chunks_exact_mut(elements) {
            x.copy_from_slice(&self.block.forward(x, Some(moh.clone()))?.output);
        }
        let heads = moh.layer(0);
        let routes = heads.shared.len() < self.config.num_attention_heads;
        let router = router.filter(|_| routes);
        Ok(LayerCalibration {
            shared: heads.shared,
            top_k: heads.top_k,
            error_before,
            error: fitted.map(|(_, error)| error),
            router,
        })
    }

    /// The products of the fit of a layer with this routing, and the other streams behind the layer.
    fn measure(&mut self, layer: usize, moh: &MohConfig) -> Result<crate::ridge::Products, E> {
        let given = self.options.moh.of_layer_alone(layer);
        let elements = self.tokens.pass() * self.config.hidden_size;
        let Streams { dense, given: of_given, calibrated } = &mut self.streams;
        let streams = dense.chunks_exact_mut(elements).zip(of_given.chunks_exact_mut(elements));
        for ((dense, of_given), x) in streams.zip(calibrated.chunks_exact(elements)) {
            let after = self.block.forward(dense, None)?;
            dense.copy_from_slice(&after.output);
            of_given.copy_from_slice(&self.block.forward(of_given, Some(given.clone()))?.output);
            add_pass(self.config, &mut self.block, &mut self.sums, moh, x, &after.after_attention)?;
        }
        Ok(self.sums.take())
    }

    /// The routing of a layer, as that of a model of one layer.
    fn choose(&mut self, layer: usize, projection: &[f32]) -> Result<MohConfig> {
        let given = self.options.moh.of_layer_alone(layer);
        let (counts, heads) = (given.layer(0), self.config.num_attention_heads);
        let Choice { active, heads: known } = self.chosen[layer];
        if let Some(known) = known {
            return Ok(given.of_one_layer(known));
        }
        let stays_dense = counts.shared.len() == heads && active == heads;
        if self.options.shared == Shared::Given || stays_dense {
            return Ok(given);
        }
        let sample = self.sample(projection)?;
        let given_number = (counts.active() == active).then_some(counts.shared.len());
        let best = self.best_heads(&sample, given_number, active)?;
        Ok(given.of_one_layer(best.heads))
    }

    /// The best heads of a layer of which so many are active, `given` shared ones among those compared.
    fn best_heads(
        &mut self,
        sample: &LayerSample,
        given: Option<usize>,
        active: usize,
    ) -> Result<Found> {
        let numbers = sample.ranking.numbers(self.options.shared, given, active);
        sample.best_set(&mut self.judged_sums, &numbers, active)
    }

    /// The heads' outputs in the dense model, for the tokens of a search.
    fn sample(&mut self, projection: &[f32]) -> Result<LayerSample> {
        let ranking = Ranking::new(self.options.moh.router, self.config);
        let (inputs, width) = (self.config.query_width(), self.config.hidden_size);
        let elements = self.tokens.pass() * width;
        let mut scores = Scores::new(ranking);
        let (mut outputs, mut targets) = (Vec::new(), Vec::new());
        let passes = self.streams.dense.chunks_exact(elements);
        for x in passes.take(self.tokens.search_passes(inputs)) {
            let queries = self.block.project(x)?;
            match self.options.moh.router.has_matrices() {
                true => scores.add_logits(&self.block.logits()?),
                false => scores.add(&queries, self.config.head_dim),
            }
            outputs.extend(self.block.attend()?);
            let after = self.block.forward(x, None)?.after_attention;
            targets.extend(after.iter().zip(x).map(|(after, before)| after - before));
        }
        let weight = matrix(projection, inputs);
        let targets: Array2<f32> = matrix(&targets, width);
        let pass = self.tokens.pass();
        Ok(LayerSample::new(scores, ranking, outputs, targets.view(), weight, pass))
    }

    /// The mean cross-entropies by residual streams behind the last layer, of the first tokens.
    fn losses(&mut self, streams: &[&[f32]]) -> Result<Vec<f64>, E> {
        let (batch, length) = (self.tokens.batch, self.tokens.length());
        let mut ends =
            EndsPass::new(self.backend.clone(), self.config, batch, length, &mut *self.weights)?;
        let (pass, width) = (self.tokens.pass(), self.config.hidden_size);
        let mean = |stream: &&[f32]| {
            let passes = stream.chunks_exact(pass * width);
            let mut sum = 0.0;
            for (x, ids) in passes.zip(self.tokens.ids().chunks_exact(pass)) {
                sum += ends.cross_entropy(x, &EndsPass::<B>::targets(ids, length))?;
            }
            Ok::<_, E>(sum / (stream.len() / width / length * (length - 1)) as f64)
        };
        streams.iter().map(mean).collect()
    }
}

/// Adds a pass to the sums of the fit of a layer with this routing: the residual stream `x` before it, and the
/// dense model's one after attention.
fn add_pass<B: Backend>(
    config: &ModelConfig,
    block: &mut BlockPass<B>,
    sums: &mut ProductSums<'_, B>,
    moh: &MohConfig,
    x: &[f32],
    after_attention: &[f32],
) -> Result<()> {
    block.project(x)?;
    let active = block.select(moh.clone())?;
    let weights = match block.weights()? {
        Some(weights) => weights,
        None => active.into_iter().map(f32::from).collect(),
    };
    let mut outputs = block.attend()?;
    for (output, weight) in outputs.chunks_exact_mut(config.head_dim).zip(weights) {
        match weight {
            0.0 => output.fill(0.0),
            _ => output.iter_mut().for_each(|value| *value *= weight),
        }
    }
    let targets: Vec<f32> =
        after_attention.iter().zip(x).map(|(after, before)| after - before).collect();
    sums.add(&outputs, &targets)
}
