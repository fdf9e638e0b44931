//! The return to an earlier step after steps that were not applied (`rewinds.rs`).

use moh_kernels::{Backend, Element};
use moh_recipe::{Recipe, Stage};
use moh_run_directory::{Rewind, RunDirectory, metrics_resume};

use super::Trainer;
use crate::Error;
use crate::event::Event;

impl<B: Backend + Clone, T: Element, G: Element, M: Element> Trainer<'_, '_, B, T, G, M> {
    /// Whether the last steps were not applied, as many as the recipe's patience.
    pub(super) fn rewind_is_due(&self) -> bool {
        self.state.guard.in_a_row >= self.inputs.recipe.guard.patience
    }

    /// Records the return to an earlier step, before anything else changes. The trainer then starts
    /// anew, as after an interruption.
    ///
    /// # Errors
    /// Fails if no checkpoint is left to return to, or after too many returns from this place.
    pub(super) fn rewind(&mut self) -> Result<(), Error> {
        // A checkpoint in flight is one to return to, or is set aside.
        self.wait_for_checkpoint()?;
        self.warn_of_failure("when the next checkpoint is due");
        let (run, recipe) = (self.inputs.run, self.inputs.recipe);
        let next = self.rewinds.next(recipe, run, &self.state);
        let mut next = self.ranks.agree(next)?;
        let rewinds = &self.rewinds;
        self.ranks.on_rank0::<Error>(|| {
            next.initial = begins_again(run, recipe, &next)?;
            metrics_resume::keep_before_rewind(run, recipe, &next)?;
            Ok(rewinds.append(next, run)?)
        })?;
        (self.events)(Event::Rewound(&next));
        Ok(())
    }
}

/// Whether the run begins again from its initial model, since it has no checkpoint up to the step of the
/// rewind and has never had one. The others are newer, and of the path that the run leaves.
fn begins_again(run: &RunDirectory, recipe: &Recipe, rewind: &Rewind) -> Result<bool, Error> {
    let oldest = run.checkpoint_steps()?.first().copied();
    if oldest.is_some_and(|oldest| oldest <= rewind.step) {
        return Ok(false);
    }
    let stage = recipe.stages.first().map_or(0, Stage::num_steps);
    let scheduled = match recipe.checkpoint.every_steps {
        0 => stage,
        every => every.min(stage),
    };
    let Rewind { step, skipped_steps: [first, last], .. } = *rewind;
    match step < scheduled {
        true => Ok(true),
        false => {
            let path = run.checkpoints();
            Err(Error::NothingToReturnTo { path, first, last, step })
        }
    }
}
