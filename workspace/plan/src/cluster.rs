//! The cost of a recipe's stages on many ranks: memory of the rank that needs most, traffic and,
//! with a hardware profile, time.

use std::path::Path;

use moh_model::ModelConfig;
use moh_recipe::{Recipe, Stage};

use super::communication::Traffic;
use super::time::StepTime;
use super::work::Work;
use super::{Plan, grow_vocabulary};
use crate::{Error, Hardware, Layout, RankMemory};

/// The stages of a plan on a number of ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Cluster {
    /// Number of ranks.
    pub ranks: usize,
    /// The hardware profile, if times were requested.
    pub hardware: Option<Hardware>,
    /// The stages, in order.
    pub stages: Vec<ClusterStage>,
    /// Seconds to hash and write a checkpoint, if the rates are known.
    pub checkpoint_seconds: Option<f64>,
}

/// One stage on its ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct ClusterStage {
    pub layout: Layout,
    /// Maximum micro-batches of a step on any data rank.
    pub micro_batches: u64,
    /// Data ranks without a micro-batch.
    pub idle_data_ranks: u64,
    /// Memory of the rank that needs most.
    pub memory: RankMemory,
    /// Traffic of a step on the rank that sends most.
    pub traffic: Traffic,
    /// The time of a step, if the hardware is known.
    pub speed: Option<PredictedSpeed>,
}

/// The predicted speed of a stage.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PredictedSpeed {
    /// Seconds of a step, by activity.
    pub step: StepTime,
    /// Tokens per second over all ranks.
    pub tokens_per_second: f64,
    /// The model's FLOPs (the plan's, without recomputation) as a fraction of the FLOPs that the matmuls of all ranks
    /// could compute in that time.
    pub matmul_share: f64,
    /// Seconds of the whole stage, including the waits for its checkpoints if their time is known.
    pub stage: f64,
}

impl ClusterStage {
    pub(super) fn new(
        work: &Work,
        hardware: Option<&Hardware>,
        checkpoint: Option<f64>,
    ) -> Result<Self, Error> {
        let sent = (0..work.layout.pipeline).map(|rank| Traffic::new(work, rank));
        let more = |most: Traffic, next: Traffic| {
            if next.bytes() > most.bytes() { next } else { most }
        };
        Ok(ClusterStage {
            layout: work.layout,
            micro_batches: work.own_micro_batches(),
            idle_data_ranks: (work.layout.data as u64).saturating_sub(work.micro_batches()),
            memory: RankMemory::fullest(work)?,
            traffic: sent.fold(Traffic::default(), more),
            speed: hardware.map(|hardware| PredictedSpeed::new(work, hardware, checkpoint)),
        })
    }
}

impl PredictedSpeed {
    fn new(work: &Work, hardware: &Hardware, checkpoint: Option<f64>) -> PredictedSpeed {
        let step = StepTime::new(work, hardware);
        let tokens_per_second = work.stage.batch_tokens as f64 / step.total();
        let flops = work.model.flops_per_token(work.sequence_length()).training();
        let rate = hardware.matmul(work.recipe.run.dtype) * work.layout.ranks() as f64;
        let steps = work.stage.num_steps();
        let every = work.recipe.checkpoint.every_steps;
        // Checkpoints are written while training continues. The run waits for the last checkpoint. It waits for any
        // other checkpoint as far as the steps until the next checkpoint do not cover it.
        let checkpoint = checkpoint.unwrap_or(0.0);
        let exposed = (checkpoint - every as f64 * step.total()).max(0.0);
        let waits = steps.checked_div(every).unwrap_or(0) as f64 * exposed + checkpoint;
        PredictedSpeed {
            step,
            tokens_per_second,
            matmul_share: flops * tokens_per_second / rate,
            stage: steps as f64 * step.total() + waits,
        }
    }
}

impl Plan {
    /// Returns the plan on `ranks` ranks, with times if a hardware profile is given. Messages name the recipe `path`.
    ///
    /// # Errors
    /// Fails if `ranks` is not a multiple of a stage's tensor x pipeline. Fails if the tensor ranks do not divide the
    /// key/value heads, or if a layout has more chunks than the model has blocks.
    pub fn on_ranks(
        self,
        recipe: &Recipe,
        path: &Path,
        model: &ModelConfig,
        ranks: usize,
        hardware: Option<Hardware>,
    ) -> Result<Plan, Error> {
        let model = grow_vocabulary(recipe, model);
        let bytes = self.disk.checkpoint;
        let checkpoint_seconds =
            hardware.as_ref().and_then(|hardware| hardware.checkpoint_seconds(bytes, ranks));
        let stage = |stage: &Stage| {
            let layout = Layout::new(stage.parallel, ranks)
                .ok_or_else(|| no_multiple(path, stage, ranks))?;
            let work = Work::new(recipe, stage, &model, layout)?;
            ClusterStage::new(&work, hardware.as_ref(), checkpoint_seconds)
        };
        let stages = recipe.stages.iter().map(stage).collect::<Result<_, Error>>()?;
        let cluster = Cluster { ranks, hardware, stages, checkpoint_seconds };
        Ok(Plan { cluster: Some(cluster), ..self })
    }
}

fn no_multiple(path: &Path, stage: &Stage, ranks: usize) -> Error {
    let (tensor, pipeline) = (stage.parallel.tensor, stage.parallel.pipeline);
    let one = tensor.saturating_mul(pipeline).max(1);
    let nearest = (ranks / one).max(1).saturating_mul(one);
    Error::Invalid(format!(
        "{}: stage.{}.parallel: --ranks {ranks} is not a multiple of tensor x pipeline = {tensor} x {pipeline}: \
         use --ranks {nearest}, or --suggest for layouts of {}",
        path.display(),
        stage.name,
        moh_files::units::counted(ranks as u64, "rank")
    ))
}
