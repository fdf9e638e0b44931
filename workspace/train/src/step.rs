//! One optimisation step: micro-batches, accumulated gradients, clipping and the update.

use moh_data::TrainingData;
use moh_kernels::adamw::AdamW;
use moh_kernels::{Backend, Element};
use moh_model::parameters::FlatBuffers;
use moh_model::{Activations, LossScale, LossSums, Model, PassShape};

use crate::Error;
use crate::optimizer::OptimizerState;
use crate::recipe::{Optimizer, Recipe, Recompute, Stage};

/// The buffers of a stage's steps, and what does not change between them.
pub(crate) struct Stepper<B: Backend, T: Element, G: Element> {
    activations: Activations<B, T>,
    gradients: FlatBuffers<B, G>,
    sums: LossSums<B>,
    micro_batches: u64,
    micro_batch: u64,
    balance_loss_weight: f64,
    optimizer: Optimizer,
    stage: String,
    host: HostBatch,
}

/// A micro-batch on the host.
struct HostBatch {
    window: Vec<u32>,
    ids: Vec<u32>,
    targets: Vec<u32>,
    first_key: Vec<u32>,
    document_mask: bool,
}

/// What a step measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Taken {
    pub loss: f64,
    pub balance_loss: Option<f64>,
    pub grad_norm: f64,
}

impl<B: Backend + Clone, T: Element, G: Element> Stepper<B, T, G> {
    pub(crate) fn new(model: &Model<B, T>, recipe: &Recipe, stage: &Stage) -> Result<Self, Error> {
        let length = recipe.data.sequence_length;
        let document_mask = recipe.data.document_mask;
        let shape = PassShape {
            batch: stage.micro_batch,
            length,
            recompute: match recipe.memory.recompute {
                Recompute::None => moh_model::Recompute::None,
                Recompute::Cheap => moh_model::Recompute::Cheap,
                Recompute::Block => moh_model::Recompute::Block,
            },
            training: true,
            document_mask,
        };
        let tokens = stage.micro_batch * length;
        Ok(Stepper {
            activations: Activations::new(model, shape)?,
            gradients: FlatBuffers::zeros(model.backend(), model.layout())?,
            sums: LossSums::new(model.backend())?,
            micro_batches: stage.batch_tokens / tokens as u64,
            micro_batch: stage.micro_batch as u64,
            balance_loss_weight: stage.moh.as_ref().map_or(0.0, |moh| moh.balance_loss_weight),
            optimizer: stage.optimizer,
            stage: stage.name.clone(),
            host: HostBatch {
                window: vec![0; length + 1],
                ids: vec![0; tokens],
                targets: vec![0; tokens],
                first_key: vec![0; if document_mask { tokens } else { 0 }],
                document_mask,
            },
        })
    }

    /// Sequences of one step.
    pub(crate) fn batch_sequences(&self) -> u64 {
        self.micro_batches * self.micro_batch
    }

    /// Takes step `number` of the stage at learning rate `rate` on the samples from `sample` on.
    pub(crate) fn step<M: Element>(
        &mut self,
        model: &mut Model<B, T>,
        optimizer: &mut OptimizerState<B, M>,
        data: &TrainingData,
        sample: u64,
        (number, rate): (u64, f64),
    ) -> Result<Taken, Error> {
        let backend = model.backend().clone();
        let targets = self.micro_batches as f64 * self.host.ids.len() as f64;
        let scale = LossScale {
            cross_entropy: (1.0 / targets) as f32,
            balance: (self.balance_loss_weight / self.micro_batches as f64) as f32,
            straight_through: true,
        };
        self.gradients.zero(&backend)?;
        for part in 0..self.micro_batches {
            let first = sample + part * self.micro_batch;
            self.host.read(data, first)?;
            let HostBatch { ids, targets, first_key, .. } = &self.host;
            self.activations.upload(&backend, ids, targets, first_key)?;
            model.forward_backward(
                &mut self.activations,
                &mut self.gradients,
                scale,
                &mut self.sums,
            )?;
        }
        let (cross_entropy, balance) = self.sums.take(&backend)?;
        let norm = optimizer.gradient_norm(&backend, model.layout(), &self.gradients)?;
        let loss = cross_entropy / targets;
        if !loss.is_finite() || !norm.is_finite() {
            return Err(Error::NotFinite { stage: self.stage.clone(), step: number, loss, norm });
        }
        let Optimizer { beta1, beta2, eps, weight_decay, clip_norm } = self.optimizer;
        let constants =
            AdamW { learning_rate: rate, beta1, beta2, eps, weight_decay, clip_norm, step: number };
        optimizer.update(model, &self.gradients, &constants)?;
        let routes = model.config().moh.is_some();
        let balance_loss = routes.then_some(balance / self.micro_batches as f64);
        Ok(Taken { loss, balance_loss, grad_norm: norm })
    }
}

impl HostBatch {
    /// Reads the samples `first..`, one a sequence.
    fn read(&mut self, data: &TrainingData, first: u64) -> Result<(), Error> {
        let length = data.sequence_length();
        let sequences =
            self.ids.chunks_exact_mut(length).zip(self.targets.chunks_exact_mut(length));
        for (index, (ids, targets)) in sequences.enumerate() {
            let first_key = self
                .document_mask
                .then(|| &mut self.first_key[index * length..(index + 1) * length]);
            data.sample(first + index as u64, &mut self.window, first_key)?;
            ids.copy_from_slice(&self.window[..length]);
            targets.copy_from_slice(&self.window[1..]);
        }
        Ok(())
    }
}
