//! The limits of a recipe's values, and the dependencies between its keys.

mod calibration;
mod stage;

use std::collections::BTreeSet;
use std::fmt::Display;
use std::path::Path;

use moh_data::{Order, Source};
use moh_kernels::ElementType;
use moh_model::{ModelConfig, MohConfig};

use super::{CheckpointOptions, DeviceKind, GuardOptions, KeyFault, Recipe, validation_key};
use crate::{ModelOptions, NewModel, ParallelOptions, Stage, ValidationSet, is_below};

/// Token counts up to this are exact as floats, and sums over all stages fit 64 bits.
const MAX_TOKENS: u64 = 1 << 53;
const MAX_STAGES: usize = 1000;
/// Longest interval between checkpoints, in minutes: a year.
const MAX_MINUTES: f64 = 525_600.0;
/// Maximum sequence length; its square fits 64 bits.
const MAX_SEQUENCE_LENGTH: usize = 1 << 31;
const MAX_VOCABULARY: usize = 1 << 24;
/// Maximum length of the name of a stage or a validation set.
const MAX_NAME: usize = 64;
/// Maximum threads of a rank: twice the hardware threads of the largest machines.
const MAX_THREADS: u64 = 4096;
/// TOML's integers are signed.
const MAX_SEED: u64 = i64::MAX as u64;
/// The reason to reject shared heads that are given by number and by id.
const BOTH_SHARED: &str = "is there beside shared_heads: leave one of them out";

/// Collects the faults of a recipe.
#[derive(Default)]
struct Faults<'a> {
    list: Vec<KeyFault>,
    /// Keys that could not be read. Their values are not checked.
    stand_ins: Option<&'a BTreeSet<String>>,
}

impl Faults<'_> {
    /// Adds a fault unless `fine`.
    fn check(&mut self, fine: bool, key: &str, value: impl Display, reason: impl Display) {
        if !fine {
            self.push(key, Some(value.to_string()), reason);
        }
    }

    fn add(&mut self, key: &str, reason: impl Display) {
        self.push(key, None, reason);
    }

    fn push(&mut self, key: &str, value: Option<String>, reason: impl Display) {
        if self.is_known(key) {
            let reason = reason.to_string();
            self.list.push(KeyFault { origin: String::new(), key: key.to_string(), value, reason });
        }
    }

    /// Returns whether the value of `key` was read. A check of two keys calls this for the other key.
    fn is_known(&self, key: &str) -> bool {
        let mut stand_ins = self.stand_ins.into_iter().flatten();
        !stand_ins.any(|stand_in| is_below(key, stand_in))
    }

    /// Returns whether a table was read in full.
    fn is_complete(&self, table: &str) -> bool {
        let mut stand_ins = self.stand_ins.into_iter().flatten();
        self.is_known(table) && !stand_ins.any(|stand_in| is_below(stand_in, table))
    }

    fn at_least_one(&mut self, key: &str, value: u64) {
        self.check(value > 0, key, value, "must be at least 1");
    }

    /// Adds a fault unless a number is finite and above 0; returns whether it is.
    fn positive(&mut self, key: &str, value: f64) -> bool {
        let fine = value.is_finite() && value > 0.0;
        self.check(fine, key, value, "must be a finite number above 0");
        fine
    }

    /// Adds a fault unless a number is finite and at least 0.
    fn not_negative(&mut self, key: &str, value: f64) {
        let fine = value.is_finite() && value >= 0.0;
        self.check(fine, key, value, "must be a finite number from 0");
    }

    /// Adds a fault unless a count is from 1 to `most`.
    fn within(&mut self, key: &str, value: u64, most: u64) {
        self.check((1..=most).contains(&value), key, value, format!("must be from 1 to {most}"));
    }

    fn path(&mut self, key: &str, path: &Path) {
        let text = path.to_str();
        if text.is_none_or(|text| text.is_empty() || text.contains('\0')) {
            self.add(key, "must be a path in UTF-8, and not empty");
        }
    }
}

