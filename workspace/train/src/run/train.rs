//! The third phase of a run: its inputs are compared with its first inputs, and the
//! remaining steps are trained with the recipe's element types.

use std::path::PathBuf;

use moh_checkpoint::run_directory::RunDirectory;
use moh_checkpoint::run_log::Machine;
use moh_kernels::Backend;
use moh_recipe::Recipe;

use super::Job;
use super::lock::LockedRun;
use super::resolve::Resolved;
use crate::run_inputs::{InputCheck, RunInputs};
use crate::trainer::{Inputs, train, warn_of_edited};
use crate::{Error, Event, Outcome, Result, disk_space};

impl<B: Backend + Clone> LockedRun<'_, B> {
    /// Compares the inputs of a finished run with its first inputs, and stores its recipe. While the recipe names the
    /// same inputs, the data may be missing.
    pub fn check_finished(self, events: &mut dyn FnMut(Event<'_>)) -> Result<InputCheck> {
        let LockedRun { resolved, state } = self;
        let Resolved { job, mut ranks, run, recipe, source, data, teachers, .. } = resolved;
        let names_others = ranks.rank0_decides::<Error>(|| {
            let stored = run.stored_recipe()?;
            let stage_data = |recipe: &Recipe| -> Vec<_> {
                recipe.stages.iter().map(|stage| stage.data.clone()).collect()
            };
            Ok(stored.data != recipe.data
                || stored.model != recipe.model
                || stage_data(&stored) != stage_data(recipe))
        })?;
        if names_others || !ranks.any(data.is_err())? {
            let (data, teachers) = (&ranks.agree(data)?, teachers.as_ref().ok());
            let (run, source, stop) = (&run, &source, job.options.stop);
            let resumes = state.resumes;
            let inputs = RunInputs { run, recipe, source, data, teachers, resumes, stop };
            let compared = inputs.compare(&mut ranks, events)?;
            if compared == InputCheck::Stopped {
                return Ok(compared);
            }
        }
        let edited = ranks.on_rank0::<_, Error>(|| Ok(run.write_recipe(recipe)?))?;
        warn_of_edited(&run, edited.flatten(), events);
        Ok(InputCheck::Passed)
    }

    /// Trains the remaining steps, and exports the model.
    pub fn train(self, backend: B, events: &mut dyn FnMut(Event<'_>)) -> Result<Outcome> {
        let LockedRun { resolved, state } = self;
        let Resolved { job, mut ranks, run, recipe, source, data, teachers, resume_step, .. } =
            resolved;
        let (options, size) = (&job.options, job.group.size());
        let mut data = ranks.agree(data)?;
        let teachers = ranks.agree(teachers)?;
        let free_space = options.free_space;
        let check = || disk_space::check(&run, resume_step, recipe, &source, size, free_space);
        if let Some(text) = ranks.on_rank0(check)?.flatten() {
            events(Event::Warning { text: &text });
        }
        let inputs = RunInputs {
            run: &run,
            recipe,
            source: &source,
            data: &data,
            teachers: Some(&teachers),
            resumes: state.resumes,
            stop: options.stop,
        };
        let settled = inputs.settle(&mut ranks, events)?;
        let Some(contents) = settled else { return Ok(Outcome::StoppedBeforeTraining) };
        for (set, content) in data.validation.iter_mut().zip(contents) {
            set.evaluated.content = content;
        }
        let prepare = || job.prepare_directory(&run, recipe, state.grows, backend.name());
        warn_of_edited(&run, ranks.on_rank0(prepare)?.flatten(), events);
        let inputs = Inputs {
            recipe,
            source: &source,
            teachers: &teachers,
            run: &run,
            stop: options.stop,
            trace: options.trace,
            time_limit: options.time_limit,
            resume_step,
            left: None,
        };
        if let Some(text) = inputs.source.warning() {
            events(Event::Warning { text });
        }
        for text in &data.tokenizer_remarks {
            events(Event::Warning { text });
        }
        train(backend, ranks, inputs, data, events)
    }
}

impl Job<'_> {
    /// Writes the files that a run directory has before the first step. Returns the new path of a recipe that a user
    /// has edited. Called on the first rank.
    fn prepare_directory(
        &self,
        run: &RunDirectory,
        recipe: &Recipe,
        grows: bool,
        device: String,
    ) -> Result<Option<PathBuf>> {
        // The step from which a stage is longer is known once a checkpoint is open.
        let edited = if grows { None } else { run.write_recipe(recipe)? };
        let ranks = self.group.size();
        Machine::new(self.options.processor, device, ranks).write(&run.machine())?;
        run.clear_remains()?;
        Ok(edited)
    }
}
