//! `rewinds.jsonl`: the returns of a run to earlier steps, and the samples that it then passed over.
//!
//! A run whose steps are not applied again and again goes back to an earlier step. It takes the steps up to
//! there again, from a checkpoint, and continues after the last sample that was bad. The file is complete
//! before anything else changes, so a run that is killed at any moment takes the same path again: from
//! whichever checkpoint it starts, it passes over the same samples after the same step.

use std::io::Write as _;
use std::path::Path;

use moh_checkpoint::RunState;
use moh_kernels::Backend;
use moh_recipe::Recipe;
use moh_step::Ranks;
use serde::{Deserialize, Serialize};

use crate::{Error, RunDirectory};

/// Returns from one place of a run, after which it ends: other samples have not helped.
pub const MAX_ATTEMPTS: u64 = 3;

/// Maximum bytes of the file.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// All numbers are below this: the ranks exchange steps as f64, and sums of samples do not overflow.
const MAX_NUMBER: u64 = 1 << 53;

/// A return to an earlier step. Steps are counted over all stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rewind {
    /// Its number, from 1.
    pub number: u64,
    /// The step after which the samples are passed over.
    pub step: u64,
    /// The first and the last of the steps that were not applied.
    pub skipped_steps: [u64; 2],
    /// The first and the last sample that are passed over.
    pub samples: [u64; 2],
    /// How many times the run has returned from this place, from 1.
    pub attempt: u64,
    /// Whether the run begins again from its initial model, since it had no checkpoint up to the step.
    pub initial: bool,
}

impl Rewind {
    fn is_valid(&self) -> bool {
        let ([first, last], [from, to]) = (self.skipped_steps, self.samples);
        let ordered = self.step < first && first <= last && from <= to;
        // The others are not larger than these.
        ordered && [self.number, self.attempt, last, to].iter().all(|&number| number < MAX_NUMBER)
    }

    /// How many samples are passed over.
    fn num_samples(&self) -> u64 {
        self.samples[1].saturating_sub(self.samples[0]).saturating_add(1)
    }
}

/// All rewinds of a run, in order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rewinds {
    list: Vec<Rewind>,
}

impl Rewinds {
    /// Passes over the samples of a rewind, if its step is the last one done.
    pub fn pass_over_samples(&self, state: &mut RunState) {
        if let Some(rewind) = self.due(state.step, state.guard.rewinds) {
            state.sample = rewind.samples[1] + 1;
            state.guard.rewinds = rewind.number;
        }
    }

    /// Reads the file of `run`; a missing file has none.
    ///
    /// # Errors
    /// Fails if the file cannot be read or is damaged.
    pub fn read(run: &RunDirectory) -> Result<Self, Error> {
        let path = run.rewinds();
        match moh_files::read_bounded_if_any(&path, MAX_FILE_BYTES, "a record of rewinds")? {
            Some(bytes) => Self::parse(&bytes, &path),
            None => Ok(Self::default()),
        }
    }

    fn parse(bytes: &[u8], path: &Path) -> Result<Self, Error> {
        let refuse = |line: usize, reason: String| {
            let path = path.to_owned();
            Error::from(moh_run_log::Error::JsonLine { path, line: line as u64 + 1, reason })
        };
        let mut list = Vec::<Rewind>::new();
        let lines = bytes.split_inclusive(|&byte| byte == b'\n');
        for (i, line) in lines.enumerate() {
            let rewind: Rewind = serde_json::from_slice(line)
                .map_err(|error| refuse(i, format!("not a rewind: {error}")))?;
            let before = list.last().map_or(0, |rewind| rewind.number);
            if rewind.number <= before || !rewind.is_valid() || line.last() != Some(&b'\n') {
                return Err(refuse(i, "not a rewind, or not in order".into()));
            }
            list.push(rewind);
        }
        Ok(Rewinds { list })
    }

    /// The rewinds of `run` on all ranks, of which the first one reads the file.
    ///
    /// # Errors
    /// As [`Rewinds::read`]; fails if another rank has failed.
    pub fn shared<B: Backend>(run: &RunDirectory, ranks: &mut Ranks<B>) -> Result<Self, Error> {
        let json = |error: serde_json::Error| moh_files::io(&run.rewinds())(error.into());
        let mut text = None;
        ranks.on_rank0::<Error>(|| {
            text = Some(serde_json::to_vec(&Self::read(run)?.list).map_err(json)?);
            Ok(())
        })?;
        let text = ranks.first_that_has(text)?.unwrap_or_default();
        Ok(Rewinds { list: serde_json::from_slice(&text).map_err(json)? })
    }

    /// Adds a rewind, and replaces the file of `run`: atomically, and synced.
    ///
    /// # Errors
    /// Fails if the file cannot be written; it is then unchanged.
    pub fn append(&self, rewind: Rewind, run: &RunDirectory) -> Result<(), Error> {
        let path = run.rewinds();
        let mut text = Vec::new();
        for rewind in self.list.iter().chain([&rewind]) {
            serde_json::to_writer(&mut text, rewind)
                .and_then(|()| writeln!(text).map_err(serde_json::Error::io))
                .map_err(|error| moh_files::io(&path)(error.into()))?;
        }
        Ok(moh_files::write(&path, &text).map_err(moh_files::io(&path))?)
    }

