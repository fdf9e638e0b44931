//! The recipe of a run, and the changes to it that a resumed run may make.
//!
//! A resumed run must equal an uninterrupted run if its device is deterministic, so a directory with checkpoints
//! accepts only its own recipe. Keys that affect no weight, except by the order of sums, may change: `run.dir`,
//! `run.threads`, `log.*`, `checkpoint.*`, `memory.recompute`, `stage.NAME.parallel.*`, the validation sets, and keys
//! that only check or plan the model. `stage.NAME.tokens` may grow, and stages may be appended (`growth.rs`). The paths
//! of token files and of the model may also change: their content is compared with `inputs.json` (`run_inputs/`).
//! `guard.patience` may change, so that a run that it has ended can continue.
//!
//! The run's mark has its recipe. `recipe.toml` is a copy for users, who may edit it: an edited copy is compared
//! with the mark as any other recipe is, and never lost.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::{fmt, fs};

use moh_files::first_free_suffixed;
use moh_recipe::shell::shell_word;
use moh_recipe::{Recipe, Stage, is_below};
use toml::Value;

use super::RunDirectory;
use crate::{Error, Result};
use moh_files::unless_missing;

/// Prefix of the names of `recipe.toml` files that a user has edited.
const EDITED: &str = "recipe-edited";
/// Maximum bytes of a recipe that a run keeps.
const MAX_BYTES: u64 = 4 << 20;
/// Keys, or prefixes of keys that end in a dot, that a resumed run may change.
const MAY_CHANGE: [&str; 8] = [
    "run.dir",
    "run.threads",
    "log.",
    "checkpoint.",
    "memory.recompute",
    "model.config",
    "model.vocab_size",
    "guard.patience",
];

/// The start of a mark. The version of its format ends the line.
const HEAD: &str = "# The mark of a moh-train run directory, with the run's recipe. Format ";
const FORMAT: &str = "1";

/// A key that has another value in another recipe. A value is `None` where the recipe lacks the key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyChange {
    /// The full key, stages by name.
    pub key: String,
    /// The value in the run's recipe.
    pub before: Option<String>,
    /// The new value.
    pub now: Option<String>,
}

impl fmt::Display for KeyChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [before, now] =
            [&self.before, &self.now].map(|value| value.as_deref().unwrap_or("absent"));
        write!(f, "  {}: was {before}, now {now}", self.key)
    }
}

impl RunDirectory {
    /// Returns the recipe with which the run was started or last resumed.
    pub fn stored_recipe(&self) -> Result<Recipe> {
        Ok(match self.marked_recipe()? {
            Some(text) => Recipe::parse_stored(&text, &self.mark_path(), &[])?,
            // Versions without marks kept the recipe only in `recipe.toml`.
            None => Recipe::load_stored(&self.recipe(), &[])?,
        })
    }

    /// Returns the text of the recipe in the mark, or `None` without a mark.
    fn marked_recipe(&self) -> Result<Option<String>> {
        let path = self.mark_path();
        let bytes = moh_files::read_bounded_if_any(&path, MAX_BYTES, "the mark of a run")?;
        let Some(bytes) = bytes else { return Ok(None) };
        let text = moh_files::utf8(&path, bytes)?;
        let marked = text
            .split_once('\n')
            .and_then(|(head, recipe)| Some((head.strip_prefix(HEAD)?, recipe)));
        let reason = match marked {
            Some((FORMAT, recipe)) => return Ok(Some(recipe.to_owned())),
            Some((other, _)) => {
                format!(
                    "format {other}, but this version reads {FORMAT}: use the version that wrote it"
                )
            }
            None => {
                "is not the mark of a run: restore it, or remove it to go by recipe.toml".to_owned()
            }
        };
        Err(moh_files::unusable(&path, reason).into())
    }

    pub(super) fn write_mark(&self, recipe: &str) -> Result<()> {
        let path = self.mark_path();
        let text = format!("{HEAD}{FORMAT}\n{recipe}");
        Ok(moh_files::write(&path, text.as_bytes()).map_err(moh_files::io(&path))?)
    }

