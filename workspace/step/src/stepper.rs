//! One optimisation step: micro-batches, accumulated gradients, clipping and the update.
//!
//! A [`Stepper`] depends neither on recipes nor on token files: a [`StepConfig`] has the sizes, and the caller, the
//! trainer or a benchmark, passes the tokens.

use std::ops::Range;

use moh_comm::Group;
use moh_kernels::adamw::AdamW;
use moh_kernels::ranks::share;
use moh_kernels::{Backend, span};
use moh_model::{
    Activations, AuxiliaryLoss, AuxiliaryLosses, FlatBuffers, LossConfig, Model, PassSlot, Segment,
    StepSums, Sums,
};

use crate::block_norms::SquaredBlockNorms;
use crate::data_parallel::DataParallel;
use crate::guard::{Limits, SkipReason};
use crate::optimizer::squared_norms;
use crate::pipeline_schedule::{self, ChunkPass};
use crate::samples::HostBatch;
use crate::{
    BlockNorms, Hyperparameters, OptimizerState, ReadSample, Result, StepBuffers, StepConfig,
    StepGroups, StepSizes, Update,
};

/// The buffers of a stage's steps, and the settings that do not change between steps.
pub struct Stepper<B: Backend> {
    activations: Activations<B>,
    /// The rank's pipeline schedule of a step; its micro-batches are counted from 0.
    passes: Vec<ChunkPass>,
    /// This rank's micro-batches of a step: a consecutive range.
    own: Range<usize>,
    gradients: FlatBuffers<B>,
    data_parallel: DataParallel<B>,
    sums: StepSums<B>,
    config: StepConfig,
    /// The first sample of the step with samples that were read ahead.
    ahead: Option<u64>,
    host: HostBatch,
    all_ranks: Group,
    /// Whether the next step measures its norms by block.
    measures_norms: bool,
    squared_block_norms: SquaredBlockNorms<B>,
    block_norms: Option<BlockNorms>,
}

/// Observes the activations of a step's passes.
pub trait Observer<B: Backend> {
    /// Receives the activations of a micro-batch at `slot`, after its forward pass through a chunk.
    fn forward_done(
        &mut self,
        model: &Model<B>,
        activations: &Activations<B>,
        slot: PassSlot,
    ) -> Result<()> {
        let _ = (model, activations, slot);
        Ok(())
    }
}

struct Unobserved;

impl<B: Backend> Observer<B> for Unobserved {}

/// The measurements of a step, and whether it was applied.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepResult {
    /// Mean cross-entropy of the step's targets, before the update; 0 if no target is trained on.
    pub loss: f64,
    /// The number of targets that are trained on, where masks leave some out; `None` if all targets are.
    pub targets: Option<u64>,
    /// Unweighted means of the auxiliary losses over the step's micro-batches, of distillation over its targets. `None`
    /// where the step has no such loss.
    pub auxiliary: AuxiliaryLosses<Option<f64>>,
    /// Global norm of the gradients before clipping.
    pub grad_norm: f64,
    /// The reason why the step was not applied; `None` if it was applied.
    pub skipped: Option<SkipReason>,
}

impl StepResult {
    /// Returns the reason to skip the step within `limits`; `None` if it is applied.
    pub fn check(&self, limits: &Limits) -> Option<SkipReason> {
        match self.targets {
            Some(0) => Some(SkipReason::NoTargets),
            _ => limits.check(self.loss, self.grad_norm),
        }
    }
}

/// The gradient of a tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorGradient {
    /// The tensor.
    pub name: String,
    /// The tensor's block; `None` outside blocks.
    pub block: Option<usize>,
    /// Norm of the tensor's gradient before clipping.
    pub norm: f64,
}

