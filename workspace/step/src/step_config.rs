//! The settings of a stage's steps, and of a single step.

use moh_comm::Group;
use moh_kernels::ElementType;
use moh_model::{AuxiliaryLosses, Distillation, PassRole, PassShape, Recompute};

use crate::guard::Limits;
use crate::optimizer::Hyperparameters;

/// The settings of all steps of a stage.
#[derive(Debug, Clone, PartialEq)]
pub struct StepConfig {
    /// The stage's name, for messages.
    pub stage: String,
    /// Tokens of a sequence.
    pub sequence_length: usize,
    /// Sequences of a micro-batch.
    pub micro_batch: usize,
    /// Micro-batches of a step.
    pub micro_batches: u64,
    /// Whether attention is limited to the token's own document.
    pub document_mask: bool,
    /// The activations that the backward pass recomputes.
    pub recompute: Recompute,
    /// Weight of each auxiliary loss except distillation; unused by a dense model.
    pub auxiliary_weights: AuxiliaryLosses<f64>,
    /// The settings of distillation. If they are set, the model must have a teacher
    /// ([`moh_model::Model::set_teacher`]).
    pub distillation: Option<Distillation>,
    /// Hyperparameters of AdamW.
    pub optimizer: Hyperparameters,
    /// Element type of the gradients of weights.
    pub gradients: ElementType,
    /// Element type in which ranks exchange f32 gradients.
    pub reduce: ElementType,
}

/// The groups of ranks that compute a step together.
#[derive(Debug, Clone)]
pub struct StepGroups {
    /// All ranks.
    pub all: Group,
    /// The data-parallel ranks: the ranks with the same part of the model, which share a step's micro-batches.
    pub data: Group,
}

impl StepConfig {
    /// Returns the shape of a pass over one micro-batch.
    pub fn pass_shape(&self) -> PassShape {
        PassShape {
            batch: self.micro_batch,
            length: self.sequence_length,
            recompute: self.recompute,
            training: true,
            document_mask: self.document_mask,
        }
    }

    /// Returns the role of the model's passes in distillation.
    pub fn role(&self) -> PassRole {
        match self.distillation {
            Some(_) => PassRole::Student,
            None => PassRole::Alone,
        }
    }

    /// Returns the number of sequences of one step.
    pub fn batch_sequences(&self) -> u64 {
        self.micro_batches * self.micro_batch as u64
    }
}

/// The settings of a step's update of the weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Update {
    /// The number of the update since the moments were zero, from 1, for AdamW's bias correction. Steps that were not
    /// applied do not count.
    pub number: u64,
    /// The learning rate.
    pub learning_rate: f64,
    /// A step that exceeds these limits is not applied.
    pub limits: Limits,
}
