//! The calibration of a model, layer by layer.

use std::ops::ControlFlow;

use moh_kernels::Backend;
use moh_kernels::router::SharedHeads;
use moh_model::{BlockPass, EndsPass, ModelConfig, MohConfig, SharedHeadSets};
use ndarray::Array2;

use crate::products::ProductSums;
use crate::search::{LayerSample, judged_outputs};
use crate::selection::{Ranking, Scores};
use crate::{CalibrationTokens, Error, RIDGE, Result, matrix};

/// Which heads are shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shared {
    /// Those of the configuration.
    Given,
    /// As many as in the configuration, chosen by measurement.
    Calibrated,
    /// Chosen by measurement, their number too; as many heads are active as in the configuration.
    CalibratedNumber,
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
}

impl CalibrationOptions {
    /// Refuses learned routers, whose matrices a dense model does not have.
    fn check_router(&self) -> Result<()> {
        match self.moh.router.has_matrices() {
            true => Err(Error::Router { router: self.moh.router.name() }),
            false => Ok(()),
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
/// can stop the calibration with `ControlFlow::Break`, which gives `Ok(None)`.
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
    options.check_router()?;
    let mut job = Job::new(backend, config, options, tokens, weights)?;
    let mut found = Vec::new();
    for layer in 0..layers {
        if progress(layer, layers).is_break() {
            return Ok(None);
        }
        found.push(job.layer(layer, weights, refitted)?);
    }
    let losses = job.losses(weights)?;
    let moh = MohConfig {
        shared_heads: found.iter().map(|layer| layer.shared).collect(),
        routed_top_k: found.iter().map(|layer| layer.top_k).collect(),
        ..options.moh.clone()
    };
    Ok(Some(Calibration { moh, layers: found, losses }))
}

/// A calibration between two layers.
struct Job<'a, B: Backend> {
    backend: &'a B,
    config: &'a ModelConfig,
    options: &'a CalibrationOptions,
    tokens: &'a CalibrationTokens,
    block: BlockPass<B>,
    sums: ProductSums<'a, B>,
    /// Of the outputs by which sets are judged.
    judged_sums: ProductSums<'a, B>,
    streams: Streams,
}

/// The residual streams before a layer, `[tokens, hidden_size]`.
struct Streams {
    dense: Vec<f32>,
    /// Of the routing that was given, with the source's weights.
    given: Vec<f32>,
    calibrated: Vec<f32>,
}

impl<'a, B: Backend + Clone> Job<'a, B> {
    fn new<E: From<Error> + From<moh_model::Error>>(
        backend: &'a B,
        config: &'a ModelConfig,
        options: &'a CalibrationOptions,
        tokens: &'a CalibrationTokens,
        weights: Source<'_, E>,
    ) -> Result<Self, E> {
        let (batch, length) = (tokens.batch(), tokens.length());
        let mut ends = EndsPass::new(backend.clone(), config, batch, length, &mut *weights)?;
        let mut dense = Vec::with_capacity(tokens.ids().len() * config.hidden_size);
        for ids in tokens.ids().chunks_exact(tokens.pass()) {
            dense.extend(ends.embed(ids)?);
        }
        // Before the block takes its place.
        drop(ends);
        let of_block = ModelConfig { moh: Some(options.moh.clone()), ..config.clone() };
        let (inputs, width) = (config.query_width(), config.hidden_size);
        Ok(Job {
            backend,
            config,
            options,
            tokens,
            block: BlockPass::new(backend.clone(), &of_block, batch, length)?,
            sums: ProductSums::new(backend, tokens.pass(), inputs, width)?,
            judged_sums: ProductSums::new(backend, tokens.pass(), inputs, judged_outputs(width))?,
            streams: Streams { given: dense.clone(), calibrated: dense.clone(), dense },
        })
    }

    /// Chooses the shared heads of a layer, refits its output projection, and moves the residual streams
    /// behind it.
    fn layer<E: From<Error> + From<moh_model::Error>>(
        &mut self,
        layer: usize,
        weights: Source<'_, E>,
        refitted: OnProjection<'_, E>,
    ) -> Result<LayerCalibration, E> {
        let projection = format!("model.layers.{layer}.self_attn.o_proj.weight");
        let mut old = vec![0f32; self.config.hidden_size * self.config.query_width()];
        weights(&projection, &mut old)?;
        self.block.load(layer, &mut *weights)?;
        let in_layer = |error: Error| error.in_layer(layer);
        let moh = self.choose(layer, &old).map_err(in_layer)?;
        let products = self.measure::<E>(layer, &moh)?;
        let old = matrix::<f64>(&old, self.config.query_width());
        let error_before = products.error(old.view());
        let mut error = None;
        if self.options.refit {
            let fit = products.fit(old.view(), RIDGE).map_err(in_layer)?;
            let new: Vec<f32> = fit.weight.iter().map(|&weight| weight as f32).collect();
            refitted(layer, &new)?;
            self.block.load::<E>(layer, |name, values| match name == projection {
                true => {
                    values.copy_from_slice(&new);
                    Ok(())
                }
                false => weights(name, values),
            })?;
            error = Some(fit.error);
        }
        let elements = self.tokens.pass() * self.config.hidden_size;
        for x in self.streams.calibrated.chunks_exact_mut(elements) {
            x.copy_from_slice(&self.block.forward(x, Some(moh.clone()))?.output);
        }
        let heads = moh.layer(0);
        Ok(LayerCalibration { shared: heads.shared, top_k: heads.top_k, error_before, error })
    }

