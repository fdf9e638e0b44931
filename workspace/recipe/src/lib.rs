//! Recipes: TOML files that describe a training run.
//!
//! [`Recipe::load`] reads a file, applies `--set` overrides, fills in defaults and validates everything that does not
//! depend on the model. [`Recipe::resolve`] does the rest once the model's shape is known. Relative paths are relative
//! to the current directory.

mod calibration;
mod distill;
mod element_type;
mod error;
pub mod lines;
mod model;
mod name;
mod nearest;
mod node;
mod overrides;
mod problem;
pub mod reader;
mod schedule;
pub mod shell;
mod stage;
mod stage_data;
#[cfg(test)]
mod tests;
mod validate;
mod validation_sets;

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

use moh_data::{Order, Source};
use moh_kernels::ElementType;
use moh_model::{ModelConfig, Recompute, RouterKind};
use serde::{Deserialize, Serialize};
use toml::Value;

pub use calibration::CalibrationOptions;
pub use distill::{DistillOptions, START};
pub use error::Error;
pub use model::{ModelOptions, NewModel, NewMohOptions, RopeScaling, TokenIds, read_shape};
pub use overrides::{Origins, is_below};
pub use problem::Problem;
pub use reader::element_name;
pub use schedule::Schedule;
pub use stage::{AttentionKind, Decay, LearningRateOptions, MohOptions, ParallelOptions, Stage};
pub use stage_data::{StageData, StageDataOptions};
pub use validate::fine_name;
pub use validation_sets::{ValidationSet, key as validation_key};

use lines::Lines;
use reader::known_keys;

const MAX_FILE_BYTES: u64 = 1 << 20;

/// A training run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Directory, seed and device of the run.
    pub run: Run,
    /// The initial model.
    pub model: ModelOptions,
    /// The training and validation data.
    pub data: DataOptions,
    /// The stages, in order.
    #[serde(rename = "stage")]
    pub stages: Vec<Stage>,
    /// Element types of the training state.
    #[serde(default)]
    pub precision: PrecisionOptions,
    /// Memory settings.
    #[serde(default)]
    pub memory: MemoryOptions,
    /// The frequency and the retention of checkpoints.
    #[serde(default)]
    pub checkpoint: CheckpointOptions,
    /// Logging.
    #[serde(default)]
    pub log: LogOptions,
    /// Which steps are not applied, and when the run ends.
    #[serde(default)]
    pub guard: GuardOptions,
}

/// `[run]`: the directory, the seed and the device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// The run directory, which contains all output of the run.
    pub dir: PathBuf,
    /// Seed of the data order and of initial weights.
    pub seed: u64,
    /// The device.
    pub device: DeviceKind,
    /// Element type of weights and activations.
    #[serde(with = "element_type")]
    pub dtype: ElementType,
    /// Whether a GPU's results are bitwise reproducible, which is slower. A CPU's results always are.
    #[serde(default)]
    pub deterministic: bool,
    /// Threads of each rank; default: `RAYON_NUM_THREADS`, or else one thread for each core that the rank may use.
    pub threads: Option<usize>,
}

/// The device of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// The CPU's cores.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}

/// `[data]`: the token files and their order, of every stage without its own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataOptions {
    /// Tokens of one sequence, of training and of validation.
    pub sequence_length: usize,
    /// Order of the sequences; default: shuffled.
    #[serde(default)]
    pub order: Order,
    /// Whether attention is limited to the token's own document.
    #[serde(default)]
    pub document_mask: bool,
    /// The token files and their weights in the mixture.
    pub sources: Vec<Source>,
    /// Held-out texts for validation losses, the most important first; default: no text.
    #[serde(default, with = "validation_sets", skip_serializing_if = "Vec::is_empty")]
    pub validation: Vec<ValidationSet>,
}

/// `[precision]`: element types of the training state; default: f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PrecisionOptions {
    /// Gradients.
    #[serde(with = "element_type")]
    pub gradients: ElementType,
    /// Both moments of AdamW.
    #[serde(with = "element_type")]
    pub moments: ElementType,
    /// Gradients in the reduce-scatter between data ranks.
    #[serde(with = "element_type")]
    pub reduce: ElementType,
}

impl Default for PrecisionOptions {
    fn default() -> Self {
        let f32 = ElementType::F32;
        PrecisionOptions { gradients: f32, moments: f32, reduce: f32 }
    }
}

/// `[memory]`: which activations are saved for the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MemoryOptions {
    /// The activations that the backward pass recomputes; default: the norms.
    pub recompute: Recompute,
}

