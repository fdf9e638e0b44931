//! What a recipe will take, worked out from the model's shape before anything is loaded: steps,
//! memory, floating-point operations, time and disk.
//!
//! **Memory of one process** that holds the whole model (tensor, pipeline and data parallelism make
//! it smaller; they are not counted), in bytes, for P parameters and e bytes of `run.dtype`:
//!
//! - weights P e; with bf16 an f32 master copy 4 P; gradients P times the bytes of
//!   `precision.gradients`; both moments 2 P times those of `precision.moments`.
//! - activations per token and block, with c the hidden width, q the width of the query heads, kv
//!   that of the key/value heads, i of the MLP, h heads of which r are routed. Kept:
//!   block input c e, queries, keys and values (q + 2 kv) e, attention output q e, log-sum-exp 4 h,
//!   residual after attention c e, gate and up 2 i e, and with Mixture-of-Head the routed heads'
//!   norms and gates 8 r, their standard deviation 4 and the selection h. Recomputable: both norms
//!   2 c e, both inverse root mean squares 8. `recompute = "none"` keeps all of it for every block,
//!   `"cheap"` one shared copy of the recomputable part, `"block"` the input of every block and one
//!   shared copy of the rest. The blocks always share max(i, q + 2 kv) e, the activated MLP and the gradient
//!   of queries, keys and values; the gradient of gate and up lies in their own place.
//! - gradients of one block's other activations, per token: (c + max(c, q)) e + 4 h.
//! - one chunk of the logits in f32, as long as the CPU's operator asks for.
//!
//! Token ids, workspaces of libraries and the system's own needs come on top.
//!
//! **Floating-point operations** follow [`moh_model::flops`]: a multiply-add counts as two, only the
//! causal half of attention counts, training is forward and backward, and what `memory.recompute`
//! computes again does not count.
//!
//! **Disk**: a checkpoint holds the parameters in f32 and both moments; the export holds the
//! parameters in `run.dtype`.

use std::fmt;

use moh_kernels::cross_entropy::HeadShape;
use moh_kernels::{Backend, Cpu};
use moh_model::{ModelConfig, MohConfig};

use crate::recipe::{DType, Parallel, Recipe, Recompute, Stage};

/// What a recipe will take.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Rows of the embedding before and after the vocabulary grows.
    pub vocabulary: (usize, usize),
    /// Parameters before and after the vocabulary grows.
    pub parameters: (u64, u64),
    /// Memory of the training state, the same in every stage.
    pub state: StateBytes,
    /// The stages, in order.
    pub stages: Vec<StagePlan>,
    /// Bytes on disk.
    pub disk: DiskBytes,
    /// Achieved TFLOP/s of one device, where the time was asked for.
    pub device_tflops: Option<f64>,
    /// `run.dtype`.
    pub dtype: DType,
    /// `precision.gradients` and `precision.moments`.
    pub state_dtypes: (DType, DType),
    /// `memory.recompute`.
    pub recompute: Recompute,
}

/// Memory of weights and optimiser, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateBytes {
    /// Weights in the compute dtype.
    pub weights: u64,
    /// The f32 copy that the optimiser updates; none where the weights are f32.
    pub master: u64,
    /// Gradients.
    pub gradients: u64,
    /// Both moments.
    pub moments: u64,
}

impl StateBytes {
    /// All of it.
    pub fn total(&self) -> u64 {
        let StateBytes { weights, master, gradients, moments } = *self;
        sum([weights, master, gradients, moments])
    }
}

/// Memory that depends on the micro-batch, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ActivationBytes {
    /// What forward leaves for backward.
    pub kept: u64,
    /// Gradients of one block's activations.
    pub block_gradients: u64,
    /// One chunk of logits.
    pub logits: u64,
}

impl ActivationBytes {
    /// All of it.
    pub fn total(&self) -> u64 {
        sum([self.kept, self.block_gradients, self.logits])
    }
}

/// Bytes on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskBytes {
    /// One checkpoint.
    pub checkpoint: u64,
    /// Checkpoints that are there at the end: the newest and those kept for good.
    pub num_checkpoints: u64,
    /// The exported model.
    pub export: u64,
}

