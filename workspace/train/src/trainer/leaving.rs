//! The end of a run whose directory was moved or removed while it was training. Nothing is made again at its path: the
//! state is written where the directory is now, if that is known, and the run ends with an error that says so.

use moh_kernels::{Backend, Element};
use moh_run_directory::RunDirectory;

use super::{Inputs, Progress, Trainer};
use crate::Error;
use crate::event::Outcome;

impl<B: Backend + Clone, T: Element, G: Element, M: Element> Trainer<'_, '_, B, T, G, M> {
    /// Whether the run directory is not at its path any more, as the first rank sees it.
    pub(super) fn is_lost(&mut self) -> Result<bool, Error> {
        let has_left = self.has_left();
        Ok(self.ranks.any(has_left)?)
    }

    /// Whether this rank holds the run directory, and it is not at its path.
    pub(super) fn has_left(&self) -> bool {
        let Inputs { run, directory, .. } = self.inputs;
        directory.is_some_and(|directory| directory.has_left(run.root()))
    }

    /// Writes the state where the run directory is now, and ends the run.
    ///
    /// # Errors
    /// [`Error::RunMoved`] or [`Error::RunRemoved`]; on other ranks than the first [`moh_step::Error::OtherRank`].
    pub(super) fn leave(mut self) -> Result<Outcome, Error> {
        let place = self.inputs.directory.and_then(|directory| directory.place());
        let text =
            place.as_ref().and_then(|place| place.to_str()).map(|place| place.as_bytes().to_vec());
        let moved = self.ranks.first_that_has(text)?;
        let moved = moved.map(|place| RunDirectory::new(String::from_utf8_lossy(&place).as_ref()));
        let path = self.inputs.run.root().to_owned();
        let is_first = self.ranks.is_first();
        // The checkpoint in flight may have failed because of the move: it is written again.
        let step = match &moved {
            Some(moved) => self.save_in(moved)?,
            None => None,
        };
        Err(match moved {
            _ if !is_first => moh_step::Error::OtherRank { rank: 0 }.into(),
            Some(moved) => Error::RunMoved { path, place: moved.root().to_owned(), step },
            None => Error::RunRemoved { path },
        })
    }
}

impl<'a, 'e, B: Backend + Clone, T: Element, G: Element, M: Element> Trainer<'a, 'e, B, T, G, M> {
    /// Writes a checkpoint of the state into another directory; returns its step, or `None` if it cannot be written.
    fn save_in<'b>(self, run: &'b RunDirectory) -> Result<Option<u64>, Error>
    where
        'a: 'b,
    {
        let mut trainer: Trainer<'b, 'e, B, T, G, M> = self;
        trainer.inputs.run = run;
        let step = trainer.state.step;
        match trainer.finish_saving(Progress::Lost) {
            Err(Error::NotSaved { .. }) => Ok(None),
            saved => saved.map(|_| Some(step)),
        }
    }
}
