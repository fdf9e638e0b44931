//! Resuming from an earlier checkpoint than the newest: what the run has written after it is moved
//! into `after-step-N`, laid out as a run directory, and never removed.

use std::fs;
use std::path::PathBuf;

use moh_checkpoint::AFTER;
use moh_files::first_free_suffixed;

use crate::{Error, RunDirectory};
use moh_files::unless_missing;

/// Moves the checkpoints after `step`, the summary and the export aside, with a copy of the metrics;
/// returns the new directory, or `None` if there was nothing to move. The caller has locked the directory
/// and checked the checkpoint of `step`.
///
/// # Errors
/// Fails if a file cannot be copied or renamed. What has not been moved yet is then still in its place.
pub fn archive_later(run: &RunDirectory, step: u64) -> Result<Option<PathBuf>, Error> {
    let mut later = run.checkpoint_steps()?;
    later.retain(|&found| found > step);
    let results = [
        (run.summary(), RunDirectory::summary as fn(&_) -> _),
        (run.export(), RunDirectory::export),
    ];
    let results: Vec<_> = results.into_iter().filter(|(path, _)| path.exists()).collect();
    if later.is_empty() && results.is_empty() {
        return Ok(None);
    }
    let aside = RunDirectory::new(first_free_suffixed(|suffix| {
        run.root().join(format!("{AFTER}{step}{suffix}"))
    }));
    run.create_folder(aside.root())?;
    run.create_folder(&aside.checkpoints())?;
    unless_missing(&run.metrics(), fs::copy(run.metrics(), aside.metrics()))?;
    // The summary first: without it the run is unfinished, wherever this ends.
    for (from, to) in results {
        fs::rename(&from, to(&aside)).map_err(moh_files::io(&from))?;
    }
    // From the newest on, so that those that are left are always the first ones.
    for &found in later.iter().rev() {
        let from = run.checkpoint(found);
        fs::rename(&from, aside.checkpoint(found)).map_err(moh_files::io(&from))?;
    }
    for directory in [aside.checkpoints(), run.checkpoints(), run.root().to_owned()] {
        moh_files::sync_directory(&directory).map_err(moh_files::io(&directory))?;
    }
    Ok(Some(aside.root().to_owned()))
}