/// One stage of a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct StagePlan {
    /// The stage's name.
    pub name: String,
    /// Routing; `None` where attention is dense.
    pub moh: Option<MohConfig>,
    /// Query heads.
    pub num_heads: usize,
    /// Optimiser steps.
    pub steps: u64,
    /// Tokens of a step.
    pub batch_tokens: u64,
    /// Tokens trained on: whole batches.
    pub tokens: u64,
    /// Sequences trained on.
    pub samples: u64,
    /// Micro-batches that make a step, over all processes.
    pub micro_batches: u64,
    /// The split that the recipe asks for.
    pub parallel: Parallel,
    /// Memory that depends on the micro-batch.
    pub activations: ActivationBytes,
    /// Forward FLOPs per token of this stage.
    pub forward_flops: f64,
    /// Training FLOPs per token of this stage.
    pub training_flops: f64,
    /// Training FLOPs per token if all heads were active.
    pub dense_training_flops: f64,
}

impl StagePlan {
    /// Training FLOPs of the stage.
    pub fn total_flops(&self) -> f64 {
        self.training_flops * self.tokens as f64
    }
}

impl Plan {
    /// The plan of `recipe` on `model`, whose vocabulary is that before it grows. Where the recipe
    /// does not give `model.vocab_size`, the vocabulary is the model's, padded: a larger tokenizer
    /// is not looked at.
    pub fn new(recipe: &Recipe, model: &ModelConfig) -> Plan {
        let expected = recipe.model.vocab_size;
        let padded = || recipe.model.padded_vocabulary(model.vocab_size);
        let grown = ModelConfig { vocab_size: expected.unwrap_or_else(padded), ..model.clone() };
        let parameters = grown.num_parameters();
        let dtype = recipe.run.dtype;
        let of = |bytes: usize| parameters.saturating_mul(bytes as u64);
        let moments = of(2 * recipe.precision.moments.bytes());
        let state = StateBytes {
            weights: of(dtype.bytes()),
            master: match dtype {
                DType::F32 => 0,
                DType::Bf16 => of(4),
            },
            gradients: of(recipe.precision.gradients.bytes()),
            moments,
        };
        let stages = recipe.stages.iter().map(|stage| plan_stage(recipe, stage, &grown)).collect();
        let for_good = recipe.num_steps().checked_div(recipe.checkpoint.keep_every).unwrap_or(0);
        Plan {
            vocabulary: (model.vocab_size, grown.vocab_size),
            parameters: (model.num_parameters(), parameters),
            state,
            stages,
            disk: DiskBytes {
                checkpoint: of(4).saturating_add(moments),
                num_checkpoints: for_good.saturating_add(recipe.checkpoint.keep),
                export: of(dtype.bytes()),
            },
            device_tflops: None,
            dtype,
            state_dtypes: (recipe.precision.gradients, recipe.precision.moments),
            recompute: recipe.memory.recompute,
        }
    }

    /// The plan with times, for a device that achieves `tflops` TFLOP/s (not its peak).
    pub fn with_device_tflops(self, tflops: f64) -> Plan {
        Plan { device_tflops: Some(tflops), ..self }
    }

    /// The largest memory of any stage, in bytes.
    pub fn peak_bytes(&self) -> u64 {
        let stages = self.stages.iter().map(|stage| stage.activations.total());
        self.state.total().saturating_add(stages.max().unwrap_or(0))
    }
}

fn plan_stage(recipe: &Recipe, stage: &Stage, model: &ModelConfig) -> StagePlan {
    let length = recipe.data.sequence_length;
    let dense = ModelConfig { moh: None, ..model.clone() };
    let moh = stage.moh_config(model);
    let flops = ModelConfig { moh, ..model.clone() }.flops_per_token(length);
    let steps = stage.num_steps();
    let sequences = stage.batch_sequences(length);
    StagePlan {
        name: stage.name.clone(),
        moh,
        num_heads: model.num_attention_heads,
        steps,
        batch_tokens: stage.batch_tokens,
        tokens: steps.saturating_mul(stage.batch_tokens),
        samples: steps.saturating_mul(sequences),
        micro_batches: sequences / (stage.micro_batch as u64).max(1),
        parallel: stage.parallel,
        activations: activation_bytes(recipe, stage, model, moh),
        forward_flops: flops.forward(),
        training_flops: flops.training(),
        dense_training_flops: dense.flops_per_token(length).training(),
    }
}

