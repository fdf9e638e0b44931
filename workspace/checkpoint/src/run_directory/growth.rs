//! Stages that become longer while their run is under way, also if later stages were appended.
//!
//! A resumed run may have a larger `tokens` of its current stage, of a later stage, or of the last stage. The
//! learning rate follows the old length up to the step at which the run resumed, and the new length after it. So
//! the run's results depend on that step. The step is recorded in `growth.jsonl` of the run directory, which
//! survives a damaged checkpoint, and in the state of every later checkpoint. If a run resumes from an earlier
//! checkpoint, the stage grows at the recorded step again.

use std::path::{Path, PathBuf};

use crate::{RunState, StageExtension, steps_at};
use moh_recipe::{Recipe, Stage};

use crate::{Error, Result, RunDirectory};

const MAX_FILE_BYTES: u64 = 1 << 20;

/// Reopens the stage that was over, if the state is between two stages or at the run's end and that stage has grown
/// there. It was the last stage at that time, even if stages were appended since.
pub fn reopen(state: &mut RunState, recipe: &Recipe) {
    let Some(index) = state.stage.checked_sub(1).filter(|_| state.stage_step == 0) else { return };
    let Some((stage, earlier)) = recipe.stages.get(..=index).and_then(|stages| stages.split_last())
    else {
        return;
    };
    let before: u64 = earlier.iter().map(Stage::num_steps).sum();
    let done = state.step.saturating_sub(before);
    if done < steps_at(stage, &state.growth, state.step) {
        state.stage = index;
        state.stage_step = done;
    }
}

/// The growth of a run that resumes.
#[derive(Debug, Default)]
pub struct Extensions {
    /// Every record that applies, in the order of the steps.
    pub growth: Vec<StageExtension>,
    /// The records that the recipe requests, which apply from this step on.
    pub requested: Vec<StageExtension>,
    /// Whether the file lacks some of the records.
    is_new: bool,
}

impl Extensions {
    /// Returns the growth of `run` at `state`: recorded in its file or in the checkpoint, or requested by a
    /// `recipe` with longer stages than the stored recipe. Changes nothing.
    ///
    /// # Errors
    /// Fails if a stage that is over became longer, or if a file cannot be read.
    pub fn plan(run: &RunDirectory, recipe: &Recipe, state: &RunState) -> Result<Self> {
        if state.step == 0 {
            return Ok(Extensions::default());
        }
        let stored = run.stored_recipe()?;
        let recorded = read(&run.growth())?;
        let mut growth = recorded.clone();
        growth.extend(state.growth.iter().filter(|one| !recorded.contains(one)).cloned());
        // A record is written before the recipe. If the recipe has a shorter stage, the stage has not grown.
        growth.retain(|one| tokens(&stored, &one.stage).is_some_and(|now| one.tokens <= now));
        // A stage is also over if only the evaluation of its last step is missing.
        let is_over = state.unevaluated.is_some()
            && (stored.stages.get(state.stage))
                .is_some_and(|stage| state.stage_step >= stage.num_steps());
        let over = state.stage + usize::from(is_over);
        let mut requested = Vec::new();
        for (index, stage) in recipe.stages.iter().enumerate() {
            let Some(before) = tokens(&stored, &stage.name).filter(|&now| now < stage.tokens)
            else {
                continue;
            };
            let is_last = index + 1 == recipe.stages.len();
            if index < over && !is_last {
                let reason = format!(
                    "stage.{}.tokens: was {before}, now {}: at step {} the stage is over, and only a stage that is \
                     not, or the last one, can grow: set it back to {before}",
                    stage.name, stage.tokens, state.step
                );
                return Err(moh_files::unusable(&run.recipe(), reason).into());
            }
            requested.push(StageExtension {
                stage: stage.name.clone(),
                step: state.step,
                before,
                tokens: stage.tokens,
            });
        }
        growth.extend(requested.iter().cloned());
        growth.sort_by_key(|growth| growth.step);
        let is_new = growth != recorded;
        Ok(Extensions { growth, requested, is_new })
    }

    /// Writes the records if some are new, and then `recipe`. Returns the new path of a recipe that a user has edited.
    /// The caller has locked the directory.
    pub fn store(&self, run: &RunDirectory, recipe: &Recipe) -> Result<Option<PathBuf>> {
        if self.is_new {
            let path = run.growth();
            let mut text = Vec::new();
            for growth in &self.growth {
                let line = serde_json::to_vec(growth);
                text.extend(line.map_err(|error| moh_files::io(&path)(error.into()))?);
                text.push(b'\n');
            }
            moh_files::write(&path, &text).map_err(moh_files::io(&path))?;
        }
        run.write_recipe(recipe)
    }
}

