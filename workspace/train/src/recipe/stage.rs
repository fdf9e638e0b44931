//! `[[stage]]`: attention, schedule, optimiser and parallel split of a stretch of training.

use moh_model::{HeadCounts, ModelConfig, MohConfig, RouterKind};
use serde::{Deserialize, Serialize};

/// Share of the heads that a token computes where a recipe and its model do not say.
pub const DEFAULT_ACTIVE_SHARE: f64 = 0.75;

/// `[[stage]]`: a stretch of training with its own schedule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stage {
    /// Letters, digits, `-` and `_`; different from the other stages' names.
    pub name: String,
    /// Tokens to train on, rounded up to whole batches.
    pub tokens: u64,
    /// Tokens of one optimiser step.
    pub batch_tokens: u64,
    /// Sequences that one rank computes at a time.
    pub micro_batch: usize,
    /// Which attention the model has in this stage.
    pub attention: Attention,
    /// The heads' routing; taken from the model or the defaults when left out, and dropped where
    /// `attention` is dense, so that one override makes the dense run to compare with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moh: Option<MohOptions>,
    /// The schedule.
    pub learning_rate: LearningRate,
    /// AdamW.
    #[serde(default)]
    pub optimizer: Optimizer,
    /// How the model is split over processes.
    #[serde(default)]
    pub parallel: Parallel,
}

/// Which attention a stage trains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Attention {
    /// All heads for every token.
    Dense,
    /// Mixture-of-Head.
    Moh,
}

/// `moh = { .. }` of a stage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MohOptions {
    /// How heads are scored: `"query-norm"`.
    #[serde(with = "router_name")]
    pub router: RouterKind,
    /// Heads that serve every token, of all layers or a list with those of each. When left out: the
    /// model's, where it is a Mixture-of-Head already and `routed_top_k` is left out too, else half of
    /// the heads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared_heads: Option<HeadCounts>,
    /// Other heads that each token chooses, of all layers or a list with those of each. When left out:
    /// the model's as above, else as many as make 75% of a layer's heads active, none where more are
    /// shared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub routed_top_k: Option<HeadCounts>,
    /// Weight of the balance loss beside the cross-entropy; 0.01 when left out.
    pub balance_loss_weight: f64,
}

impl Default for MohOptions {
    fn default() -> Self {
        MohOptions {
            router: RouterKind::QueryNorm,
            shared_heads: None,
            routed_top_k: None,
            balance_loss_weight: 0.01,
        }
    }
}

/// The learning rate of a stage; see [`crate::schedule`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LearningRate {
    /// The rate after the warm-up.
    pub max: f64,
    /// The rate of the last step.
    pub min: f64,
    /// Steps over which the rate rises.
    pub warmup_steps: u64,
    /// The way from `max` to `min`; cosine when left out.
    #[serde(default)]
    pub decay: Decay,
}

/// The way from the largest to the smallest learning rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// Half a cosine.
    #[default]
    Cosine,
}

/// AdamW with decoupled weight decay; each key has a default.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Optimizer {
    /// Decay of the first moment; 0.9 when left out.
    pub beta1: f64,
    /// Decay of the second moment; 0.95 when left out.
    pub beta2: f64,
    /// Added to the root of the second moment; 1e-8 when left out.
    pub eps: f64,
    /// Decay of matrices, in units of the learning rate; 0.1 when left out.
    pub weight_decay: f64,
    /// Largest global gradient norm, above 0; 1.0 when left out. A huge value clips nothing.
    pub clip_norm: f64,
}

impl Default for Optimizer {
    fn default() -> Self {
        Optimizer { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, clip_norm: 1.0 }
    }
}

/// How many processes share one copy of the model; 1 of each when left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Parallel {
    /// Processes that each block is split over.
    pub tensor: usize,
    /// Processes that the blocks are divided among.
    pub pipeline: usize,
    /// Parts of the model that each of these has, dealt out in turns (interleaved one forward, one
    /// backward, arXiv 2104.04473).
    pub virtual_stages: usize,
}

impl Default for Parallel {
    fn default() -> Self {
        Parallel { tensor: 1, pipeline: 1, virtual_stages: 1 }
    }
}

impl Parallel {
    /// Ranks that share the data where `ranks` are divided like this; `None` where they are no multiple of
    /// tensor x pipeline.
    pub fn data_ranks(&self, ranks: usize) -> Option<usize> {
        let model = self.tensor.checked_mul(self.pipeline).filter(|&model| model > 0)?;
        (ranks > 0 && ranks.is_multiple_of(model)).then_some(ranks / model)
    }
}

impl Stage {
    /// Optimiser steps: the tokens over those of a batch, rounded up.
    pub fn num_steps(&self) -> u64 {
        self.tokens.div_ceil(self.batch_tokens.max(1))
    }

    /// Sequences of one optimiser step.
    pub fn batch_sequences(&self, sequence_length: usize) -> u64 {
        self.batch_tokens / (sequence_length as u64).max(1)
    }

    /// The learning rates of the stage's steps.
    pub fn schedule(&self) -> crate::Schedule {
        crate::Schedule::new(self.learning_rate, self.num_steps())
    }

    /// Routing of a stage on `model`, defaults filled in; `None` where attention is dense.
    pub fn moh_config(&self, model: &ModelConfig) -> Option<MohConfig> {
        if self.attention == Attention::Dense {
            return None;
        }
        let options = self.moh.clone().unwrap_or_default();
        let heads = model.num_attention_heads;
        let (shared_heads, routed_top_k) = match (options.shared_heads, options.routed_top_k) {
            (None, None) if model.moh.is_some() => {
                let moh = model.moh.clone()?;
                (moh.shared_heads, moh.routed_top_k)
            }
            (shared, top_k) => {
                let shared = shared.unwrap_or(HeadCounts::All(heads / 2));
                let active = (DEFAULT_ACTIVE_SHARE * heads as f64).round() as usize;
                let rest = || shared.map(|shared| active.saturating_sub(shared));
                let top_k = top_k.unwrap_or_else(rest);
                (shared, top_k)
            }
        };
        Some(MohConfig { router: options.router, shared_heads, routed_top_k })
    }
}

/// The router by its name in `config.json`.
mod router_name {
    use moh_model::RouterKind;
    use serde::{Deserialize, Deserializer, Serializer, de::Error as _};

    pub fn serialize<S: Serializer>(router: &RouterKind, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(router.name())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<RouterKind, D::Error> {
        let name = String::deserialize(from)?;
        RouterKind::from_name(&name).ok_or_else(|| {
            D::Error::custom(format!("must be {:?}, not {name:?}", RouterKind::QueryNorm.name()))
        })
    }
}
