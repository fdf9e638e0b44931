//! Whether a run can be resumed, and warnings about its recipe.

use std::path::Path;

use moh_checkpoint::run_directory::RunDirectory;

use crate::Error;
use crate::event::Event;

/// Refuses a run that has completed checkpoints and has none left.
pub(crate) fn check_resumable(run: &RunDirectory) -> Result<(), Error> {
    if run.has_completed_work()? && run.checkpoint_steps()?.is_empty() {
        let reason = format!(
            "the run has completed checkpoints, and none of them is left to resume from: put one back into {}, or \
             give --begin-anew, which moves the run's files aside and begins again",
            run.checkpoints().display()
        );
        return Err(moh_files::unusable(run.root(), reason).into());
    }
    Ok(())
}

/// Says where a recipe of the run is that a user has edited.
pub(crate) fn warn_of_edited(
    run: &RunDirectory,
    aside: Option<&Path>,
    events: &mut dyn FnMut(Event<'_>),
) {
    if let Some(aside) = aside {
        let text = format!(
            "{} was edited, and is kept as {}: in its place is the resolved recipe",
            run.recipe().display(),
            aside.display()
        );
        events(Event::Warning { text: &text });
    }
}