/// The formulas of the module's documentation.
fn activation_bytes(
    recipe: &Recipe,
    stage: &Stage,
    model: &ModelConfig,
    moh: Option<MohConfig>,
) -> ActivationBytes {
    let tokens = (recipe.data.sequence_length as u128).saturating_mul(stage.micro_batch as u128);
    let e = recipe.run.dtype.bytes() as u128;
    let c = model.hidden_size as u128;
    let q = model.query_width() as u128;
    let kv = model.key_value_width() as u128;
    let i = model.intermediate_size as u128;
    let h = model.num_attention_heads as u128;
    let blocks = model.num_hidden_layers as u128;

    let input = c * e;
    let routing = moh.map_or(0, |moh| {
        let routed = model.num_attention_heads.saturating_sub(moh.shared_heads) as u128;
        2 * routed * 4 + 4 + h
    });
    let kept = input + (q + 2 * kv) * e + q * e + h * 4 + c * e + 2 * i * e + routing;
    let recomputable = 2 * c * e + 8;
    let wide = i.max(q + 2 * kv) * e;
    let per_token = match recipe.memory.recompute {
        Recompute::None => blocks * (kept + recomputable),
        Recompute::Cheap => blocks * kept + recomputable,
        Recompute::Block => blocks * input + (kept - input) + recomputable,
    } + wide;
    let gradients = (c + c.max(q)) * e + 4 * h;
    let head = HeadShape {
        tokens: usize::try_from(tokens).unwrap_or(usize::MAX),
        width: model.hidden_size,
        vocab_size: model.vocab_size,
    };
    ActivationBytes {
        kept: saturate(tokens.saturating_mul(per_token)),
        block_gradients: saturate(tokens.saturating_mul(gradients)),
        logits: 4 * Cpu.cross_entropy_scratch(&head) as u64,
    }
}

fn saturate(bytes: u128) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

fn sum<const N: usize>(bytes: [u64; N]) -> u64 {
    bytes.into_iter().fold(0, u64::saturating_add)
}

/// Width of a row's label.
const LABEL: usize = 38;
/// Least width of a column.
const COLUMN: usize = 18;

/// Writes a table: a label, then a column for each stage.
struct Table<'a, 'f> {
    f: &'a mut fmt::Formatter<'f>,
    stages: &'a [StagePlan],
}

impl Table<'_, '_> {
    fn title(&mut self, title: &str) -> fmt::Result {
        writeln!(self.f, "\n{title}")
    }

    /// A row of one value.
    fn one(&mut self, label: &str, value: &str) -> fmt::Result {
        writeln!(self.f, "  {label:<LABEL$}{value:>COLUMN$}")
    }

    /// A row of one value a stage.
    fn each(&mut self, label: &str, value: impl Fn(&StagePlan) -> String) -> fmt::Result {
        write!(self.f, "  {label:<LABEL$}")?;
        for stage in self.stages {
            let width = COLUMN.max(stage.name.len() + 2);
            write!(self.f, "{:>width$}", value(stage))?;
        }
        writeln!(self.f)
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "Model")?;
        let mut table = Table { f, stages: &self.stages };
        table.one("parameters", &grouped(self.parameters.0))?;
        if self.vocabulary.0 != self.vocabulary.1 {
            let (before, after) = self.vocabulary;
            let growth = format!("{} -> {}", grouped(before as u64), grouped(after as u64));
            table.one("vocabulary", &growth)?;
            table.one("parameters after its growth", &grouped(self.parameters.1))?;
        } else {
            table.one("vocabulary", &grouped(self.vocabulary.0 as u64))?;
        }

