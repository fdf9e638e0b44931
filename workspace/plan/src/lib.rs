//! The cost of a recipe, computed from the model's shape before anything is loaded: steps, memory, floating-point
//! operations ([`moh_model::flops`]), time and disk. On many ranks, also traffic and suggested layouts. The formulas
//! and their sources are in `docs/plan.md`.

mod calibration;
mod cluster;
mod communication;
mod error;
mod hardware;
mod layouts;
mod memory;
mod rate;
mod table;
mod time;
mod training_data;
mod work;

use std::path::Path;

use calibration::CalibrationCost;
use cluster::Cluster;
pub use error::Error;
pub use hardware::Hardware;
pub use layouts::Suggestions;
pub use memory::RankMemory;
use moh_data::Source;
use moh_kernels::ElementType;
use moh_model::{HeadCounts, ModelConfig, MohConfig, Recompute};
use moh_recipe::{ParallelOptions, Recipe, Stage};
pub use rate::{Basis, Rate};
pub use training_data::{SourceEpochs, open_training};
use work::Work;
pub use work::{Layout, step_config};

/// The cost of a recipe.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Rows of the embedding before and after the vocabulary grows.
    pub vocabulary: (usize, usize),
    /// Parameters before and after the vocabulary grows.
    pub parameters: (u64, u64),
    /// The stages, in order.
    pub stages: Vec<StagePlan>,
    /// The token files, if [`Plan::with_sources`] found all of them.
    pub sources: Option<Vec<SourceEpochs>>,
    /// Bytes on disk.
    pub disk: DiskBytes,
    /// TFLOP/s of one device, if times were requested.
    pub device_tflops: Option<Rate>,
    /// The stages on many ranks, if requested.
    pub cluster: Option<Cluster>,
    /// `run.dtype`.
    pub dtype: ElementType,
    /// `precision.gradients` and `precision.moments`.
    pub state_dtypes: (ElementType, ElementType),
    /// `memory.recompute`.
    pub recompute: Recompute,
}

/// Bytes on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskBytes {
    /// One checkpoint.
    pub checkpoint: u64,
    /// Checkpoints at the end of the run: the newest, and checkpoints that are never removed.
    pub num_checkpoints: u64,
    /// The exported model.
    pub export: u64,
}

/// One stage of a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct StagePlan {
    /// The stage's name.
    pub name: String,
    /// Routing; `None` for dense attention.
    pub moh: Option<MohConfig>,
    /// Active query heads of each layer.
    pub active_heads: HeadCounts,
    /// Query heads.
    pub num_heads: usize,
    /// The stage's teacher, as the recipe names it.
    pub teacher: Option<String>,
    /// Optimiser steps.
    pub steps: u64,
    /// Tokens per step.
    pub batch_tokens: u64,
    /// Tokens of the stage, in whole batches.
    pub tokens: u64,
    /// Tokens of a sequence.
    pub sequence_length: usize,
    /// Sequences of the stage.
    pub samples: u64,
    /// Micro-batches of a step, over all processes.
    pub micro_batches: u64,
    /// The recipe's parallelism.
    pub parallel: ParallelOptions,
    /// Memory of one process with the whole model.
    pub memory: RankMemory,
    /// Forward FLOPs per token.
    pub forward_flops: f64,
    /// Training FLOPs per token, including a teacher's forward pass.
    pub training_flops: f64,
    /// Training FLOPs per token if all heads were active.
    pub dense_training_flops: f64,
    /// The cost of the stage's calibration, if it has one.
    pub calibration: Option<CalibrationCost>,
}

impl StagePlan {
    /// Returns the training FLOPs of the stage.
    pub fn total_flops(&self) -> f64 {
        self.training_flops * self.tokens as f64
    }
}

impl Plan {
    /// Returns the plan of `recipe` on `model`, given before its vocabulary grows. Without
    /// `model.vocab_size`, the vocabulary is the model's, padded: the tokenizer is not read.
    ///
    /// # Errors
    /// Fails if the heads cannot be routed.
    pub fn new(recipe: &Recipe, model: &ModelConfig) -> Result<Plan, Error> {
        let grown = grow_vocabulary(recipe, model);
        let stages = recipe.stages.iter().map(|stage| plan_stage(recipe, stage, &grown));
        Ok(Plan {
            vocabulary: (model.vocab_size, grown.vocab_size),
            parameters: (model.num_parameters(), grown.num_parameters()),
            stages: stages.collect::<Result<_, _>>()?,
            sources: None,
            disk: DiskBytes::new(recipe, &with_all_matrices(recipe, &grown)),
            device_tflops: None,
            cluster: None,
            dtype: recipe.run.dtype,
            state_dtypes: (recipe.precision.gradients, recipe.precision.moments),
            recompute: recipe.memory.recompute,
        })
    }

