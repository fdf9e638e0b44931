//! Checks that a run's checkpoints and its export have room on the file system of its directory, before the first step
//! and not after days.

use std::io;
use std::path::Path;

use moh_checkpoint::{Condition, RunDirectory};
use moh_files::units::bytes;
use moh_model::{ModelConfig, ModelLayout};
use moh_plan::{DiskBytes, with_all_matrices};
use moh_recipe::Recipe;

use crate::{Error, ModelSource, Result};

/// A function that returns the bytes that can be written on a path's file system, or `None` if the file system does not
/// report them.
pub type FreeSpace = fn(&Path) -> io::Result<Option<u64>>;

/// Bytes of a tensor's entries besides its values and its name: in the header of three files, in the part with its
/// three hashes, and in the manifest.
const TENSOR_ENTRY_BYTES: u64 = 640;
/// The number of times that a tensor's name is written.
const TENSOR_NAMES: u64 = 5;
/// Bytes of a manifest's state and configuration, and of each rank's entries.
const MANIFEST_BYTES: u64 = 4 << 10;
/// Bytes of the Python code and the card of a Mixture-of-Head model, and of its configuration.
const DESCRIPTION_BYTES: u64 = 32 << 10;

/// Returns the bytes that a user can still write on the file system of `path`. Returns `None` if the system does not
/// report them, or reports an implausible number: no room at all, as some network file systems do, or more than the
/// total room.
pub fn free_space(path: &Path) -> io::Result<Option<u64>> {
    #[cfg(target_os = "linux")]
    {
        let found = rustix::fs::statvfs(path)?;
        let is_plausible = (1..=found.f_blocks).contains(&found.f_bavail);
        Ok(is_plausible.then(|| found.f_bavail.saturating_mul(found.f_frsize)))
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = path;
        Ok(None)
    }
}

/// The bytes that a run writes, without logs and files of calibrations: these take less than a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Needs {
    checkpoint: u64,
    /// The most checkpoints at one time: the kept checkpoints, and a new checkpoint before an older checkpoint is
    /// removed.
    num_checkpoints: u64,
    export: u64,
}

impl Needs {
    /// Computes the needs of `recipe` on `ranks` ranks. `model` has its grown vocabulary. An export copies `companions`
    /// bytes.
    fn new(recipe: &Recipe, model: &ModelConfig, ranks: usize, companions: u64) -> Self {
        let largest = with_all_matrices(recipe, model);
        let DiskBytes { checkpoint, export, .. } = DiskBytes::new(recipe, &largest);
        let layout = ModelLayout::new(&largest);
        let entries: u64 = (layout.segments())
            .map(|(_, segment)| TENSOR_ENTRY_BYTES + TENSOR_NAMES * segment.name.len() as u64)
            .sum();
        let others = MANIFEST_BYTES.saturating_mul(1 + ranks as u64);
        Needs {
            checkpoint: checkpoint.saturating_add(entries).saturating_add(others),
            num_checkpoints: most_checkpoints(recipe),
            export: export.saturating_add(entries + companions + DESCRIPTION_BYTES),
        }
    }

    /// Returns the bytes that are written besides `existing` bytes of checkpoints, which newer checkpoints replace. An
    /// earlier export stays until the new export is complete.
    fn beside(&self, existing: u64) -> u64 {
        let checkpoints = self.checkpoint.saturating_mul(self.num_checkpoints);
        checkpoints.saturating_sub(existing).saturating_add(self.export)
    }
}

fn most_checkpoints(recipe: &Recipe) -> u64 {
    let moh_recipe::CheckpointOptions { every_steps, every_minutes, keep, keep_every } =
        recipe.checkpoint;
    let steps = recipe.num_steps();
    let for_good = steps.checked_div(keep_every).unwrap_or(0);
    let kept = keep.saturating_add(for_good).saturating_add(1);
    if every_minutes > 0.0 {
        return kept;
    }
    let mut end = 0;
    let ends = recipe.stages.iter().filter(|stage| {
        end += stage.num_steps();
        every_steps == 0 || end % every_steps != 0
    });
    kept.min(steps.checked_div(every_steps).unwrap_or(0).saturating_add(ends.count() as u64))
}