        table.title("Stages")?;
        table.each("", |stage| stage.name.clone())?;
        table.each("attention", |stage| match stage.moh {
            Some(moh) => format!("{} of {} heads", moh.active_heads(), stage.num_heads),
            None => "dense".to_string(),
        })?;
        table.each("steps", |stage| grouped(stage.steps))?;
        table.each("tokens per step", |stage| grouped(stage.batch_tokens))?;
        table.each("tokens", |stage| grouped(stage.tokens))?;
        table.each("sequences", |stage| grouped(stage.samples))?;
        table.each("micro-batches per step", |stage| grouped(stage.micro_batches))?;
        table.each("tensor x pipeline parallel", |stage| {
            format!("{} x {}", stage.parallel.tensor, stage.parallel.pipeline)
        })?;

        table.title(
            "Operations (a multiply-add is 2; causal half of attention; training is forward and \
             backward)",
        )?;
        table.each("forward, per token", |s| flops(s.forward_flops))?;
        table.each("training, per token", |s| flops(s.training_flops))?;
        table.each("training, per token, if dense", |s| flops(s.dense_training_flops))?;
        table.each("training, whole stage", |s| flops(s.total_flops()))?;
        if let Some(tflops) = self.device_tflops {
            let rate = tflops * 1e12;
            table.title(&format!("Time on one device that achieves {tflops} TFLOP/s"))?;
            table.each("tokens/s", |stage| grouped((rate / stage.training_flops) as u64))?;
            table.each("time", |stage| duration(stage.total_flops() / rate))?;
            let all: f64 = self.stages.iter().map(StagePlan::total_flops).sum();
            table.one("all stages", &duration(all / rate))?;
        }

        table.title("Memory of one process that holds the whole model")?;
        let (gradients, moments) = self.state_dtypes;
        for (label, dtype, value) in [
            ("weights", self.dtype, self.state.weights),
            ("master copy", DType::F32, self.state.master),
            ("gradients", gradients, self.state.gradients),
            ("moments", moments, self.state.moments),
        ] {
            if value > 0 {
                let label = format!("{label}, {}", dtype.name());
                table.each(&label, |_| bytes(value))?;
            }
        }
        let recompute = match self.recompute {
            Recompute::None => "none",
            Recompute::Cheap => "cheap",
            Recompute::Block => "block",
        };
        table.each(&format!("activations, recompute {recompute}"), |stage| {
            bytes(stage.activations.kept)
        })?;
        table.each("gradients of one block's activations", |stage| {
            bytes(stage.activations.block_gradients)
        })?;
        table.each("logits, one chunk", |stage| bytes(stage.activations.logits))?;
        table.each("sum", |stage| {
            bytes(self.state.total().saturating_add(stage.activations.total()))
        })?;

        table.title("Disk")?;
        let DiskBytes { checkpoint, num_checkpoints, export } = self.disk;
        table.one("one checkpoint", &bytes(checkpoint))?;
        let kept = format!("checkpoints kept, at most {}", grouped(num_checkpoints));
        table.one(&kept, &bytes(checkpoint.saturating_mul(num_checkpoints)))?;
        table.one("exported model", &bytes(export))
    }
}

/// 1234567 as `1,234,567`.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A value in the largest of `units` (each `base` times the one before) that it reaches.
fn scaled(mut value: f64, base: f64, units: &[&str]) -> String {
    let mut index = 0;
    while value >= base && index + 1 < units.len() {
        value /= base;
        index += 1;
    }
    let unit = units.get(index).copied().unwrap_or_default();
    match index {
        0 => format!("{value:.0} {unit}"),
        _ => format!("{value:.2} {unit}"),
    }
}