fn tokens(recipe: &Recipe, stage: &str) -> Option<u64> {
    recipe.stages.iter().find(|known| known.name == stage).map(|known| known.tokens)
}

/// Returns the records of a file. Empty if it is missing.
pub fn read(path: &Path) -> Result<Vec<StageExtension>> {
    let refuse = |reason: String| Error::from(moh_files::unusable(path, reason));
    let text = moh_files::read_bounded_if_any(path, MAX_FILE_BYTES, "a record of extensions")?;
    let Some(text) = text else { return Ok(Vec::new()) };
    let lines = text.strip_suffix(b"\n").unwrap_or(&text).split(|&byte| byte == b'\n');
    let mut growth = Vec::new();
    for (index, line) in lines.enumerate().filter(|_| !text.is_empty()) {
        let record: StageExtension = serde_json::from_slice(line)
            .map_err(|error| refuse(format!("line {}: {error}", index + 1)))?;
        if record.before >= record.tokens {
            let reason = format!("line {}: tokens must be more than before", index + 1);
            return Err(refuse(reason));
        }
        growth.push(record);
    }
    Ok(growth)
}

#[cfg(test)]
mod tests {
    use super::*;

    use moh_testkit::{SMALL_RECIPE, assert_refused};

    fn recipe() -> Recipe {
        Recipe::parse(SMALL_RECIPE, Path::new("small.toml"), &[]).unwrap()
    }

    fn grown(step: u64, before: u64, tokens: u64) -> StageExtension {
        StageExtension { stage: recipe().stages[0].name.clone(), step, before, tokens }
    }

    #[test]
    fn a_stage_has_each_length_from_its_step_on() {
        let mut recipe = recipe();
        let stage = &mut recipe.stages[0];
        stage.batch_tokens = 10;
        stage.tokens = 90;
        assert_eq!(steps_at(stage, &[], 0), 9);
        let growth = [grown(4, 30, 45), grown(7, 45, 90)];
        let steps = |step| steps_at(stage, &growth, step);
        assert_eq!([0, 3, 4, 6, 7, 99].map(steps), [3, 3, 5, 5, 9, 9]);
        // From an earlier checkpoint, the stage grew by more than it grew later.
        let growth = [grown(2, 45, 90), grown(4, 30, 45)];
        let steps = |step| steps_at(stage, &growth, step);
        assert_eq!([1, 2, 4].map(steps), [3, 9, 9]);
    }

    #[test]
    fn a_file_that_is_no_record_is_refused_with_its_line() {
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path().join("growth.jsonl");
        assert!(read(&path).unwrap().is_empty());
        let good = serde_json::to_string(&grown(4, 30, 45)).unwrap();
        std::fs::write(&path, format!("{good}\n{good}\n")).unwrap();
        assert_eq!(read(&path).unwrap(), [grown(4, 30, 45), grown(4, 30, 45)]);
        std::fs::write(&path, "").unwrap();
        assert!(read(&path).unwrap().is_empty());
        let torn = &good[..good.len() / 2];
        let more = good.replace("\"step\"", "\"new\":1,\"step\"");
        let shrunk = good.replace("45", "30");
        let negative = good.replace("\"step\":4", "\"step\":-4");
        let nested = "[".repeat(100_000);
        for bad in [torn, &more, &shrunk, &negative, &nested, "null", "\u{0}", ""] {
            std::fs::write(&path, format!("{good}\n{bad}\n\n")).unwrap();
            assert_refused(read(&path), "growth.jsonl: line 2: ");
        }
        std::fs::write(&path, " ".repeat(2 << 20)).unwrap();
        assert_refused(read(&path), "at most");
    }

    #[test]
    fn a_record_whose_recipe_was_not_written_does_not_count() {
        let temporary = tempfile::tempdir().unwrap();
        let run = RunDirectory::new(temporary.path());
        let recipe = recipe();
        run.write_recipe(&recipe).unwrap();
        let tokens = recipe.stages[0].tokens;
        let text = serde_json::to_string(&grown(4, tokens, tokens + 1)).unwrap();
        std::fs::write(run.growth(), text).unwrap();
        let state = RunState { step: 5, stage: 0, ..RunState::default() };
        assert!(Extensions::plan(&run, &recipe, &state).unwrap().growth.is_empty());
    }
}
