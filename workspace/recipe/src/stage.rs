//! `[[stage]]`: attention, schedule, optimiser and parallelism of a training stage.

use moh_model::{
    Active, AuxiliaryLoss, AuxiliaryLosses, HeadCounts, HeadRequest, ModelConfig, MohConfig,
    RouterKind, SharedHeadSets,
};
use moh_step::Hyperparameters;
use serde::{Deserialize, Serialize};

use crate::{CalibrationOptions, DistillOptions, StageDataOptions};

/// `[[stage]]`: a training stage with its own schedule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stage {
    /// Letters, digits, `-` and `_`; unique among the stages.
    pub name: String,
    /// Tokens of the stage, rounded up to whole batches.
    pub tokens: u64,
    /// Tokens per optimiser step.
    pub batch_tokens: u64,
    /// Sequences per micro-batch.
    pub micro_batch: usize,
    /// The stage's attention.
    pub attention: AttentionKind,
    /// The heads' routing; default: the model's, or else the defaults below. Ignored if `attention`
    /// is dense, so that one override gives the dense baseline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moh: Option<MohOptions>,
    /// The teacher that the stage learns from in addition to its targets, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub distill: Option<DistillOptions>,
    /// The data that the stage reads in place of the run's `[data]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<StageDataOptions>,
    /// The learning-rate schedule.
    pub learning_rate: LearningRateOptions,
    /// AdamW.
    #[serde(default)]
    pub optimizer: Hyperparameters,
    /// The parallelism of the model.
    #[serde(default)]
    pub parallel: ParallelOptions,
}

/// The attention of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AttentionKind {
    /// All heads active for every token.
    Dense,
    /// Mixture-of-Head.
    Moh,
}

/// `moh = { .. }` of a stage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MohOptions {
    /// The router, by its name in `config.json`. Default: the router of the Mixture-of-Head model that the stage starts
    /// with; for a dense model `"linear"` if the stage is calibrated, otherwise `"query-norm"`.
    #[serde(with = "router_name", skip_serializing_if = "Option::is_none")]
    pub router: Option<RouterKind>,
    /// Shared heads: one count for all layers, or a list with one for each layer. Default: the
    /// model's, if it is already a Mixture-of-Head model; otherwise half of the heads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared_heads: Option<HeadCounts>,
    /// The shared heads themselves, a list for each layer, in place of their number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared_head_ids: Option<Vec<Vec<usize>>>,
    /// Active routed heads per token: one count for all layers, or a list with one for each layer. Default: the
    /// model's, as above; otherwise as many as make 75% of a layer's heads active. With 0, the routed heads are
    /// inactive.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub routed_top_k: Option<HeadCounts>,
    /// Weight of the balance loss relative to the cross-entropy; default: 0.01.
    pub balance_loss_weight: f64,
    /// The measurement of heads and output projections where the stage converts a dense model; default: no measurement.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calibration: Option<CalibrationOptions>,
}

impl Default for MohOptions {
    fn default() -> Self {
        MohOptions {
            router: None,
            shared_heads: None,
            shared_head_ids: None,
            routed_top_k: None,
            balance_loss_weight: 0.01,
            calibration: None,
        }
    }
}

impl MohOptions {
    /// Sets the shared heads: by number if they are the first heads of each layer, otherwise by id.
    pub(crate) fn set_shared(&mut self, shared: &SharedHeadSets) {
        self.shared_head_ids = shared.ids();
        self.shared_heads = self.shared_head_ids.is_none().then(|| shared.counts());
    }

    /// Returns the weight of each auxiliary loss of routers. The weight's key is the loss's name and `_weight`.
    pub fn auxiliary_weights(&self) -> AuxiliaryLosses<f64> {
        AuxiliaryLosses::new(|loss| match loss {
            AuxiliaryLoss::Balance => self.balance_loss_weight,
            // Set by the stage's teacher.
            AuxiliaryLoss::Distillation => 0.0,
        })
    }
}

/// Returns the heads that keys request, shared heads by their ids or by their numbers. Fails if ids are not a set of a
/// layer's heads.
pub(crate) fn head_request(
    router: Option<RouterKind>,
    shared_heads: Option<HeadCounts>,
    shared_head_ids: Option<Vec<Vec<usize>>>,
    routed_top_k: Option<HeadCounts>,
) -> Result<HeadRequest, moh_model::Error> {
    let shared_heads = match shared_head_ids {
        Some(ids) => Some(SharedHeadSets::from_ids(&ids)?),
        None => shared_heads.map(SharedHeadSets::First),
    };
    Ok(HeadRequest { router, shared_heads, active: routed_top_k.map(Active::RoutedTopK) })
}