/// Returns every fault that depends neither on the model nor on the values of `stand_ins`.
pub(super) fn faults(recipe: &Recipe, stand_ins: &BTreeSet<String>) -> Vec<KeyFault> {
    let mut faults = Faults { stand_ins: Some(stand_ins), ..Faults::default() };
    faults.path("run.dir", &recipe.run.dir);
    let seed = recipe.run.seed;
    let reason = format!("must be at most {MAX_SEED}");
    faults.check(seed <= MAX_SEED, "run.seed", seed, reason);
    if let Some(threads) = recipe.run.threads {
        faults.within("run.threads", threads as u64, MAX_THREADS);
    }
    check_precision(&mut faults, recipe);
    let data = &recipe.data;
    check_length(&mut faults, "data.sequence_length", data.sequence_length);
    check_sources(&mut faults, "data.sources", &data.sources, data.order, "data.order");
    check_validation(&mut faults, &data.validation);
    check_stages(&mut faults, recipe);
    check_checkpoint(&mut faults, &recipe.checkpoint);
    check_guard(&mut faults, &recipe.guard);
    faults.at_least_one("log.every_steps", recipe.log.every_steps);
    if let Some(peak) = recipe.log.peak_tflops {
        faults.positive("log.peak_tflops", peak);
    }
    if let Some(config) = check_model(&mut faults, &recipe.model) {
        // The shape is part of the recipe.
        check_fit(&mut faults, recipe, &config);
    }
    faults.list
}

/// Checks the gradients' type: on a GPU, matmuls accumulate into the type of their inputs or a wider type.
fn check_precision(faults: &mut Faults, recipe: &Recipe) {
    let narrow =
        recipe.run.dtype == ElementType::F32 && recipe.precision.gradients == ElementType::BF16;
    let fine = recipe.run.device != DeviceKind::Cuda || !narrow;
    let reason = "must be f32 with run.device = \"cuda\" and run.dtype = \"f32\"";
    if faults.is_known("run.device") && faults.is_known("run.dtype") {
        faults.check(fine, "precision.gradients", "bf16", reason);
    }
}

/// Checks `[model]`; returns the shape of a new model if it is valid.
fn check_model(faults: &mut Faults, model: &ModelOptions) -> Option<ModelConfig> {
    check_source(faults, model);
    for (key, path) in [("model.config", &model.config), ("model.tokenizer", &model.tokenizer)] {
        if let Some(path) = path {
            faults.path(key, path);
        }
    }
    if model.revision.as_ref().is_some_and(|name| name.is_empty()) {
        faults.add("model.revision", "must not be empty: leave it out");
    }
    check_vocabulary(faults, model);
    check_new(faults, model.new.as_ref()?)
}

/// Checks that a model is either `from` somewhere or new.
fn check_source(faults: &mut Faults, model: &ModelOptions) {
    let source_is_known = faults.is_known("model.from") && faults.is_known("model.new");
    match (&model.from, &model.new) {
        _ if !source_is_known => {}
        (None, None) => faults
            .add("model", "needs from = a directory or a hub repository, or a table [model.new]"),
        (Some(_), Some(_)) => faults.add(
            "model",
            "has both from and [model.new]: a fresh model has no weights to start from",
        ),
        (Some(from), None) => faults.path("model.from", Path::new(from)),
        (None, Some(_)) => {
            for (key, given) in [
                ("model.revision", model.revision.is_some()),
                ("model.config", model.config.is_some()),
                ("model.moments", model.moments),
            ] {
                if given {
                    faults.add(key, "belongs to from, but [model.new] is given");
                }
            }
        }
    }
}