impl<B: Backend + Clone> Stepper<B> {
    /// Allocates the buffers of `config`'s steps on `model`, shared by the ranks of `groups`.
    ///
    /// # Errors
    /// Fails if the device is out of memory, or if the configuration has a teacher and the model has no teacher.
    pub fn new(model: &Model<B>, config: StepConfig, groups: StepGroups) -> Result<Self> {
        // The step's schedule is in memory, so its length fits a `usize`.
        let micro_batches = usize::try_from(config.micro_batches).unwrap_or(usize::MAX);
        let own = share(micro_batches, groups.data.rank(), groups.data.size());
        let stage = stage_of(model);
        let sizes = StepSizes {
            layout: model.layout(),
            passes: model.pass_sizes(config.pass_shape())?.in_role(config.role()),
            slots: stage.slots(own.len()),
            data_ranks: groups.data.size(),
            gradients: config.gradients,
            reduce: config.reduce,
        };
        let (mut messages, mut bytes) = (stage.messages(own.len()), sizes.passes.message_bytes());
        if config.distillation.is_some() {
            messages += stage.teacher_messages(own.len());
            let teacher = model.teacher_sizes(config.pass_shape())?;
            bytes = bytes.max(teacher.message_bytes());
        }
        model.parallel().reserve_sends(messages, bytes)?;
        let buffers = StepBuffers::new(model.backend(), &sizes)?;
        let StepBuffers { activations, mut gradients, rounded, sums, block_norms } = buffers;
        gradients.freeze(model.layout(), |segment| config.optimizer.groups.freezes(segment));
        Ok(Stepper {
            activations,
            passes: stage.passes(own.len()),
            own,
            gradients,
            data_parallel: DataParallel::new(model, &groups.data, rounded),
            sums,
            host: HostBatch::new(&config),
            config,
            ahead: None,
            all_ranks: groups.all,
            measures_norms: false,
            squared_block_norms: block_norms,
            block_norms: None,
        })
    }

    /// Returns the settings of all steps.
    pub fn config(&self) -> &StepConfig {
        &self.config
    }

    /// Sets whether the next steps measure norms by block, for [`Self::take_block_norms`]. All ranks set the same.
    pub fn measure_block_norms(&mut self, measure: bool) {
        self.measures_norms = measure;
    }

    /// Returns the norms by block of the last step, if it measured them.
    pub fn take_block_norms(&mut self) -> Option<BlockNorms> {
        self.block_norms.take()
    }

    /// Waits for the updated weights of the last step. Required before any use of the weights except the next step.
    pub fn wait_for_weights(&mut self, model: &mut Model<B>) -> Result<()> {
        Ok(self.data_parallel.wait_for_all_weights(model.weights_mut())?)
    }

    /// Computes a step on the samples from `first` on, and applies it within the limits of `update`. A step beyond the
    /// limits does not change the weights and the optimiser's state. With several data ranks, the weights are complete
    /// only after [`Self::wait_for_weights`].
    pub fn step(
        &mut self,
        model: &mut Model<B>,
        optimizer: &mut OptimizerState<B>,
        read: impl ReadSample + Send,
        first: u64,
        update: Update,
    ) -> Result<StepResult> {
        let backend = model.backend().clone();
        backend.install(|| self.compute_and_apply(&backend, model, optimizer, read, first, update))
    }

    fn compute_and_apply(
        &mut self,
        backend: &B,
        model: &mut Model<B>,
        optimizer: &mut OptimizerState<B>,
        read: impl ReadSample,
        first: u64,
        update: Update,
    ) -> Result<StepResult> {
        let result = self.compute(backend, model, optimizer, read, first, &mut Unobserved)?;
        if self.measures_norms {
            let _norms = span::enter("block norms");
            self.block_norms = Some(self.squared_block_norms.measure(
                backend,
                model.layout(),
                model.weights(),
                &self.gradients,
                optimizer.shard(),
                &self.all_ranks,
            )?);
        }
        // All ranks have the same sums, and so decide alike.
        let skipped = result.check(&update.limits);
        let result = StepResult { skipped, ..result };
        if skipped.is_some() {
            // The next step overwrites the gradients, and no all-gather of weights has started.
            return Ok(result);
        }
        let Hyperparameters { beta1, beta2, eps, weight_decay, clip_norm, groups } =
            self.config.optimizer;
        let Update { number: step, learning_rate, .. } = update;
        let grad_norm = result.grad_norm;
        let constants =
            AdamW { learning_rate, beta1, beta2, eps, weight_decay, clip_norm, grad_norm, step };
        let _optimizer = span::enter("optimizer");
        let data_parallel = &mut self.data_parallel;
        optimizer.update(model, &self.gradients, &constants, &groups, &mut |weights, flat| {
            data_parallel.start_weights(weights, flat)
        })?;
        Ok(result)
    }