/// `[checkpoint]`: the frequency and the retention of checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointOptions {
    /// Steps, over all stages, between checkpoints; default: 100. With 0, checkpoints are written at the ends of stages
    /// only, where they are always written.
    pub every_steps: u64,
    /// Minutes after which the next checkpoint follows, by the first rank's clock. With 0, the default, no checkpoint
    /// is due by time.
    pub every_minutes: f64,
    /// Number of the newest checkpoints to keep, at least 1; default: 2.
    pub keep: u64,
    /// Checkpoints at multiples of this step are never removed. With 0, the default, only the newest checkpoints are
    /// kept.
    pub keep_every: u64,
}

impl Default for CheckpointOptions {
    fn default() -> Self {
        CheckpointOptions { every_steps: 100, every_minutes: 0.0, keep: 2, keep_every: 0 }
    }
}

/// `[log]`: logging. `metrics.jsonl` has every step regardless of these settings.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogOptions {
    /// Steps between lines on the terminal and points in TensorBoard; default: 1.
    pub every_steps: u64,
    /// Whether TensorBoard's event files are written; default: true.
    pub tensorboard: bool,
    /// Steps, over all stages, between norms of gradients and weights by block; with 0, the default, no norms are
    /// computed.
    pub norms_every_steps: u64,
    /// Peak rate of a rank's device in TFLOP/s, for the model FLOPs utilization; default: the peak rate of the GPU, if
    /// its name is known.
    pub peak_tflops: Option<f64>,
}

impl Default for LogOptions {
    fn default() -> Self {
        LogOptions { every_steps: 1, tensorboard: true, norms_every_steps: 0, peak_tflops: None }
    }
}

/// `[guard]`: which steps are not applied, and the number of such steps that ends the run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GuardOptions {
    /// A step is not applied if its loss or gradient norm is above this factor times the running median. With 0, the
    /// default, only steps with values that are not finite are not applied.
    pub factor: f64,
    /// Steps in a row that are not applied, after which the run ends with an error; default: 10.
    pub patience: u64,
}

impl Default for GuardOptions {
    fn default() -> Self {
        GuardOptions { factor: 0.0, patience: 10 }
    }
}

/// A fault in a recipe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyFault {
    /// The source of the key: the recipe's path, with the line if it is known, or `--set`.
    pub origin: String,
    /// The full key, stages by name; empty for a fault of the whole file.
    pub key: String,
    /// The value, if it helps to explain the fault.
    pub value: Option<String>,
    /// The problem, the expected value, and the remedy.
    pub reason: String,
}

impl From<Problem> for KeyFault {
    fn from(problem: Problem) -> Self {
        KeyFault { origin: String::new(), key: problem.key, value: None, reason: problem.reason }
    }
}

impl fmt::Display for KeyFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.origin)?;
        if !self.key.is_empty() {
            f.write_str(&self.key)?;
            if let Some(value) = &self.value {
                write!(f, " = {value}")?;
            }
            f.write_str(": ")?;
        }
        f.write_str(&self.reason)
    }
}

impl Recipe {
    /// Reads the recipe at `path` with `key=value` overrides (stages by name, as in
    /// `stage.moh.tokens=1e9`), fills in the defaults that do not depend on the model, and
    /// validates it.
    ///
    /// # Errors
    /// Fails if the file cannot be read or is not TOML. Reports all faults at once: unknown and missing keys, wrong
    /// types, overrides that do not apply, and all faults that [`Recipe::validate`] finds in the rest.
    pub fn load(path: &Path, overrides: &[String]) -> Result<Self, Error> {
        let bytes = moh_files::read_bounded(path, MAX_FILE_BYTES, "a recipe")?;
        Self::parse(&moh_files::utf8(path, bytes)?, path, overrides)
    }

    /// Loads the resolved recipe of a run, as [`Recipe::load`]. It may have a key that only earlier versions had.
    pub fn load_stored(path: &Path, overrides: &[String]) -> Result<Self, Error> {
        let bytes = moh_files::read_bounded(path, MAX_FILE_BYTES, "a recipe")?;
        Self::parse_stored(&moh_files::utf8(path, bytes)?, path, overrides)
    }

    /// Loads a recipe from `text`. Messages name it `path`.
    pub fn parse(text: &str, path: &Path, overrides: &[String]) -> Result<Self, Error> {
        Self::from_text(text, path, overrides, false)
    }

