//! The step that `moh-bench step` measures: a step of a recipe's stage, or of a bare configuration.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use moh_checkpoint::run_directory::local_model_config;
use moh_hf::ConfigFile;
use moh_kernels::ElementType;
use moh_model::{ModelConfig, Recompute};
use moh_plan::{Plan, step_config};
use moh_program::arguments::at_least;
use moh_program::exit::Usage;
use moh_program::options;
use moh_recipe::{MohOptions, PrecisionOptions, Recipe};
use moh_step::{Hyperparameters, StepConfig};

use crate::device::DeviceArguments;
use crate::heads::HeadArguments;

/// Maximum tokens of a micro-batch. A larger number is probably a typing error.
const MAX_TOKENS: usize = 1 << 28;
/// The learning rate of a bare configuration's steps.
const LEARNING_RATE: f64 = 1e-4;

#[derive(clap::Args)]
pub struct StepArguments {
    /// A recipe, for the model's shape, the batch and the element types
    #[arg(long, value_name = "FILE", required_unless_present = "config")]
    recipe: Option<PathBuf>,
    /// The stage of the recipe; the first if omitted
    #[arg(long, value_name = "NAME", conflicts_with = "config")]
    stage: Option<String>,
    /// Override a key of the recipe, stages by name: stage.moh.micro_batch=4
    #[arg(long = "set", value_name = "KEY=VALUE", conflicts_with = "config")]
    overrides: Vec<String>,
    /// A config.json or its directory, instead of a recipe
    #[arg(long, value_name = "FILE", conflicts_with = "recipe")]
    config: Option<PathBuf>,
    /// Sequences per step, with --config
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "recipe")]
    #[arg(value_parser = at_least::<usize>(0))]
    batch: usize,
    /// Tokens per sequence, with --config
    #[arg(long, value_name = "TOKENS", default_value_t = 512, conflicts_with = "recipe")]
    #[arg(value_parser = at_least::<usize>(0))]
    length: usize,
    /// Type of weights and activations; the recipe's or f32 if omitted
    #[arg(long, value_parser = options::element_types())]
    dtype: Option<ElementType>,
    #[command(flatten)]
    heads: HeadArguments,
    #[command(flatten)]
    pub device: DeviceArguments,
    /// Steps to measure; as many as five seconds allow, at least three, if omitted
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub steps: Option<u32>,
    /// Warm-up steps, which are not measured
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = at_least::<u32>(0))]
    pub warmup: u32,
    /// Take one more step, and show a GPU's time in it by kernel; needs NVIDIA's CUPTI library
    #[arg(long)]
    pub kernels: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

pub struct StepJob {
    pub config: ModelConfig,
    pub step: StepConfig,
    pub dtype: ElementType,
    pub precision: PrecisionOptions,
    pub learning_rate: f64,
}

impl StepJob {
    pub fn new(arguments: &StepArguments) -> anyhow::Result<Self> {
        let mut job = match (&arguments.recipe, &arguments.config) {
            (Some(path), _) => of_recipe(path, arguments)?,
            (None, Some(path)) => of_config(path, arguments)?,
            (None, None) => return Err(Usage("--recipe or --config is required".into()).into()),
        };
        if let Some(dtype) = arguments.dtype {
            job.dtype = dtype;
        }
        let rounding = arguments.heads.apply(&mut job.config)?;
        let StepConfig { micro_batch, sequence_length, .. } = job.step;
        match micro_batch.checked_mul(sequence_length) {
            Some(1..=MAX_TOKENS) => {
                if let Some(rounding) = rounding {
                    moh_program::exit::stderr_line(format_args!("{rounding}"));
                }
                Ok(job)
            }
            _ => Err(Usage(format!(
                "{micro_batch} sequences of {sequence_length} tokens: must be 1 to \
                 {MAX_TOKENS} tokens in all"
            ))
            .into()),
        }
    }
}

fn of_recipe(path: &Path, arguments: &StepArguments) -> anyhow::Result<StepJob> {
    let mut recipe = Recipe::load(path, &arguments.overrides)?;
    let mut config = local_model_config(&recipe, path)?.with_context(|| {
        format!(
            "{}: model.config: the step needs the model's shape, but model.from is not on this \
             machine: name its config.json",
            path.display()
        )
    })?;
    recipe.resolve(path, &config)?;
    let stage = match &arguments.stage {
        None => recipe.stages.first(),
        Some(name) => recipe.stages.iter().find(|stage| stage.name == *name),
    };
    let stage = stage.ok_or_else(|| {
        let names: Vec<_> = recipe.stages.iter().map(|stage| stage.name.as_str()).collect();
        let asked = arguments.stage.as_deref().unwrap_or_default();
        Usage(format!("--stage {asked}: the recipe has {}", names.join(", ")))
    })?;
    let moh = stage.moh_config(&config)?;
    config.vocab_size = Plan::new(&recipe, &config)?.vocabulary.1;
    config.moh = moh;
    Ok(StepJob {
        config,
        step: step_config(&recipe, stage),
        dtype: recipe.run.dtype,
        precision: recipe.precision,
        learning_rate: stage.learning_rate.max,
    })
}

fn of_config(path: &Path, arguments: &StepArguments) -> anyhow::Result<StepJob> {
    Ok(StepJob {
        config: ConfigFile::read(path)?.config,
        step: StepConfig {
            stage: "bench".into(),
            sequence_length: arguments.length,
            micro_batch: arguments.batch,
            micro_batches: 1,
            document_mask: false,
            recompute: Recompute::Norms,
            auxiliary_weights: MohOptions::default().auxiliary_weights(),
            distillation: None,
            optimizer: Hyperparameters::default(),
            gradients: PrecisionOptions::default().gradients,
            reduce: ElementType::F32,
        },
        dtype: ElementType::F32,
        precision: PrecisionOptions::default(),
        learning_rate: LEARNING_RATE,
    })
}