    /// Computes a step and its gradients without an update. Passes the activations of its passes to `observer`.
    pub fn measure(
        &mut self,
        model: &mut Model<B>,
        optimizer: &OptimizerState<B>,
        read: impl ReadSample + Send,
        first: u64,
        observer: &mut (dyn Observer<B> + Send),
    ) -> Result<StepResult> {
        let backend = model.backend().clone();
        backend.install(|| self.compute(&backend, model, optimizer, read, first, observer))
    }

    /// Returns the norm of each local tensor's gradient of the last step, before clipping, in the order of the model.
    /// Frozen tensors have none.
    pub fn gradient_norms(&self, model: &Model<B>) -> Result<Vec<TensorGradient>> {
        let (backend, layout) = (model.backend(), model.layout());
        let layers = model.config().num_hidden_layers;
        let mut norms = Vec::new();
        let mut sums = StepSums::new(backend)?;
        let counts = |&(flat, segment): &(usize, &Segment)| {
            segment.counted && self.gradients.has_gradients(flat, &segment.range)
        };
        for (flat, segment) in layout.segments().filter(counts) {
            sums.zero(backend)?;
            let gradient = self.gradients.view(flat, segment.range.clone());
            squared_norms(backend, &[gradient], sums.squared_norm_mut())?;
            let squares = sums.read(backend)?.squared_norm;
            let block = (0..layers).find(|&layer| layout.block_index(layer) == flat);
            let name = segment.name.clone();
            norms.push(TensorGradient { name, block, norm: squares.sqrt() });
        }
        Ok(norms)
    }

    /// Computes the passes of a step and the sums over all ranks.
    fn compute(
        &mut self,
        backend: &B,
        model: &mut Model<B>,
        optimizer: &OptimizerState<B>,
        read: impl ReadSample,
        first: u64,
        observer: &mut dyn Observer<B>,
    ) -> Result<StepResult> {
        // Each rank counts the targets of the whole step, so that ranks need not wait for each other's counts.
        let step = first..first.saturating_add(self.config.batch_sequences());
        let trained = read.trained_targets(step)?;
        // Without targets the sum of their losses and its gradients are 0, whatever the divisor.
        let targets = trained.map_or(self.tokens(), |count| count.max(1) as f64);
        self.passes(backend, model, read, first, targets, observer)?;
        let _norm = span::enter("gradient norm");
        let (groups, layout) = (&self.config.optimizer.groups, model.layout());
        optimizer.add_squared_norm(backend, layout, &self.gradients, groups, &mut self.sums)?;
        self.sums.all_reduce(&self.all_ranks)?;
        let Sums { cross_entropy, auxiliary, squared_norm } = self.sums.read(backend)?;
        let moh = model.config().moh.as_ref();
        let selects = moh.is_some_and(|moh| moh.router.selects());
        let count = self.config.micro_batches as f64;
        let distils = self.config.distillation.is_some();
        let mean = |loss| match loss {
            AuxiliaryLoss::Balance => selects.then_some(auxiliary[loss] / count),
            AuxiliaryLoss::Distillation => distils.then_some(auxiliary[loss] / targets),
        };
        Ok(StepResult {
            loss: cross_entropy / targets,
            targets: trained,
            auxiliary: AuxiliaryLosses::new(mean),
            grad_norm: squared_norm.sqrt(),
            skipped: None,
        })
    }

