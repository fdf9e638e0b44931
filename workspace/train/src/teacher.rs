//! The teachers of a run's stages: the run's own model as it was loaded, a model directory, or a checkpoint of another
//! run. A teacher has the model's shape, and the model's vocabulary or its first rows. With fewer rows, the
//! distributions are compared over the teacher's rows alone.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use moh_checkpoint::run_directory::{CheckpointName, RunCheckpoint};
use moh_data::TokenizerFile;
use moh_hf::{ConfigFile, StoredModel};
use moh_kernels::Backend;
use moh_model::tensors::has_vocabulary_rows;
use moh_model::{Distillation, Model, ModelConfig, PassShape, Segment, Teacher};
use moh_recipe::{DistillOptions, Recipe, START, Stage};
use moh_step::TensorKind;

use crate::source::{StoredWeights, differs, is_own_run, with_tokenizer};
use crate::{ModelSource, Result};

/// The teachers of a recipe's stages, in order.
pub(crate) struct Teachers(Vec<Option<TeacherSource>>);

/// A teacher before its weights are on a device.
pub(crate) struct TeacherSource {
    /// Its configuration, with the vocabulary of the run's model.
    pub config: ModelConfig,
    /// The number of vocabulary rows in its weights.
    stored_rows: usize,
    /// The number of first rows that are the same tokens in the run's model.
    rows: usize,
    /// `None` for the run's initial model.
    weights: Option<StoredWeights>,
    /// Differs between teachers.
    identity: String,
}

/// The files of a teacher that is not the run's own model.
struct Stored {
    file: ConfigFile,
    weights: StoredWeights,
    /// The directory of its tokenizer, if it has one.
    tokenizer: Option<PathBuf>,
}

impl Teachers {
    /// Opens the teachers of `recipe`, a run that starts from `source`; messages name the recipe `path`.
    ///
    /// # Errors
    /// Fails if a teacher's files are missing or invalid, or if it has another shape, vocabulary or tokenizer.
    pub fn open(recipe: &Recipe, path: &Path, source: &ModelSource) -> Result<Self> {
        let of_stage = |stage: &Stage| {
            let options = stage.distill.as_ref();
            options
                .map(|options| TeacherSource::open(recipe, path, source, stage, options))
                .transpose()
        };
        Ok(Teachers(recipe.stages.iter().map(of_stage).collect::<Result<_, _>>()?))
    }

    /// Returns the teacher of the stage with this index.
    pub fn of_stage(&self, index: usize) -> Option<&TeacherSource> {
        self.0.get(index)?.as_ref()
    }

    /// Returns the identity of each teacher of `recipe`, by its key.
    pub fn identities(&self, recipe: &Recipe) -> BTreeMap<String, String> {
        let stages = recipe.stages.iter().zip(&self.0);
        let identity = |(stage, teacher): (&Stage, &Option<TeacherSource>)| {
            Some((stage.teacher_key(), teacher.as_ref()?.identity.clone()))
        };
        stages.filter_map(identity).collect()
    }
}

impl TeacherSource {
    fn open(
        recipe: &Recipe,
        path: &Path,
        source: &ModelSource,
        stage: &Stage,
        options: &DistillOptions,
    ) -> Result<Self> {
        let model = &source.config;
        if options.is_start() {
            return Ok(TeacherSource {
                config: model.clone(),
                stored_rows: model.vocab_size,
                rows: source.kept_rows,
                weights: None,
                // The record has the model's own identity.
                identity: START.to_owned(),
            });
        }
        let (name, key) = (options.teacher.as_str(), stage.teacher_key());
        let refuse = |reason: String| Err(differs(path, &key, format!("{name} {reason}")));
        let stored = Stored::open(recipe, path, &key, name)?;
        let own = &stored.file.config;
        if shape_of(own) != shape_of(model) {
            return refuse(
                "has another shape than the run's model: name a model of the same architecture, with as many \
                 layers and heads of the same widths"
                    .to_owned(),
            );
        }
        let length = recipe.stage_data(stage).sequence_length;
        if own.max_position_embeddings < length {
            let longest = own.max_position_embeddings;
            return refuse(format!(
                "supports {longest} tokens (max_position_embeddings), but the stage's sequences have {length}"
            ));
        }
        let load = |path: Option<&Path>| path.map(TokenizerFile::load).transpose();
        let theirs = load(stored.tokenizer.as_deref())?;
        let original = source.original_config().vocab_size;
        let (rows, ours) = match own.vocab_size {
            size if size == model.vocab_size => {
                (size, load(source.tokenizer_directory.as_deref())?)
            }
            size if size == original => {
                (source.kept_rows.min(size), load(source.first_tokenizer.as_deref())?)
            }
            size => {
                let larger = load(source.tokenizer_directory.as_deref())?.zip(theirs.as_ref());
                let larger = larger.filter(|(ours, theirs)| ours.has_tokens_of(theirs));
                match larger.filter(|_| size < model.vocab_size) {
                    // The teacher has the tokenizer from before the model adopted a larger vocabulary.
                    Some((ours, theirs)) => (ours.kept_rows(theirs, size), None),
                    None => {
                        return refuse(format!(
                            "has a vocabulary of {size} rows, but the run's model has {}: name a teacher with the \
                             same vocabulary, or one whose tokens have the same ids in the model's tokenizer",
                            model.vocab_size
                        ));
                    }
                }
            }
        };
        if let (Some(theirs), Some(ours)) = (&theirs, &ours)
            && let Some(difference) = theirs.first_difference(ours)
        {
            return refuse(format!(
                "has another tokenizer than {}: {difference}: name a teacher with the same tokenizer",
                ours.path().display()
            ));
        }
        let mut hasher = blake3::Hasher::new();
        hasher.update(stored.weights.identity().as_bytes());
        hasher.update(serde_json::Value::Object(stored.file.fields.clone()).to_string().as_bytes());
        Ok(TeacherSource {
            config: ModelConfig { vocab_size: model.vocab_size, ..own.clone() },
            stored_rows: own.vocab_size,
            rows,
            weights: Some(stored.weights),
            identity: hasher.finalize().to_hex().to_string(),
        })
    }