/// Fails if the rest of a run does not fit on the file system of its directory. Returns a warning if the file system
/// does not report its room. `resume_step` is the requested step to resume from. The caller has locked the directory.
pub(crate) fn check(
    run: &RunDirectory,
    resume_step: Option<u64>,
    recipe: &Recipe,
    source: &ModelSource,
    ranks: usize,
    free_space: FreeSpace,
) -> Result<Option<String>> {
    let companions = source.companions()?;
    let copied = companions.iter().filter_map(|path| Some(path.metadata().ok()?.len())).sum();
    let needs = Needs::new(recipe, &source.config, ranks, copied);
    // Later checkpoints are moved aside and stay.
    let goes = |step: u64| resume_step.is_none_or(|resumed| step <= resumed);
    let existing = moh_checkpoint::list(run)?
        .iter()
        .filter(|found| found.condition == Condition::Complete && goes(found.step))
        .map(|found| found.bytes)
        .sum();
    let needed = needs.beside(existing);
    match free_space(run.root()) {
        Ok(Some(free)) if free >= needed => Ok(None),
        Ok(Some(free)) => {
            let Needs { checkpoint, num_checkpoints, .. } = needs;
            let keep_every = match recipe.checkpoint.keep_every {
                0 => "",
                _ => " or raise checkpoint.keep_every",
            };
            let message = format!(
                "{}: the run writes {} beside what is there, for {num_checkpoints} checkpoints of {} and the export, \
                 but the file system has {} free: free some, lower checkpoint.keep{keep_every}, or choose another \
                 run.dir",
                run.root().display(),
                bytes(needed),
                bytes(checkpoint),
                bytes(free)
            );
            Err(Error::NoRoom { needed, checkpoint, message })
        }
        unknown => {
            let cause = unknown.err().map_or_else(String::new, |error| format!(" ({error})"));
            Ok(Some(format!(
                "{}: the file system does not say how much room it has{cause}: the run writes {}",
                run.root().display(),
                bytes(needed)
            )))
        }
    }
}

#[cfg(test)]
mod tests {

    use super::*;

    use moh_testkit::SMALL_RECIPE;

    fn recipe(changes: &[&str]) -> Recipe {
        let changes: Vec<String> = changes.iter().map(ToString::to_string).collect();
        Recipe::parse(SMALL_RECIPE, Path::new("small.toml"), &changes).unwrap()
    }

    #[test]
    fn the_checkpoints_are_those_that_are_kept_and_one_more_or_all() {
        let mut recipe = recipe(&[]);
        let stage = recipe.stages[0].clone();
        recipe.stages = vec![stage.clone(), stage];
        for stage in &mut recipe.stages {
            (stage.batch_tokens, stage.tokens) = (10, 250);
        }
        // A run of 50 steps, with stages that end after 25 and 50.
        let mut most = |every_steps, every_minutes, keep, keep_every| {
            recipe.checkpoint =
                moh_recipe::CheckpointOptions { every_steps, every_minutes, keep, keep_every };
            most_checkpoints(&recipe)
        };
        assert_eq!(most(10, 0.0, 2, 0), 3);
        // After 10, 20, 25, 30, 40 and 50.
        assert_eq!(most(10, 0.0, 9, 0), 6);
        assert_eq!(most(10, 0.0, 2, 20), 5);
        assert_eq!(most(0, 0.0, 9, 0), 2);
        assert_eq!(most(0, 5.0, 9, 0), 10);
        assert_eq!(most(0, 0.0, u64::MAX, 0), 2);
    }

    #[test]
    fn checkpoints_that_newer_ones_replace_need_no_room() {
        let needs = Needs { checkpoint: 100, num_checkpoints: 3, export: 40 };
        assert_eq!([0, 200, 300, 900].map(|existing| needs.beside(existing)), [340, 140, 40, 40]);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_file_system_says_how_much_room_it_has() {
        let dir = tempfile::tempdir().unwrap();
        assert!(free_space(dir.path()).unwrap() > Some(0));
        assert!(free_space(&dir.path().join("none")).is_err());
        // `/proc` has no blocks.
        assert_eq!(free_space(Path::new("/proc")).unwrap(), None);
    }
}