fn check_vocabulary(faults: &mut Faults, model: &ModelOptions) {
    if let Some(multiple) = model.pad_vocab_to {
        faults.at_least_one("model.pad_vocab_to", multiple as u64);
        let is_possible = multiple <= MAX_VOCABULARY;
        let reason = format!("must be at most {MAX_VOCABULARY}");
        faults.check(is_possible, "model.pad_vocab_to", multiple, reason);
    }
    if let Some(size) = model.vocab_size {
        let padded = model.padded_vocabulary(size);
        faults.at_least_one("model.vocab_size", size as u64);
        let reason = format!(
            "must be a multiple of pad_vocab_to = {}, such as {padded}",
            model.pad_vocab_to.unwrap_or(1)
        );
        if faults.is_known("model.pad_vocab_to") {
            faults.check(padded == size, "model.vocab_size", size, reason);
        }
    }
}

/// Checks `[model.new]`; returns the shape if it is valid.
fn check_new(faults: &mut Faults, new: &NewModel) -> Option<ModelConfig> {
    // JSON cannot represent these values: they would silently become defaults.
    let mut finite = true;
    for (key, value) in [
        ("model.new.rms_norm_eps", new.rms_norm_eps),
        ("model.new.rope_theta", new.rope_theta),
        ("model.new.initializer_range", new.initializer_range),
    ] {
        finite &= value.is_finite();
        faults.check(value.is_finite(), key, value, "must be a finite number");
    }
    if let Some(moh) = &new.moh {
        let one = moh.shared_heads.is_none() || moh.shared_head_ids.is_none();
        faults.check(one, "model.new.moh.shared_head_ids", "[..]", BOTH_SHARED);
    }
    // Without a maximum the model supports the sequence length.
    if !finite || !faults.is_complete("model.new") || !faults.is_known("data.sequence_length") {
        return None;
    }
    // The configuration's own messages begin with their path.
    match new.config(Path::new("model.new")) {
        Ok(config) => Some(config),
        Err(error) => {
            let text = error.to_string();
            let reason = text.strip_prefix("model.new: ").unwrap_or(&text);
            faults.add("model.new", reason);
            None
        }
    }
}

fn check_length(faults: &mut Faults, key: &str, length: usize) {
    let fine = (2..=MAX_SEQUENCE_LENGTH).contains(&length);
    faults.check(fine, key, length, format!("must be from 2 to {MAX_SEQUENCE_LENGTH} tokens"));
}

/// Checks the sources of a mixture, at `key`, with their order at `order_key`.
fn check_sources(
    faults: &mut Faults,
    key: &str,
    sources: &[Source],
    order: Order,
    order_key: &str,
) {
    if sources.is_empty() {
        faults.add(key, "must name at least one token file");
    }
    for (index, source) in sources.iter().enumerate() {
        faults.path(&format!("{key}.{index}.path"), &source.path);
        let key = format!("{key}.{index}.weight");
        let weight = source.weight;
        let fine = faults.positive(&key, weight);
        if fine && order == Order::Sequential && faults.is_known(order_key) {
            let reason = "must be 1 with order = \"sequential\", which reads each file once";
            faults.check(weight == 1.0, &key, weight, reason);
        }
    }
    let weights: f64 = sources.iter().map(|source| source.weight).sum();
    if weights == f64::INFINITY && sources.iter().all(|source| source.weight.is_finite()) {
        faults.add(key, "weights must have a finite sum");
    }
}

/// Checks a stage's own data.
fn check_stage_data(faults: &mut Faults, recipe: &Recipe, stage: &Stage) {
    let Some(own) = &stage.data else { return };
    let key = |rest: &str| stage_key(stage, &format!("data.{rest}"));
    if let Some(length) = own.sequence_length {
        check_length(faults, &key("sequence_length"), length);
    }
    let data = recipe.stage_data(stage);
    if let Some(sources) = &own.sources {
        check_sources(faults, &key("sources"), sources, data.order, &stage.data_key("order"));
    } else if own.order == Some(Order::Sequential)
        && recipe.data.order != Order::Sequential
        && faults.is_complete("data.sources")
        && data.sources.iter().any(|source| source.weight != 1.0)
    {
        let reason = "reads each file once, but data.sources have weights other than 1: give the stage its own";
        faults.check(false, &key("order"), "\"sequential\"", reason);
    }
}

