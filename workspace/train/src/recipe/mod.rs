//! Recipes: the TOML files that say what is trained, on what and how.
//!
//! [`Recipe::load`] reads a file, applies `--set` overrides, fills in the defaults and checks
//! everything that can be checked without the model; [`Recipe::resolve`] does the rest once the
//! model's shape is known. Relative paths resolve against the current directory.

mod element_type;
mod model;
mod overrides;
pub(crate) mod reader;
mod stage;
#[cfg(test)]
pub(crate) mod tests;
mod validate;

use std::fmt;
use std::path::{Path, PathBuf};

use moh_kernels::ElementType;
use moh_model::ModelConfig;
use serde::{Deserialize, Serialize};
use toml::Value;

pub use model::{Model, NewModel, RopeScaling, TokenIds};
pub(crate) use reader::element_name;
pub use stage::{
    Attention, DEFAULT_ACTIVE_SHARE, Decay, LearningRate, MohOptions, Optimizer, Parallel, Stage,
};

use crate::Error;
use overrides::Overrides;

/// A longer file is not a recipe.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// `pad_vocab_to` of a model that takes on another tokenizer's vocabulary.
pub const DEFAULT_VOCABULARY_MULTIPLE: usize = 128;

/// A training run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Where it runs, and from which seed.
    pub run: Run,
    /// The model it starts from.
    pub model: Model,
    /// The text it reads.
    pub data: Data,
    /// The stages, in order.
    #[serde(rename = "stage")]
    pub stages: Vec<Stage>,
    /// Element types of the training state.
    #[serde(default)]
    pub precision: Precision,
    /// What is kept in memory.
    #[serde(default)]
    pub memory: Memory,
    /// When checkpoints are written and how many are kept.
    #[serde(default)]
    pub checkpoint: Checkpoint,
    /// What is reported.
    #[serde(default)]
    pub log: Log,
}

/// `[run]`: the directory, the seed and the machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// The run directory, which holds all that the run writes.
    pub dir: PathBuf,
    /// Seed of the order of the data and of fresh weights.
    pub seed: u64,
    /// What computes.
    pub device: Device,
    /// Element type of weights and activations.
    #[serde(with = "element_type")]
    pub dtype: ElementType,
    /// Whether a GPU gives the same bits in every run, at some cost; a CPU always does.
    #[serde(default)]
    pub deterministic: bool,
}

/// What computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// The processor's cores.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}

/// `[data]`: what is read, in which order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Data {
    /// Tokens of one training sequence.
    pub sequence_length: usize,
    /// Order of the sequences; shuffled when left out.
    #[serde(default)]
    pub order: Order,
    /// Whether attention stops at the boundaries of documents.
    #[serde(default)]
    pub document_mask: bool,
    /// The token files and their shares of the mixture.
    pub sources: Vec<Source>,
    /// Text held out to measure the loss on; none when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation: Option<ValidationData>,
}

/// Order of the training sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// A keyed permutation of all sequences, mixed by weight.
    #[default]
    Shuffled,
    /// Front to back, documents joined, for comparisons with other trainers.
    Sequential,
}

/// One token file of the mixture.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// The prefix without `.bin` and `.idx`.
    pub path: PathBuf,
    /// Share of the tokens, relative to the other sources; 1 when left out.
    #[serde(default = "one")]
    pub weight: f64,
}

/// `[data.validation]`: text held out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ValidationData {
    /// The prefix without `.bin` and `.idx`.
    pub path: PathBuf,
    /// Micro-batches that one evaluation reads.
    pub batches: usize,
    /// Steps, over all stages, between evaluations. 0, which stands when it is left out, evaluates
    /// only at the ends of stages.
    #[serde(default)]
    pub every_steps: u64,
}

/// `[precision]`: element types of the training state, f32 when left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Precision {
    /// Gradients.
    #[serde(with = "element_type")]
    pub gradients: ElementType,
    /// Both moments of AdamW.
    #[serde(with = "element_type")]
    pub moments: ElementType,
    /// Gradients on their way between processes.
    #[serde(with = "element_type")]
    pub reduce: ElementType,
}

impl Default for Precision {
    fn default() -> Self {
        let f32 = ElementType::F32;
        Precision { gradients: f32, moments: f32, reduce: f32 }
    }
}

/// `[memory]`: what is kept between forward and backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Memory {
    /// What backward computes again; the norms when left out.
    pub recompute: Recompute,
}

/// What backward computes again; `docs/plan.md` has the bytes of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Nothing.
    None,
    /// The norms: a sixth of the activations, for a time that is lost in the noise.
    #[default]
    Cheap,
    /// Whole blocks, from their inputs: one more forward.
    Block,
}

/// `[checkpoint]`: when checkpoints are written and which are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Checkpoint {
    /// Steps, over all stages, between checkpoints; 100 when left out. 0 writes only those at the
    /// ends of stages, which are always written.
    pub every_steps: u64,
    /// How many of the newest are kept, at least 1; 2 when left out.
    pub keep: u64,
    /// Checkpoints whose step is a multiple of it are never removed; 0, the default, removes all
    /// but the newest.
    pub keep_every: u64,
}

impl Default for Checkpoint {
    fn default() -> Self {
        Checkpoint { every_steps: 100, keep: 2, keep_every: 0 }
    }
}