/// The learning rate of a stage; see [`crate::Schedule`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LearningRateOptions {
    /// The learning rate after the warm-up.
    pub max: f64,
    /// The learning rate of the last step, or the smallest learning rate; default: 0.
    #[serde(default)]
    pub min: f64,
    /// Steps of the linear warm-up.
    pub warmup_steps: u64,
    /// The decay of the rate from `max` to `min`; default: cosine.
    #[serde(default)]
    pub decay: Decay,
    /// The number of last steps, in which the rate falls; default: all steps after the warm-up. With fewer steps, the
    /// rate stays at `max` in between: warm-up, stable, decay (WSD, arXiv 2404.06395).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decay_steps: Option<u64>,
}

/// The decay of the learning rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Decay {
    /// By half a cosine.
    #[default]
    Cosine,
    /// By a straight line.
    Linear,
    /// By one minus the square root of the fraction that is done (arXiv 2405.18392).
    Sqrt,
    /// As the inverse of the square root of the step, from the warm-up's end on, until it is `min`.
    InverseSquareRoot,
    /// Not at all; `min` is not used.
    Constant,
}

impl Decay {
    /// Returns whether the decay ends at `min` after a number of steps, which `decay_steps` may set.
    pub(crate) fn has_end(self) -> bool {
        match self {
            Decay::Cosine | Decay::Linear | Decay::Sqrt => true,
            Decay::InverseSquareRoot | Decay::Constant => false,
        }
    }
}

/// Processes that share one copy of the model; default: 1 of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ParallelOptions {
    /// Tensor-parallel ranks, which shard each block.
    pub tensor: usize,
    /// Pipeline stages, which divide the blocks.
    pub pipeline: usize,
    /// Chunks of the model on each pipeline stage, assigned round-robin (interleaved one forward,
    /// one backward, arXiv 2104.04473).
    pub virtual_stages: usize,
}

impl Default for ParallelOptions {
    fn default() -> Self {
        ParallelOptions { tensor: 1, pipeline: 1, virtual_stages: 1 }
    }
}

impl ParallelOptions {
    /// Returns the number of data ranks of `ranks` ranks; `None` if `ranks` is not a multiple of tensor x pipeline.
    pub fn data_ranks(&self, ranks: usize) -> Option<usize> {
        let model = self.tensor.checked_mul(self.pipeline).filter(|&model| model > 0)?;
        (ranks > 0 && ranks.is_multiple_of(model)).then_some(ranks / model)
    }
}

impl Stage {
    /// Returns the optimiser steps: tokens over tokens per batch, rounded up.
    pub fn num_steps(&self) -> u64 {
        self.steps_of(self.tokens)
    }

    /// Returns the optimiser steps of `tokens` tokens in this stage's batches.
    pub fn steps_of(&self, tokens: u64) -> u64 {
        tokens.div_ceil(self.batch_tokens.max(1))
    }

    /// Returns the learning rates of the stage's steps.
    pub fn schedule(&self) -> crate::Schedule {
        crate::Schedule::new(self.learning_rate, self.num_steps())
    }

    /// Returns the routing of a stage of a run that starts with `model`, with defaults filled in; `None` for dense
    /// attention. The model may lack a router's matrices.
    ///
    /// # Errors
    /// Fails if the counts do not fit the model, or if the model has matrices that the stage does not use.
    pub fn moh_config(&self, model: &ModelConfig) -> Result<Option<MohConfig>, moh_model::Error> {
        if self.attention == AttentionKind::Dense {
            model.added_tensors(None)?;
            return Ok(None);
        }
        let MohOptions { router, shared_heads, shared_head_ids, routed_top_k, .. } =
            self.moh.clone().unwrap_or_default();
        let request = head_request(router, shared_heads, shared_head_ids, routed_top_k)?;
        let moh = request.for_model(model)?;
        model.added_tensors(Some(&moh))?;
        Ok(Some(moh))
    }
}

/// Deserializes a router from its name in `config.json`.
pub(crate) mod router_name {
    use moh_model::RouterKind;
    use serde::{Deserializer, Serializer};

    use crate::name::from_name;

    pub fn serialize<S: Serializer>(router: &Option<RouterKind>, to: S) -> Result<S::Ok, S::Error> {
        match router {
            Some(router) => to.serialize_str(router.name()),
            None => to.serialize_none(),
        }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<RouterKind>, D::Error> {
        from_name(from, &RouterKind::NAMES, RouterKind::from_name).map(Some)
    }
}