fn check_validation(faults: &mut Faults, sets: &[ValidationSet]) {
    let mut names = BTreeSet::new();
    for set in sets {
        let key = |rest: &str| format!("{}.{rest}", validation_key(sets, set));
        faults.path(&key("path"), &set.path);
        faults.at_least_one(&key("batches"), set.batches as u64);
        check_name(faults, &key("name"), &set.name, names.insert(&set.name), "set");
    }
}

/// Checks the name of a `what`; `new` is whether no earlier `what` has this name.
fn check_name(faults: &mut Faults, key: &str, name: &str, new: bool, what: &str) {
    if let Err(reason) = fine_name(name) {
        faults.check(false, key, format!("{name:?}"), reason);
    }
    faults.check(new, key, format!("{name:?}"), format!("is the name of an earlier {what}"));
}

/// Rejects names that cannot be a part of a key or a file's name.
pub fn fine_name(name: &str) -> Result<(), String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    let begins_well = name.starts_with(|c: char| c.is_ascii_alphanumeric());
    match begins_well && name.len() <= MAX_NAME && name.chars().all(allowed) {
        true => Ok(()),
        false => Err(format!(
            "must be 1 to {MAX_NAME} letters, digits, - and _, the first a letter or digit"
        )),
    }
}

fn check_checkpoint(faults: &mut Faults, checkpoint: &CheckpointOptions) {
    let CheckpointOptions { every_steps, every_minutes, keep, keep_every } = *checkpoint;
    faults.at_least_one("checkpoint.keep", keep);
    faults.check(
        (0.0..=MAX_MINUTES).contains(&every_minutes),
        "checkpoint.every_minutes",
        every_minutes,
        format!("must be from 0 to {MAX_MINUTES}, a year; 0 for no checkpoints by time"),
    );
    if every_steps > 0 && faults.is_known("checkpoint.every_steps") {
        faults.check(
            keep_every.is_multiple_of(every_steps),
            "checkpoint.keep_every",
            keep_every,
            format!("must be a multiple of checkpoint.every_steps = {every_steps}, or 0"),
        );
    }
}

fn check_guard(faults: &mut Faults, guard: &GuardOptions) {
    let GuardOptions { factor, patience } = *guard;
    let fine = factor == 0.0 || (factor > 1.0 && factor.is_finite());
    faults.check(fine, "guard.factor", factor, "must be a finite number above 1, or 0");
    faults.at_least_one("guard.patience", patience);
}

fn check_stages(faults: &mut Faults, recipe: &Recipe) {
    let count = recipe.stages.len();
    if count == 0 || count > MAX_STAGES {
        faults.add(
            "stage",
            format!("must have from 1 to {MAX_STAGES} tables [[stage]], not {count}"),
        );
    }
    let mut names = BTreeSet::new();
    for (index, stage) in recipe.stages.iter().enumerate() {
        if !faults.is_known(&format!("stage.{index}.name")) {
            continue;
        }
        let name = stage.name.as_str();
        check_name(faults, &format!("stage.{index}.name"), name, names.insert(name), "stage");
        stage::check(faults, recipe, stage);
        check_stage_data(faults, recipe, stage);
        if faults.is_known(&stage.data_key("sequence_length")) {
            stage::check_batch(faults, stage, recipe.stage_data(stage).sequence_length);
        }
    }
}

/// Returns the full key of a stage's key.
pub(super) fn stage_key(stage: &Stage, key: &str) -> String {
    let name = if stage.name.is_empty() { "?" } else { &stage.name };
    format!("stage.{name}.{key}")
}

/// Returns every key that does not fit `model`, given before its vocabulary is padded.
pub(super) fn model_faults(recipe: &Recipe, model: &ModelConfig) -> Vec<KeyFault> {
    let mut faults = Faults::default();
    check_fit(&mut faults, recipe, model);
    faults.list
}

