//! Runs that start with the first stages of another run. Everything that resuming needs is copied from the other
//! run, as if the new run had trained these stages itself.
//!
//! The directory appears complete or not at all. After that, the run resumes as usual. Checkpoints are hard links,
//! which need no disk space: no program changes the files of a complete checkpoint, and each run removes its own links.

use std::fs;
use std::path::Path;

use moh_files::PendingDirectory;
use moh_recipe::Recipe;

use crate::listing::entries;
use crate::{Result, RunDirectory};
use moh_files::unless_missing;

/// Returns whether the directory of `run` is absent or empty.
pub fn is_free(run: &RunDirectory) -> Result<bool> {
    Ok(entries(run.root())?.is_empty())
}

/// Creates the directory of `run` from its `parent`, with the resolved `recipe`. Its first stages are the
/// parent's. The directory must be [free](is_free).
pub fn begin(run: &RunDirectory, parent: &RunDirectory, recipe: &Recipe) -> Result<()> {
    let steps = parent.checkpoint_steps()?;
    if steps.is_empty() {
        return Err(parent.no_good_checkpoint());
    }
    let place = run.root();
    PendingDirectory::recover(place).map_err(moh_files::io(place))?;
    let pending = PendingDirectory::create(place).map_err(moh_files::io(place))?;
    let new = RunDirectory::new(pending.path());
    new.claim(recipe)?;
    for step in steps {
        copy_directory(&parent.checkpoint(step), &new.checkpoint(step), link)?;
    }
    for directory in [RunDirectory::model as fn(&_) -> _, RunDirectory::tensorboard] {
        copy_directory(&directory(parent), &directory(&new), copy)?;
    }
    for file in [
        RunDirectory::metrics as fn(&_) -> _,
        RunDirectory::routing,
        RunDirectory::inputs,
        RunDirectory::growth,
        RunDirectory::marker,
    ] {
        unless_missing(&file(parent), copy(&file(parent), &file(&new)))?;
    }
    for file in parent.calibration_files()? {
        let to = new.root().join(file.file_name().unwrap_or_default());
        link(&file, &to).map_err(moh_files::io(&file))?;
    }
    new.write_recipe(recipe)?;
    moh_files::sync_directory(&new.checkpoints()).map_err(moh_files::io(place))?;
    Ok(pending.publish().map_err(moh_files::io(place))?)
}

/// Links a file under a second name, or copies it where the file system has no hard links.
fn link(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::hard_link(from, to).or_else(|_| copy(from, to))
}

/// Copies a file, and syncs the copy.
fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::copy(from, to)?;
    fs::File::open(to)?.sync_all()
}

/// Copies a directory and everything below it with `copy`. Does nothing if it is missing.
fn copy_directory(
    from: &Path,
    to: &Path,
    copy: fn(&Path, &Path) -> std::io::Result<()>,
) -> Result<()> {
    let Some(entries) = unless_missing(from, fs::read_dir(from))? else { return Ok(()) };
    fs::create_dir_all(to).map_err(moh_files::io(to))?;
    for entry in entries {
        let path = entry.map_err(moh_files::io(from))?.path();
        let new = to.join(path.file_name().unwrap_or_default());
        match path.is_dir() {
            true => copy_directory(&path, &new, copy)?,
            false => copy(&path, &new).map_err(moh_files::io(&path))?,
        }
    }
    Ok(moh_files::sync_directory(to).map_err(moh_files::io(to))?)
}