    /// The products of the fit of a layer with this routing, and the other streams behind the layer.
    fn measure<E: From<Error> + From<moh_model::Error>>(
        &mut self,
        layer: usize,
        moh: &MohConfig,
    ) -> Result<crate::ridge::Products, E> {
        let given = alone(&self.options.moh, layer);
        let elements = self.tokens.pass() * self.config.hidden_size;
        let Streams { dense, given: of_given, calibrated } = &mut self.streams;
        let streams = dense.chunks_exact_mut(elements).zip(of_given.chunks_exact_mut(elements));
        for ((dense, of_given), x) in streams.zip(calibrated.chunks_exact(elements)) {
            let after = self.block.forward(dense, None)?;
            dense.copy_from_slice(&after.output);
            of_given.copy_from_slice(&self.block.forward(of_given, Some(given.clone()))?.output);
            self.block.project(x)?;
            let active = self.block.select(moh.clone())?;
            let mut outputs = self.block.attend()?;
            for (output, active) in outputs.chunks_exact_mut(self.config.head_dim).zip(active) {
                if active == 0 {
                    output.fill(0.0);
                }
            }
            let targets: Vec<f32> =
                after.after_attention.iter().zip(x).map(|(after, before)| after - before).collect();
            self.sums.add(&outputs, &targets)?;
        }
        Ok(self.sums.take())
    }

    /// The routing of a layer, as that of a model of one layer.
    fn choose(&mut self, layer: usize, projection: &[f32]) -> Result<MohConfig> {
        let given = alone(&self.options.moh, layer);
        let (counts, heads) = (given.layer(0), self.config.num_attention_heads);
        if self.options.shared == Shared::Given || counts.shared.len() == heads {
            return Ok(given);
        }
        let sample = self.sample(projection)?;
        let numbers = self.numbers(counts.shared.len(), counts.active());
        let chosen = sample.best_set(&mut self.judged_sums, &numbers, counts.active())?.heads;
        Ok(MohConfig {
            shared_heads: SharedHeadSets::Sets(vec![chosen.shared]),
            routed_top_k: chosen.top_k.into(),
            ..given
        })
    }

    /// The numbers of shared heads that are compared, beside which tokens select at least one head.
    fn numbers(&self, given: usize, active: usize) -> Vec<usize> {
        if self.options.shared != Shared::CalibratedNumber || !self.options.moh.router.selects() {
            return vec![given];
        }
        let ranking = Ranking::new(self.options.moh.router, self.config);
        // All of a few, else quarters of the active heads.
        let step = if active <= 8 { 1 } else { active.div_ceil(4) };
        let mut numbers: Vec<usize> = (0..active).step_by(step).chain([given]).collect();
        numbers.retain(|&shared| shared < active && ranking.fits(shared, active - shared));
        numbers.sort_unstable();
        numbers.dedup();
        numbers
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
            scores.add(&self.block.project(x)?, self.config.head_dim);
            outputs.extend(self.block.attend()?);
            let after = self.block.forward(x, None)?.after_attention;
            targets.extend(after.iter().zip(x).map(|(after, before)| after - before));
        }
        let (outputs, weight) = (matrix(&outputs, inputs), matrix(projection, inputs));
        let targets: Array2<f32> = matrix(&targets, width);
        let pass = self.tokens.pass();
        Ok(LayerSample::new(scores, ranking, outputs, targets.view(), weight, pass))
    }

    /// The mean cross-entropies by the streams behind the last layer.
    fn losses<E: From<Error> + From<moh_model::Error>>(
        &mut self,
        weights: Source<'_, E>,
    ) -> Result<Losses, E> {
        let (batch, length) = (self.tokens.batch(), self.tokens.length());
        let mut ends =
            EndsPass::new(self.backend.clone(), self.config, batch, length, &mut *weights)?;
        let (pass, ids) = (self.tokens.pass(), self.tokens.ids());
        let count = (ids.len() / length * (length - 1)) as f64;
        let mut mean = |stream: &[f32]| {
            let passes = stream.chunks_exact(pass * self.config.hidden_size);
            let mut sum = 0.0;
            for (x, ids) in passes.zip(ids.chunks_exact(pass)) {
                sum += ends.cross_entropy(x, &EndsPass::<B>::targets(ids, length))?;
            }
            Ok::<_, E>(sum / count)
        };
        let Streams { dense, given, calibrated } = &self.streams;
        Ok(Losses { dense: mean(dense)?, given: mean(given)?, calibrated: mean(calibrated)? })
    }
}

/// The routing of layer `layer` as that of a model of one layer.
fn alone(moh: &MohConfig, layer: usize) -> MohConfig {
    let heads = moh.layer(layer);
    MohConfig {
        shared_heads: SharedHeadSets::Sets(vec![heads.shared]),
        routed_top_k: heads.top_k.into(),
        ..moh.clone()
    }
}