    /// Loads the teacher of `student`, of a run that starts from `source`, for its passes of shape `pass`.
    pub fn load<B: Backend + Clone>(
        &self,
        source: &ModelSource,
        student: &Model<B>,
        pass: PassShape,
        distillation: Distillation,
    ) -> Result<Teacher<B>> {
        let parallel = student.parallel().of_frozen(&self.config)?;
        let (backend, config) = (student.backend().clone(), self.config.clone());
        let fill = |segment: &Segment, values: &mut [f32]| self.fill(source, segment, values);
        let (element, positions) = (student.element(), student.positions());
        let model = Model::of_part(backend, element, config, positions, parallel, 1, fill)?;
        Ok(Teacher::new(model, pass, self.rows, distillation.temperature)?)
    }

    /// Fills one tensor; rows that the teacher does not have are zeros.
    fn fill(&self, source: &ModelSource, segment: &Segment, values: &mut [f32]) -> Result<()> {
        let stored = match has_vocabulary_rows(&segment.name) {
            true => self.stored_rows * self.config.hidden_size,
            false => values.len(),
        };
        let (stored, missing) = values.split_at_mut(stored);
        missing.fill(0.0);
        match &self.weights {
            None => source.fill(segment, stored),
            Some(weights) => weights.read(TensorKind::Weight, &segment.name, stored),
        }
    }
}

impl Stored {
    /// Opens the teacher that `key` of the recipe at `path` names.
    fn open(recipe: &Recipe, path: &Path, key: &str, name: &str) -> Result<Self> {
        let refuse = |reason: &str| Err(differs(path, key, format!("{name} {reason}")));
        let Some(CheckpointName { run, step }) = CheckpointName::parse(name) else {
            if !Path::new(name).is_dir() {
                return refuse(
                    "is no directory and no run: name a model directory, a checkpoint as RUN@STEP, or \"start\"",
                );
            }
            let StoredModel { file, weights, .. } = StoredModel::open(Path::new(name))?;
            let tokenizer = with_tokenizer(Path::new(name));
            let weights = StoredWeights::Files(weights);
            return Ok(Stored { file, weights, tokenizer });
        };
        if is_own_run(&run, recipe) {
            return refuse(
                "is the run directory of this recipe: \"start\" is the run's initial model",
            );
        }
        let Some(step) = step else {
            return refuse("is a run: name one of its checkpoints, as RUN@STEP");
        };
        let (stored, file) = run.stored_model(step)?;
        let tokenizer = run.tokenizer();
        let dtype = RunCheckpoint { run, step }.export_type()?;
        let weights = StoredWeights::Exported(Box::new(stored), dtype);
        Ok(Stored { file, weights, tokenizer })
    }
}

/// Returns the shape that a teacher shares with the model, from which its memory and operations are planned.
fn shape_of(config: &ModelConfig) -> impl PartialEq + use<> {
    let heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim);
    let widths = (config.hidden_size, config.intermediate_size);
    (config.architecture, heads, widths, config.num_hidden_layers, config.tie_word_embeddings)
}