    /// Adds the number of times that `recipe` reads each token file, if all token files are on this machine.
    ///
    /// # Errors
    /// Fails if a token file is invalid or shorter than one sequence.
    pub fn with_sources(self, recipe: &Recipe) -> Result<Plan, Error> {
        let exists = |source: &Source| {
            [".bin", ".idx"].iter().all(|ending| {
                let mut path = source.path.clone().into_os_string();
                path.push(ending);
                Path::new(&path).is_file()
            })
        };
        let mut sources = recipe.stages.iter().flat_map(|stage| recipe.stage_data(stage).sources);
        if !sources.all(exists) {
            return Ok(Plan { sources: None, ..self });
        }
        let training = open_training(recipe, self.vocabulary.1)?;
        Ok(Plan { sources: Some(SourceEpochs::of_run(recipe, &training)), ..self })
    }

    /// Adds times to the plan, for a device that achieves `tflops` TFLOP/s (not its peak), assumed or measured on
    /// matrix products.
    pub fn with_device_tflops(self, tflops: Rate) -> Plan {
        Plan { device_tflops: Some(tflops), ..self }
    }
}

impl DiskBytes {
    /// Returns the disk space of `recipe` on a model with its grown vocabulary, and with the matrices of routers that
    /// stages add ([`with_all_matrices`]).
    pub fn new(recipe: &Recipe, model: &ModelConfig) -> DiskBytes {
        let of = |bytes: usize| model.num_parameters().saturating_mul(bytes as u64);
        let for_good = recipe.num_steps().checked_div(recipe.checkpoint.keep_every).unwrap_or(0);
        DiskBytes {
            checkpoint: of(4).saturating_add(of(2 * recipe.precision.moments.bytes())),
            num_checkpoints: for_good.saturating_add(recipe.checkpoint.keep),
            export: of(recipe.run.dtype.bytes()),
        }
    }
}

/// Returns the model with the routing of the stage in which it has most parameters: stages add a router's matrices, and
/// do not remove them.
pub fn with_all_matrices(recipe: &Recipe, model: &ModelConfig) -> ModelConfig {
    let of_stage = |stage: &Stage| {
        let moh = stage.moh_config(model).ok()??;
        Some(ModelConfig { moh: Some(moh), ..model.clone() })
    };
    let stages = recipe.stages.iter().filter_map(of_stage);
    let all = stages.chain([model.clone()]);
    all.max_by_key(ModelConfig::num_parameters).unwrap_or_else(|| model.clone())
}

fn grow_vocabulary(recipe: &Recipe, model: &ModelConfig) -> ModelConfig {
    let padded = || recipe.model.padded_vocabulary(model.vocab_size);
    ModelConfig { vocab_size: recipe.model.vocab_size.unwrap_or_else(padded), ..model.clone() }
}

fn plan_stage(recipe: &Recipe, stage: &Stage, model: &ModelConfig) -> Result<StagePlan, Error> {
    let length = recipe.stage_data(stage).sequence_length;
    let dense = ModelConfig { moh: None, ..model.clone() };
    let work = Work::alone(recipe, stage, model)?;
    let flops = work.model.flops_per_token(length);
    let teacher = work.teacher.as_ref();
    let teacher = teacher.map_or(0.0, |teacher| teacher.flops_per_token(length).forward());
    let steps = stage.num_steps();
    Ok(StagePlan {
        name: stage.name.clone(),
        moh: work.model.moh.clone(),
        active_heads: work.model.active_heads(),
        num_heads: model.num_attention_heads,
        teacher: stage.distill.as_ref().map(|distill| distill.teacher.clone()),
        steps,
        batch_tokens: stage.batch_tokens,
        tokens: steps.saturating_mul(stage.batch_tokens),
        sequence_length: length,
        samples: recipe.num_samples(stage),
        micro_batches: work.micro_batches(),
        parallel: stage.parallel,
        memory: RankMemory::fullest(&work)?,
        forward_flops: flops.forward(),
        training_flops: flops.training() + teacher,
        dense_training_flops: dense.flops_per_token(length).training() + teacher,
        calibration: CalibrationCost::new(&work)?,
    })
}

#[cfg(test)]
mod tests;