    /// Computes this rank's micro-batches. Then its shard of the gradients has the sums over all ranks.
    fn passes(
        &mut self,
        backend: &B,
        model: &mut Model<B>,
        read: impl ReadSample,
        first: u64,
        targets: f64,
        observer: &mut dyn Observer<B>,
    ) -> Result<()> {
        let distillation = self.config.distillation;
        let (weights, count) = (self.config.auxiliary_weights, self.config.micro_batches as f64);
        let auxiliary = |loss| match loss {
            AuxiliaryLoss::Balance => (weights[loss] / count) as f32,
            AuxiliaryLoss::Distillation => {
                distillation.map_or(0.0, |distillation| (distillation.weight / targets) as f32)
            }
        };
        let cross_entropy = distillation.map_or(1.0, |distillation| distillation.cross_entropy);
        let losses = LossConfig {
            cross_entropy: (cross_entropy / targets) as f32,
            auxiliary: AuxiliaryLosses::new(auxiliary),
            straight_through: true,
        };
        self.sums.zero(backend)?;
        self.gradients.mark_stale();
        for i in 0..self.passes.len() {
            let pass = self.passes[i];
            let pass_slot =
                PassSlot { chunk: pass.chunk, micro_batch: pass.tokens, slot: pass.slot };
            let number = (self.own.start + pass.micro_batch) as u64;
            if pass.forward {
                if pass.chunk == 0 && self.activations.read_tokens() {
                    self.upload(backend, &read, first, number, pass.tokens)?;
                }
                let _forward = span::enter_numbered("forward", number);
                let data_parallel = &mut self.data_parallel;
                let mut wait = |weights: &mut FlatBuffers<B>, flat| {
                    data_parallel.wait_for_weights(weights, flat)
                };
                let (activations, sums) = (&mut self.activations, &mut self.sums);
                if distillation.is_some() {
                    model.teach_chunk(activations, pass_slot)?;
                }
                model.forward_chunk(activations, pass_slot, sums, &mut wait, None)?;
                observer.forward_done(model, &self.activations, pass_slot)?;
            } else {
                let _backward = span::enter_numbered("backward", number);
                let last = pass.micro_batch + 1 == self.own.len();
                let data_parallel = &mut self.data_parallel;
                let mut complete = |gradients: &mut FlatBuffers<B>, flat| {
                    data_parallel.start_gradients(gradients, flat)
                };
                model.backward_chunk(
                    &mut self.activations,
                    pass_slot,
                    &mut self.gradients,
                    losses,
                    &mut self.sums,
                    last.then_some(&mut complete),
                )?;
            }
        }
        if self.own.is_empty() {
            // The other ranks wait for this rank's zeros, and this rank waits for their weights.
            self.data_parallel.wait_for_all_weights(model.weights_mut())?;
            self.data_parallel.start_zero_gradients(&mut self.gradients, model.layout())?;
        }
        Ok(self.data_parallel.finish_gradients(&mut self.gradients)?)
    }

    /// Returns the number of tokens of a step, of all ranks.
    fn tokens(&self) -> f64 {
        self.config.micro_batches as f64 * self.host.ids.len() as f64
    }

    /// Starts to read ahead the samples of the step after the step from `first`, while this step is computed. Also
    /// reads ahead this step's samples, if that has not been done.
    fn read_ahead(&mut self, read: &impl ReadSample, first: u64) {
        let next = first.saturating_add(self.config.batch_sequences());
        if self.ahead == Some(next) {
            return;
        }
        let micro_batch = self.config.micro_batch as u64;
        let [start, end] = [self.own.start, self.own.end].map(|number| number as u64 * micro_batch);
        for step in [first, next].into_iter().filter(|&step| self.ahead != Some(step)) {
            read.read_ahead(step.saturating_add(start)..step.saturating_add(end));
        }
        self.ahead = Some(next);
    }

    /// Reads micro-batch `number` of the step from sample `first` on, and copies it to the device.
    fn upload(
        &mut self,
        backend: &B,
        read: &impl ReadSample,
        first: u64,
        number: u64,
        slot: usize,
    ) -> Result<()> {
        let _data = span::enter("data");
        self.read_ahead(read, first);
        let first = first + number * self.config.micro_batch as u64;
        self.host.read(self.config.sequence_length, read, first)?;
        let HostBatch { ids, targets, document_start, .. } = &self.host;
        Ok(self.activations.upload_to(slot, backend, ids, targets, document_start)?)
    }
}

fn stage_of<B: Backend>(model: &Model<B>) -> pipeline_schedule::PipelineStage {
    let parallel = model.parallel();
    pipeline_schedule::PipelineStage {
        number: parallel.stage(),
        stages: parallel.stages(),
        chunks: parallel.part().chunks.len(),
    }
}

#[cfg(test)]
mod tests;