fn bytes(count: u64) -> String {
    scaled(count as f64, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"])
}

fn flops(count: f64) -> String {
    let units = ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP", "YFLOP"];
    scaled(count, 1000.0, &units)
}

fn duration(seconds: f64) -> String {
    let (minute, hour, day) = (60.0, 3600.0, 86_400.0);
    match seconds {
        s if s >= 2.0 * day => format!("{:.1} days", s / day),
        s if s >= 2.0 * hour => format!("{:.1} hours", s / hour),
        s if s >= 2.0 * minute => format!("{:.1} minutes", s / minute),
        s => format!("{s:.1} seconds"),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::recipe::tests::small;

    fn plan(overrides: &[&str]) -> Plan {
        let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
        let path = Path::new("small.toml");
        let recipe = Recipe::parse(small(), path, &overrides).unwrap();
        let model = recipe.local_model_config(path).unwrap().unwrap();
        Plan::new(&recipe, &model)
    }

    #[test]
    fn state_bytes_follow_the_dtypes() {
        let f32 = plan(&[]);
        let parameters = f32.parameters.1;
        assert_eq!(f32.parameters.0, parameters);
        assert_eq!(f32.state.weights, 4 * parameters);
        assert_eq!(f32.state.master, 0);
        assert_eq!(f32.state.total(), 16 * parameters);
        assert_eq!(f32.disk.checkpoint, 12 * parameters);
        let bf16 = plan(&["run.dtype=bf16", "precision.gradients=bf16", "precision.moments=bf16"]);
        assert_eq!(bf16.state.weights, 2 * parameters);
        assert_eq!(bf16.state.total(), (2 + 4 + 2 + 4) * parameters);
        assert_eq!(bf16.disk.checkpoint, 8 * parameters);
        assert_eq!(bf16.disk.export, 2 * parameters);
    }

    #[test]
    fn activation_bytes_follow_the_formulas() {
        // c = 64, q = 64, kv = 32, i = 172, h = 8, r = 4, 5 blocks, f32; 2 sequences of 32 tokens.
        let dense_kept = 4 * (64 + (64 + 64) + 64 + 64 + 344) + 8 * 4;
        let moh_kept = dense_kept + 2 * 4 * 4 + 4 + 8;
        let (recomputable, wide) = (4 * 2 * 64 + 8, 4 * 172);
        let kept = |plan: Plan| {
            let stages = plan.stages.into_iter();
            stages.map(|s| s.activations.kept).collect::<Vec<_>>()
        };
        assert_eq!(
            kept(plan(&["memory.recompute=none"])),
            [dense_kept, moh_kept].map(|kept| 64 * (5 * (kept + recomputable) + wide))
        );
        assert_eq!(
            kept(plan(&["memory.recompute=cheap"])),
            [dense_kept, moh_kept].map(|kept| 64 * (5 * kept + recomputable + wide))
        );
        assert_eq!(
            kept(plan(&["memory.recompute=block"])),
            [dense_kept, moh_kept].map(|kept| 64 * (4 * 256 + kept + recomputable + wide))
        );
        let activations = plan(&[]).stages[0].activations;
        assert_eq!(activations.block_gradients, 64 * (4 * 2 * 64 + 4 * 8));
        assert_eq!(activations.logits, 64 * 512 * 4);
    }

    #[test]
    fn padding_grows_the_vocabulary() {
        let plan = plan(&["model.pad_vocab_to=1000"]);
        assert_eq!(plan.vocabulary, (512, 1000));
        assert_eq!(plan.parameters.1 - plan.parameters.0, 2 * 488 * 64);
    }

    #[test]
    fn huge_numbers_saturate_and_print() {
        let plan = plan(&[
            "model.vocab_size=9e15",
            "stage.adapt.micro_batch=2147483648",
            "stage.adapt.batch_tokens=137438953472",
            "stage.adapt.tokens=9e15",
        ])
        .with_device_tflops(1e-9);
        assert!(plan.to_string().contains("years") || plan.to_string().contains("days"));
    }

    #[test]
    fn numbers_print_in_readable_units() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(1_234_567), "1,234,567");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(3 << 29), "1.50 GiB");
        assert_eq!(flops(5.334e10), "53.34 GFLOP");
        assert_eq!(duration(90.0), "90.0 seconds");
        assert_eq!(duration(86_400.0 * 3.5), "3.5 days");
    }
}