    /// Compares the recipe with the stored recipe if the run has completed a checkpoint or finished: the run is
    /// then resumed, and only some keys may change. The keys of inputs may change if the run records the content of
    /// its inputs, which the caller compares. Returns whether a stage has become longer or was appended. `command`
    /// is the command that started the program, for the message.
    pub fn check_recipe(&self, recipe: &Recipe, command: &str) -> Result<bool> {
        if !self.has_completed_work()? {
            return Ok(false);
        }
        let stored = self.stored_recipe()?;
        // Stages that share a file continue in it. So another path must not split a shared file or join two files.
        let (before, mut now) = (stored.file_numbers(), recipe.file_numbers());
        now.truncate(before.len());
        let may_move = self.inputs().is_file() && before == now;
        let longer = longer_stages(&stored, recipe);
        let appended = appended_stages(&stored, recipe);
        let is_appended = |key: &str| {
            (key == STAGES && !appended.is_empty())
                || appended.iter().any(|stage| is_below(key, &format!("stage.{}", stage.name)))
        };
        let forbidden = |change: &KeyChange| {
            !may_change(&change.key)
                && !longer.contains(&change.key)
                && !is_appended(&change.key)
                && (!may_move || !names_input(&change.key))
        };
        let changes: Vec<KeyChange> =
            changes(&stored, recipe)?.into_iter().filter(forbidden).collect();
        match changes.is_empty() {
            true => Ok(!longer.is_empty() || !appended.is_empty()),
            false => Err(self.recipe_changed(&changes, self.another_run(recipe, command)?)),
        }
    }

    /// Returns the error of a recipe that differs from the run's. `another` is the command of another run that starts
    /// from this run's newest checkpoint.
    pub fn recipe_changed(&self, changes: &[KeyChange], another: Option<String>) -> Error {
        let changes: Vec<String> = changes.iter().map(KeyChange::to_string).collect();
        let another = another.map_or("another run.dir".to_owned(), |command| {
            format!("begin another run from this one's newest checkpoint:\n  {command}")
        });
        let reason = format!(
            "the recipe differs from the run's, and resuming would change results:\n{}\n\
             use the recipe that the run was started with, or {another}",
            changes.join("\n")
        );
        moh_files::unusable(&self.recipe(), reason).into()
    }

    /// Returns the command of another run that starts from this run's newest checkpoint, or `None` without checkpoints.
    fn another_run(&self, recipe: &Recipe, command: &str) -> Result<Option<String>> {
        let Some(step) = self.checkpoint_steps()?.pop() else { return Ok(None) };
        let from = format!("{}@{step}", self.root.display());
        // Other keys of the model apply to a model that is not a run.
        let keys = leaves(recipe)?;
        let is_alone = keys.keys().filter(|key| is_below(key, "model")).eq(["model.from"]);
        let model = match is_alone {
            true => format!("model.from={from}"),
            false => format!("model={{ from = {} }}", Value::String(from)),
        };
        let dir = format!("run.dir={}", self.free_sibling().display());
        let sets = [model, dir].map(|set| format!(" --set {}", shell_word(&set)));
        Ok(Some(format!("{command}{}", sets.concat())))
    }

    /// Writes the resolved recipe into the directory, which the caller has locked and claimed. Returns the new path
    /// of a `recipe.toml` that a user has edited.
    pub fn write_recipe(&self, recipe: &Recipe) -> Result<Option<PathBuf>> {
        let (path, text) = (self.recipe(), recipe.to_toml()?);
        let found = unless_missing(&path, moh_files::read(&path))?;
        let ours = self.marked_recipe()?;
        let known = [Some(&text), ours.as_ref()];
        let is_known = |found: &[u8]| known.iter().flatten().any(|text| text.as_bytes() == found);
        let is_edited = found.is_some_and(|found| !is_known(&found));
        let mut aside = None;
        if is_edited {
            let place =
                first_free_suffixed(|suffix| self.root.join(format!("{EDITED}{suffix}.toml")));
            fs::rename(&path, &place).map_err(moh_files::io(&place))?;
            aside = Some(place);
        }
        self.write_mark(&text)?;
        moh_files::write(&path, text.as_bytes()).map_err(moh_files::io(&path))?;
        Ok(aside)
    }
}