    /// Loads the resolved recipe of a run from `text`, as [`Recipe::parse`].
    pub fn parse_stored(text: &str, path: &Path, overrides: &[String]) -> Result<Self, Error> {
        Self::from_text(text, path, overrides, true)
    }

    fn from_text(
        text: &str,
        path: &Path,
        overrides: &[String],
        is_stored: bool,
    ) -> Result<Self, Error> {
        let mut table =
            reader::parse_table(text).map_err(|reason| Error::at_key(path, "", reason))?;
        if let Some(Value::Table(guard)) = table.get_mut("guard").filter(|_| is_stored) {
            guard.remove("rewind");
        }
        let mut value = Value::Table(table);
        let mut origins = Origins::new(path, Lines::new(text));
        let refused = match overrides {
            [] => Vec::new(),
            overrides => origins.override_with(&mut value, overrides, &known_keys::<Recipe>()),
        };
        let reading = reader::read::<Recipe>(&value);
        let mut faults: Vec<KeyFault> = reading.problems.into_iter().map(KeyFault::from).collect();
        let recipe = reading.value.map(|mut recipe| {
            recipe.fill_in();
            faults.extend(validate::faults(&recipe, &reading.stand_ins));
            recipe
        });
        let mut faults = origins.name(faults);
        faults.extend(refused);
        match recipe {
            Some(recipe) if faults.is_empty() => Ok(recipe),
            _ => Err(Error::Recipe { faults }),
        }
    }

    /// Fills in the defaults that depend on other keys.
    fn fill_in(&mut self) {
        self.model.fill_in(self.longest_sequence());
        let mut router = None;
        for stage in &mut self.stages {
            if stage.attention == AttentionKind::Dense {
                stage.moh = None;
                continue;
            }
            let moh = stage.moh.get_or_insert_default();
            // This router loses least where a dense model is measured.
            let measured = moh.calibration.map(|_| RouterKind::Linear);
            moh.router = moh.router.or(router).or(measured);
            router = moh.router;
        }
    }

    /// Checks everything that does not depend on the model. Messages name the recipe `path` and all faults.
    pub fn validate(&self, path: &Path) -> Result<(), Error> {
        refuse(validate::faults(self, &BTreeSet::new()), path)
    }

    /// Fills in the defaults that depend on the model's shape (before its vocabulary is padded), and checks the recipe
    /// against the model. Messages name the recipe `path`.
    pub fn resolve(&mut self, path: &Path, model: &ModelConfig) -> Result<(), Error> {
        for stage in &mut self.stages {
            // Counts that do not fit are faults below.
            let resolved = stage.moh_config(model).ok().flatten();
            if let (Some(options), Some(resolved)) = (&mut stage.moh, resolved) {
                options.router = Some(resolved.router);
                options.set_shared(&resolved.shared_heads);
                options.routed_top_k = Some(resolved.routed_top_k);
            }
        }
        refuse(validate::model_faults(self, model), path)
    }

    /// Returns the recipe as a TOML table.
    pub fn to_value(&self) -> Result<Value, Error> {
        Value::try_from(self).map_err(|error| unwritable(&error))
    }

    /// Returns the recipe as TOML, with all known defaults filled in. [`Recipe::load`] reads it back unchanged.
    ///
    /// # Errors
    /// Fails if a path is not UTF-8, or if TOML cannot represent a number. A loaded recipe contains neither.
    pub fn to_toml(&self) -> Result<String, Error> {
        // By way of the table, so that the structs have one serializer.
        toml::to_string(&self.to_value()?).map_err(|error| unwritable(&error))
    }

    /// Returns the total steps of all stages.
    pub fn num_steps(&self) -> u64 {
        self.stages.iter().map(Stage::num_steps).sum()
    }

    /// Returns the steps of the run before step `step` of a stage; `None` for an unknown stage or step 0.
    pub fn steps_before(&self, stage: &str, step: u64) -> Option<u64> {
        let index = self.stages.iter().position(|known| known.name == stage)?;
        let before = self.stages[..index].iter().map(Stage::num_steps).fold(0, u64::saturating_add);
        step.checked_sub(1)?.checked_add(before)
    }
}

/// Fails with these faults of the recipe at `path`, if there are any.
fn refuse(faults: Vec<KeyFault>, path: &Path) -> Result<(), Error> {
    match faults.is_empty() {
        true => Ok(()),
        false => Err(Error::Recipe { faults: Origins::new(path, Lines::default()).name(faults) }),
    }
}

fn unwritable(error: &toml::ser::Error) -> Error {
    Error::at_key(Path::new("recipe"), "", format!("cannot be written: {error}"))
}