/// `[log]`: what is reported. `metrics.jsonl` has every step whatever stands here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Log {
    /// Steps between lines on the terminal and points in TensorBoard; 1 when left out.
    pub every_steps: u64,
    /// Whether TensorBoard's event files are written; they are when it is left out.
    pub tensorboard: bool,
}

impl Default for Log {
    fn default() -> Self {
        Log { every_steps: 1, tensorboard: true }
    }
}

fn one() -> f64 {
    1.0
}

/// One thing that is wrong with a recipe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Where the key was given: the recipe's path or `--set`.
    pub origin: String,
    /// The full key, stages by name; empty where the fault is not at one key.
    pub key: String,
    /// The value, where saying it helps.
    pub value: Option<String>,
    /// What is wrong, what was expected and what to do.
    pub reason: String,
}

impl fmt::Display for Fault {
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
    /// When the file cannot be read or is not TOML, for unknown keys, and for every fault that
    /// [`Recipe::validate`] finds.
    pub fn load(path: &Path, overrides: &[String]) -> Result<Self, Error> {
        let length = std::fs::metadata(path).map_err(Error::io(path))?.len();
        if length > MAX_FILE_BYTES {
            let reason = format!("{length} bytes: a recipe has at most {MAX_FILE_BYTES}");
            return Err(file_fault(path, reason));
        }
        let bytes = std::fs::read(path).map_err(Error::io(path))?;
        let text = String::from_utf8(bytes)
            .map_err(|error| file_fault(path, format!("not text in UTF-8: {error}")))?;
        Self::parse(&text, path, overrides)
    }

    /// As [`Recipe::load`], from `text`; `path` is what messages call it.
    ///
    /// # Errors
    /// As [`Recipe::load`], but for the file.
    pub fn parse(text: &str, path: &Path, overrides: &[String]) -> Result<Self, Error> {
        let table = reader::parse_table(text).map_err(|reason| file_fault(path, reason))?;
        let mut value = Value::Table(table);
        let overrides = Overrides::apply(&mut value, overrides)?;
        let faults = |problems: Vec<reader::Problem>| {
            let fault = |problem: reader::Problem| Fault {
                origin: String::new(),
                key: problem.key,
                value: None,
                reason: problem.reason,
            };
            let faults = problems.into_iter().map(fault).collect();
            overrides.blame(faults, path)
        };
        let mut recipe: Recipe = reader::read(&value).map_err(faults)?;
        recipe.fill_in();
        match validate::faults(&recipe) {
            faults if faults.is_empty() => Ok(recipe),
            faults => Err(overrides.blame(faults, path)),
        }
    }

    /// Fills in the defaults that depend on other keys.
    fn fill_in(&mut self) {
        self.model.fill_in(self.data.sequence_length);
        for stage in &mut self.stages {
            match stage.attention {
                Attention::Dense => stage.moh = None,
                Attention::Moh => {
                    stage.moh.get_or_insert_default();
                }
            }
        }
    }

    /// Checks all that can be checked without the model; `path` is what messages call the recipe.
    ///
    /// # Errors
    /// Every fault at once.
    pub fn validate(&self, path: &Path) -> Result<(), Error> {
        match validate::faults(self) {
            faults if faults.is_empty() => Ok(()),
            faults => Err(Overrides::default().blame(faults, path)),
        }
    }

    /// Fills in the defaults that depend on the model's shape (before its vocabulary grows), and
    /// checks the recipe against it; `path` is what messages call the recipe.
    ///
    /// # Errors
    /// Every key that does not fit the model.
    pub fn resolve(&mut self, path: &Path, model: &ModelConfig) -> Result<(), Error> {
        for stage in &mut self.stages {
            let resolved = stage.moh_config(model);
            if let (Some(options), Some(resolved)) = (&mut stage.moh, resolved) {
                options.shared_heads = Some(resolved.shared_heads);
                options.routed_top_k = Some(resolved.routed_top_k);
            }
        }
        match validate::model_faults(self, model) {
            faults if faults.is_empty() => Ok(()),
            faults => Err(Overrides::default().blame(faults, path)),
        }
    }

    /// The recipe as a TOML table.
    pub(crate) fn to_value(&self) -> Result<Value, Error> {
        Value::try_from(self).map_err(|error| unwritable(&error))
    }

    /// The recipe as TOML, with all defaults that are known filled in; [`Recipe::load`] reads it
    /// back equal.
    ///
    /// # Errors
    /// When a path is not UTF-8 or a number does not fit TOML, which a recipe that was loaded
    /// cannot hold.
    pub fn to_toml(&self) -> Result<String, Error> {
        toml::to_string(self).map_err(|error| unwritable(&error))
    }

    /// Steps of all stages.
    pub fn num_steps(&self) -> u64 {
        self.stages.iter().map(Stage::num_steps).sum()
    }
}

fn unwritable(error: &toml::ser::Error) -> Error {
    file_fault(Path::new("recipe"), format!("cannot be written: {error}"))
}

/// A fault of the file as a whole.
fn file_fault(path: &Path, reason: String) -> Error {
    Error::Recipe {
        faults: vec![Fault {
            origin: path.display().to_string(),
            key: String::new(),
            value: None,
            reason,
        }],
    }
}