fn check_context(faults: &mut Faults, key: &str, length: usize, model: &ModelConfig) {
    let longest = model.max_position_embeddings;
    let reason = format!("the model supports {longest} tokens (max_position_embeddings)");
    faults.check(length <= longest, key, length, reason);
}

/// Checks that a stage with the routing `moh` keeps the router's matrices of the model `before` it.
fn check_matrices(
    faults: &mut Faults,
    stage: &Stage,
    before: &ModelConfig,
    moh: Option<&MohConfig>,
) {
    let key = |rest: &str| stage_key(stage, rest);
    let kept = before.moh.as_ref().map_or("", |moh| moh.router.name());
    let Ok(added) = before.added_tensors(moh) else {
        let reason = format!(
            "the model of the stage before has the router \"{kept}\", whose matrices training does not remove: give \
             the stage this router, with routed heads in the same layers"
        );
        return faults.add(&key("moh"), reason);
    };
    let router = moh.map(|moh| moh.router).filter(|_| !added.is_empty());
    let Some(router) = router.filter(|router| router.needs_fit()) else { return };
    if stage.calibration().is_none() {
        let advice = match before.moh {
            None => "add calibration = {} to the stage's moh",
            Some(_) => "choose another one, as only a dense model is measured",
        };
        let reason = format!("begins with matrices that are fitted to a text: {advice}");
        faults.check(false, &key("moh.router"), format!("\"{}\"", router.name()), reason);
    }
}

fn check_fit(faults: &mut Faults, recipe: &Recipe, model: &ModelConfig) {
    check_context(faults, "data.sequence_length", recipe.data.sequence_length, model);
    if let Some(size) = recipe.model.vocab_size {
        faults.check(
            size >= model.vocab_size,
            "model.vocab_size",
            size,
            format!("the model already has {}", model.vocab_size),
        );
    }
    // The model before a stage, while it is known.
    let mut before = Some(model.clone());
    for (index, stage) in recipe.stages.iter().enumerate() {
        if !faults.is_known(&format!("stage.{index}.name")) {
            continue;
        }
        let key = |rest: &str| stage_key(stage, rest);
        if let Some(length) = stage.data.as_ref().and_then(|own| own.sequence_length) {
            check_context(faults, &stage.data_key("sequence_length"), length, model);
        }
        let routing_is_known =
            faults.is_complete(&key("moh")) && faults.is_known(&key("attention"));
        if routing_is_known {
            match stage.moh_config(model) {
                Ok(moh) => {
                    if let Some(before) = &mut before {
                        check_matrices(faults, stage, before, moh.as_ref());
                        before.moh = moh;
                    }
                }
                Err(error) => {
                    faults.add(&key("moh"), error);
                    before = None;
                }
            }
            calibration::check_model(faults, recipe, index, model);
            calibration::check_kept_heads(faults, recipe, index, model);
        }
        let ParallelOptions { tensor, pipeline, virtual_stages } = stage.parallel;
        let groups = model.num_key_value_heads;
        faults.check(
            tensor == 0 || groups.is_multiple_of(tensor),
            &key("parallel.tensor"),
            tensor,
            format!("must divide the {groups} key/value heads"),
        );
        let layers = model.num_hidden_layers;
        faults.check(
            pipeline <= layers,
            &key("parallel.pipeline"),
            pipeline,
            format!("must be at most the {layers} blocks"),
        );
        let most = layers / pipeline.max(1);
        let bounded = pipeline <= layers && faults.is_known(&key("parallel.pipeline"));
        faults.check(
            virtual_stages <= most || !bounded,
            &key("parallel.virtual_stages"),
            virtual_stages,
            format!(
                "must be at most {most}: the {layers} blocks make no more parts for pipeline = \
                 {pipeline}"
            ),
        );
    }
}
