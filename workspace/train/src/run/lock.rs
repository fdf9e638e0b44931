//! The second phase of a run: the first rank locks its directory, and compares the recipe with the recipe of an earlier
//! run in it.

use moh_checkpoint::run_directory::{RunDirectory, RunLock, branch};
use moh_checkpoint::run_log::Summary;
use moh_kernels::Backend;
use moh_recipe::{Recipe, shell};

use super::Job;
use super::resolve::Resolved;
use crate::trainer::check_resumable;
use crate::{Error, Event, Result};

/// A run with a directory that the first rank has locked.
pub(super) struct LockedRun<'a, B: Backend> {
    pub resolved: Resolved<'a, B>,
    pub state: DirectoryState,
}

/// The run directory, as the first rank has locked and found it; the default on other ranks.
#[derive(Default)]
pub(super) struct DirectoryState {
    /// Held until the run ends.
    _lock: Option<RunLock>,
    /// Whether there is nothing left to do.
    finished: bool,
    /// Whether a checkpoint has been completed.
    pub resumes: bool,
    /// Whether a stage is longer than in the run's recipe.
    pub grows: bool,
}

impl<'a, B: Backend> Resolved<'a, B> {
    /// Locks the run directory, and starts a run that continues another run. Returns the summary of an earlier run that
    /// has finished.
    pub fn lock(
        mut self,
        events: &mut dyn FnMut(Event<'_>),
    ) -> Result<(LockedRun<'a, B>, Option<Summary>)> {
        let Resolved { job, ranks, run, recipe, parent, resume_step, .. } = &mut self;
        let mut state = DirectoryState::default();
        let finished = ranks.rank0_decides::<Error>(|| {
            if let Some(parent) = parent {
                branch::begin(run, parent, recipe)?;
            }
            state = job.lock_and_check(run, recipe, *resume_step, events)?;
            Ok(state.finished)
        })?;
        let summary = if finished { Summary::read(&run.summary())? } else { None };
        Ok((LockedRun { resolved: self, state }, summary))
    }
}

impl Job<'_> {
    /// Locks the run directory, and compares the recipe with the recipe of an earlier run in it. Called on the first
    /// rank.
    fn lock_and_check(
        &self,
        run: &RunDirectory,
        recipe: &Recipe,
        resume_step: Option<u64>,
        events: &mut dyn FnMut(Event<'_>),
    ) -> Result<DirectoryState> {
        let mut lock = run.lock()?;
        if self.options.begin_anew
            && let Some(aside) = run.set_aside()?
        {
            lock = run.lock()?;
            let text = format!("the earlier run is now {}", aside.display());
            events(Event::Warning { text: &text });
        }
        if let Some(text) = lock.warning() {
            events(Event::Warning { text });
        }
        run.claim(recipe)?;
        let grows = run.check_recipe(recipe, &self.command())?;
        let finished = !grows && resume_step.is_none() && run.is_finished()?;
        if !finished {
            check_resumable(run)?;
        }
        if let Some(step) = resume_step {
            moh_checkpoint::require(run, step)?;
        }
        let resumes = run.has_completed_work()?;
        Ok(DirectoryState { _lock: Some(lock), finished, resumes, grows })
    }

    fn command(&self) -> String {
        match self.options.command {
            "" => shell::command(self.path, []),
            command => command.to_owned(),
        }
    }
}