fn longer_stages(before: &Recipe, now: &Recipe) -> Vec<String> {
    let is_longer = |stage: &&Stage| {
        let known = before.stages.iter().find(|known| known.name == stage.name);
        known.is_some_and(|known| known.tokens < stage.tokens)
    };
    let longer = now.stages.iter().filter(is_longer);
    longer.map(|stage| format!("stage.{}.tokens", stage.name)).collect()
}

/// Returns the stages that the second recipe appends to the first recipe's stages.
fn appended_stages<'a>(before: &Recipe, now: &'a Recipe) -> &'a [Stage] {
    match now.stages.split_at_checked(before.stages.len()) {
        Some((known, appended))
            if known.iter().zip(&before.stages).all(|(now, before)| now.name == before.name) =>
        {
            appended
        }
        _ => &[],
    }
}

pub(super) fn may_change(key: &str) -> bool {
    // The part after the stage's name. The name may be "parallel" itself.
    let of_stage = key.strip_prefix("stage.").and_then(|rest| rest.split_once('.'));
    of_stage.is_some_and(|(_, key)| key.starts_with("parallel."))
        || is_below(key, "data.validation")
        || MAY_CHANGE.iter().any(|allowed| match allowed.ends_with('.') {
            true => key.starts_with(allowed),
            false => key == *allowed,
        })
}

/// Returns whether the key only names the path of an input.
fn names_input(key: &str) -> bool {
    // The part after the stage's name. The name may be "data" itself.
    let of_stage = key.strip_prefix("stage.").and_then(|rest| rest.split_once('.'));
    let data = of_stage.map_or(key, |(_, key)| key);
    (data.starts_with("data.sources.") && data.ends_with(".path"))
        || (of_stage.is_some() && data == "distill.teacher")
        || ["model.from", "model.revision", "model.tokenizer"].contains(&key)
}

/// Returns the keys that have other values in another recipe, in order.
pub fn changes(before: &Recipe, now: &Recipe) -> Result<Vec<KeyChange>> {
    let (before, now) = (leaves(before)?, leaves(now)?);
    let keys: BTreeSet<&String> = before.keys().chain(now.keys()).collect();
    let change = |key: &String| KeyChange {
        key: key.clone(),
        before: before.get(key).cloned(),
        now: now.get(key).cloned(),
    };
    Ok(keys.into_iter().map(change).filter(|change| change.before != change.now).collect())
}

/// The key of the stages' order.
const STAGES: &str = "stage";

/// Returns every value of a recipe by its full key, stages by name. A list of values is a single value.
pub fn leaves(recipe: &Recipe) -> Result<BTreeMap<String, String>> {
    let mut leaves = BTreeMap::new();
    collect("", &recipe.to_value()?, &mut leaves);
    // The order of stages is not the value of a single key.
    let order: Vec<&str> = recipe.stages.iter().map(|s| s.name.as_str()).collect();
    leaves.insert(STAGES.to_string(), order.join(", "));
    Ok(leaves)
}

fn collect(key: &str, value: &Value, leaves: &mut BTreeMap<String, String>) {
    let join = |part: &str| match key {
        "" => part.to_string(),
        key => format!("{key}.{part}"),
    };
    match value {
        Value::Table(table) => {
            for (part, value) in table {
                collect(&join(part), value, leaves);
            }
        }
        Value::Array(elements) if elements.iter().all(Value::is_table) => {
            for (index, element) in elements.iter().enumerate() {
                let part = moh_recipe::element_name(element, index);
                collect(&join(&part), element, leaves);
            }
        }
        value => {
            leaves.insert(key.to_string(), value.to_string());
        }
    }
}
