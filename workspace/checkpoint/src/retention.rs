//! Selects the checkpoints of a run that are kept, and removes the others.

use std::fs;

use moh_files::TEMPORARY;
use moh_recipe::CheckpointOptions;

use crate::listing::{entries, is_unfinished_checkpoint};
use crate::{Result, RunDirectory, alone, newest_good};

/// Removes the checkpoints that `retention` does not keep, and leftovers of earlier processes.
pub fn prune(run: &RunDirectory, retention: &CheckpointOptions) -> Result<()> {
    remove(run, &superseded(run, retention)?)
}

/// Returns the steps of the checkpoints that `retention` does not keep, ascending.
pub fn superseded(run: &RunDirectory, retention: &CheckpointOptions) -> Result<Vec<u64>> {
    let mut steps = run.checkpoint_steps()?;
    let keep = usize::try_from(retention.keep.max(1)).unwrap_or(usize::MAX);
    steps.truncate(steps.len().saturating_sub(keep));
    steps.retain(|step| retention.keep_every == 0 || !step.is_multiple_of(retention.keep_every));
    Ok(steps)
}

/// Returns the same steps as [`superseded`], except the newest checkpoint with good bytes, which is searched
/// from the newest on. Empty if no checkpoint is good.
pub fn superseded_by_good(run: &RunDirectory, retention: &CheckpointOptions) -> Result<Vec<u64>> {
    let mut steps = superseded(run, retention)?;
    if !steps.is_empty() {
        let good = newest_good(run, &mut alone()?)?.map(|stored| stored.manifest().state.step);
        steps.retain(|&step| good.is_some_and(|good| good != step));
    }
    Ok(steps)
}

/// Removes the checkpoints of `steps`, and leftovers of earlier processes. The caller has locked the run directory.
pub fn remove(run: &RunDirectory, steps: &[u64]) -> Result<()> {
    let all = run.checkpoints();
    for &step in steps {
        // Renamed first, so that a partially removed checkpoint never looks complete.
        let doomed = all.join(format!("{TEMPORARY}removed-step-{step}"));
        fs::rename(run.checkpoint(step), &doomed).map_err(moh_files::io(&doomed))?;
    }
    for path in entries(&all)? {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if is_unfinished_checkpoint(&name) {
            fs::remove_dir_all(&path).map_err(moh_files::io(&path))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_and_every_mth_checkpoint_are_kept() {
        let temporary = tempfile::tempdir().unwrap();
        let run = RunDirectory::new(temporary.path());
        for step in [2, 4, 5, 6, 8] {
            fs::create_dir_all(run.checkpoint(step)).unwrap();
        }
        let superseded = |keep, keep_every| {
            let retention = CheckpointOptions { keep, keep_every, ..CheckpointOptions::default() };
            superseded(&run, &retention).unwrap()
        };
        assert_eq!(superseded(2, 0), [2, 4, 5]);
        assert_eq!(superseded(1, 4), [2, 5, 6]);
        assert_eq!(superseded(0, 0), [2, 4, 5, 6]);
        assert!(superseded(9, 0).is_empty());
        fs::create_dir(run.checkpoints().join(".tmp-step-9")).unwrap();
        remove(&run, &[2, 5]).unwrap();
        assert_eq!(run.checkpoint_steps().unwrap(), [4, 6, 8]);
        assert_eq!(fs::read_dir(run.checkpoints()).unwrap().count(), 3);
    }

    #[test]
    fn nothing_is_superseded_where_no_checkpoint_is_good() {
        let temporary = tempfile::tempdir().unwrap();
        let run = RunDirectory::new(temporary.path());
        for step in [2, 4] {
            fs::create_dir_all(run.checkpoint(step)).unwrap();
        }
        let retention = CheckpointOptions { keep: 1, ..CheckpointOptions::default() };
        assert!(superseded_by_good(&run, &retention).unwrap().is_empty());
    }
}
