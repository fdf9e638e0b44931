//! When a checkpoint is written, and how.

use moh_kernels::{Backend, Element, span};

use super::{Inputs, Trainer};
use crate::Error;
use crate::checkpoint;
use crate::event::Event;

impl<B: Backend + Clone, T: Element, G: Element, M: Element> Trainer<'_, '_, B, T, G, M> {
    /// Whether a checkpoint is due after this step by its number.
    pub(super) fn checkpoint_is_due(&self) -> bool {
        let every = self.inputs.recipe.checkpoint.every_steps;
        every > 0 && self.state.step.is_multiple_of(every)
    }

    /// Writes a checkpoint of the state; the weights must be complete.
    pub(super) fn save(&mut self) -> Result<(), Error> {
        let _span = span::enter("checkpoint");
        // Resuming from the checkpoint of step n requires n lines of metrics.
        if let Some(writer) = &mut self.metrics {
            writer.sync()?;
        }
        let config = self.inputs.source.config_file().to_json(self.model.config(), None);
        let Inputs { run, recipe, .. } = self.inputs;
        let path = checkpoint::write(
            run,
            &mut self.ranks,
            &self.state,
            config,
            &self.model,
            &self.optimizer,
        )?;
        // A rewind may need the older ones while steps are not applied.
        let prunes = self.state.guard.in_a_row == 0;
        self.ranks.first_does(|| {
            run.mark()?;
            if prunes { checkpoint::prune(run, &recipe.checkpoint) } else { Ok(()) }
        })?;
        (self.events)(Event::Checkpoint { path: &path });
        Ok(())
    }
}