    /// All rewinds, by number.
    pub fn all(&self) -> &[Rewind] {
        &self.list
    }

    /// The last rewind.
    pub fn last(&self) -> Option<&Rewind> {
        self.list.last()
    }

    /// The rewinds on the path that counts. A later one to the same or an earlier step replaces those
    /// before it.
    fn effective(&self) -> Vec<&Rewind> {
        let mut path: Vec<&Rewind> = Vec::new();
        for rewind in &self.list {
            // Ordered by step.
            while path.pop_if(|before| before.step >= rewind.step).is_some() {}
            path.push(rewind);
        }
        path
    }

    /// The rewind whose samples are passed over before the step after `step`, by a run that has taken
    /// those up to number `taken`.
    pub fn due(&self, step: u64, taken: u64) -> Option<&Rewind> {
        self.effective().into_iter().find(|rewind| rewind.step == step && rewind.number > taken)
    }

    /// The number of the last rewind that a checkpoint of `step` has taken; 0 for none. A checkpoint with
    /// a smaller number is of a path that the run has left.
    pub fn taken_before(&self, step: u64) -> u64 {
        let path = self.effective();
        path.iter().rev().find(|rewind| rewind.step < step).map_or(0, |rewind| rewind.number)
    }

    /// The samples that are passed over, over all stages.
    pub fn num_samples(&self) -> u64 {
        sum(self.effective())
    }

    /// The rewind of a run whose last steps were not applied: to `guard.rewind` steps before the first of
    /// them, or before the step of the last rewind if that was from the same place.
    ///
    /// # Errors
    /// Fails after [`MAX_ATTEMPTS`] from the same place.
    pub fn next(
        &self,
        recipe: &Recipe,
        run: &RunDirectory,
        state: &RunState,
    ) -> Result<Rewind, Error> {
        let (last, distance) = (state.step, recipe.guard.rewind);
        let first = (last + 1).saturating_sub(state.guard.in_a_row);
        let is_same_place =
            |before: &&Rewind| first <= before.skipped_steps[1].saturating_add(distance);
        let before = self.last().filter(is_same_place);
        let attempt = before.map_or(1, |before| before.attempt + 1);
        if attempt > MAX_ATTEMPTS {
            let path = run.rewinds();
            let attempts = MAX_ATTEMPTS;
            return Err(Error::RewoundTooOften { path, first, last, attempts });
        }
        let step = before.map_or(first, |before| before.step.min(first)).saturating_sub(distance);
        let passed = sum(self.effective().into_iter().filter(|rewind| rewind.step < step));
        Ok(Rewind {
            number: self.last().map_or(0, |last| last.number).max(state.guard.rewinds) + 1,
            step,
            skipped_steps: [first, last],
            samples: [
                samples_of(recipe, step).saturating_add(passed),
                state.sample.saturating_sub(1),
            ],
            attempt,
            initial: false,
        })
    }
}

/// The samples that these rewinds pass over.
fn sum<'a>(rewinds: impl IntoIterator<Item = &'a Rewind>) -> u64 {
    rewinds.into_iter().map(Rewind::num_samples).fold(0, u64::saturating_add)
}

/// The samples of the first `steps` steps of a run that passes over none.
fn samples_of(recipe: &Recipe, mut steps: u64) -> u64 {
    let mut samples = 0;
    for stage in &recipe.stages {
        let taken = steps.min(stage.num_steps());
        samples += taken * recipe.batch_sequences(stage);
        steps -= taken;
    }
    samples
}

/// Moves the checkpoints of the path that the run has left aside. The caller has locked the directory.
///
/// # Errors
/// Fails if a directory cannot be listed or renamed.
pub fn leave_path(run: &RunDirectory, rewinds: &Rewinds) -> Result<(), Error> {
    let Some(last) = rewinds.last() else { return Ok(()) };
    let steps = run.checkpoint_steps()?;
    // What cannot be opened is found again, and reported, where the newest checkpoint is opened.
    let is_left = |&step: &u64| {
        run.stored(step)
            .is_ok_and(|stored| stored.manifest().state.guard.rewinds < rewinds.taken_before(step))
    };
    let left: Vec<u64> = steps.iter().copied().filter(is_left).collect();
    if left.is_empty() {
        return Ok(());
    }
    if last.initial && left.len() == steps.len() {
        // No checkpoint of the new path is complete yet.
        run.unmark()?;
    }
    for step in left {
        let aside = run.checkpoint_directory().rewound_checkpoint(step);
        moh_files::remove_directory(&aside).map_err(moh_files::io(&aside))?;
        std::fs::rename(run.checkpoint(step), &aside).map_err(moh_files::io(&aside))?;
    }
    Ok(moh_files::sync_directory(&run.checkpoints()).map_err(moh_files::io(&run.checkpoints()))?)
}

#[cfg(test)]
mod tests;
