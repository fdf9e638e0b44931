//! The checkpoints of a run directory: complete, incomplete, and moved aside.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use moh_files::TEMPORARY;

use super::MANIFEST_HASH;
use super::stored::read_manifest;
use crate::{Error, Result, RunDirectory, RunState};
use moh_files::unless_missing;

/// Prefix of the names of damaged checkpoints.
pub(crate) const DAMAGED: &str = "damaged-step-";

/// Prefix of the names of checkpoints after the step from which the run resumed.
pub(crate) const ASIDE: &str = "aside-step-";

/// Returns whether this is the name of a checkpoint that was being written or removed.
pub(crate) fn is_unfinished_checkpoint(name: &str) -> bool {
    let rest = name.strip_prefix(TEMPORARY);
    rest.is_some_and(|rest| rest.starts_with("step-") || rest.starts_with("removed-step-"))
}

/// A directory with a checkpoint, complete or not.
#[derive(Debug)]
pub struct ListedCheckpoint {
    /// The directory.
    pub path: PathBuf,
    /// The step in its name, counted over all stages.
    pub step: u64,
    /// Whether the run can resume from it.
    pub condition: Condition,
    /// The state of the run at its step, or the error of its manifest. The tensors are not read.
    pub state: Result<RunState>,
    /// Bytes of its files.
    pub bytes: u64,
    /// The time at which it was completed, if the file system reports it.
    pub written: Option<SystemTime>,
}

/// Whether a run can resume from a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Condition {
    /// It has its final name. Its bytes are checked when it is used.
    Complete,
    /// Its bytes were found to be wrong, and it was renamed.
    Damaged,
    /// It was moved aside when the run resumed from an earlier one.
    MovedAside,
    /// It was being written or removed when its process ended, or a process is writing or removing it now.
    Unfinished,
}

/// Lists every checkpoint of `run`, by condition and step. Changes nothing.
pub fn list(run: &RunDirectory) -> Result<Vec<ListedCheckpoint>> {
    let mut found = Vec::new();
    for path in entries(&run.checkpoints())? {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let Some((condition, step)) = condition(&name) else { continue };
        let hash = path.join(MANIFEST_HASH);
        found.push(ListedCheckpoint {
            step,
            condition,
            state: read_manifest(&path, step).map(|found| found.state).map_err(Error::from),
            bytes: entries(&path)?
                .iter()
                .filter_map(|file| Some(file.metadata().ok()?.len()))
                .sum(),
            written: hash.metadata().and_then(|file| file.modified()).ok(),
            path,
        });
    }
    found.sort_by(|a, b| (a.condition, a.step, &a.path).cmp(&(b.condition, b.step, &b.path)));
    Ok(found)
}

/// Parses a name in the directory of checkpoints.
fn condition(name: &str) -> Option<(Condition, u64)> {
    if let Some(step) = complete_step(name) {
        return Some((Condition::Complete, step));
    }
    let step = |text: &str| exact_number(text.split('-').next()?);
    for (prefix, condition) in [(DAMAGED, Condition::Damaged), (ASIDE, Condition::MovedAside)] {
        if let Some(rest) = name.strip_prefix(prefix) {
            return Some((condition, step(rest)?));
        }
    }
    let (_, rest) = name.strip_prefix(TEMPORARY)?.split_once("step-")?;
    Some((Condition::Unfinished, step(rest)?))
}

/// Returns the step of a complete checkpoint with this name.
pub(crate) fn complete_step(name: &str) -> Option<u64> {
    exact_number(name.strip_prefix("step-")?)
}

/// Parses a number without sign or leading zeros.
pub(crate) fn exact_number(text: &str) -> Option<u64> {
    text.parse().ok().filter(|number: &u64| number.to_string() == text)
}

/// Returns the paths in a directory. Empty if it does not exist.
pub(crate) fn entries(directory: &Path) -> Result<Vec<PathBuf>> {
    let entries = unless_missing(directory, fs::read_dir(directory))?;
    entries
        .into_iter()
        .flatten()
        .map(|entry| Ok(entry.map_err(moh_files::io(directory))?.path()))
        .collect()
}

/// Returns the names in a directory, sorted. Empty if it does not exist.
pub(crate) fn names(directory: &Path) -> Result<Vec<String>> {
    let paths = entries(directory)?.into_iter();
    let name = |path: PathBuf| Some(path.file_name()?.to_string_lossy().into_owned());
    let mut names: Vec<String> = paths.filter_map(name).collect();
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_what_a_checkpoint_is() {
        for (name, expected) in [
            ("step-12", Some((Condition::Complete, 12))),
            ("step-012", None),
            ("step-12-2", None),
            ("damaged-step-8", Some((Condition::Damaged, 8))),
            ("damaged-step-8-2", Some((Condition::Damaged, 8))),
            ("aside-step-8", Some((Condition::MovedAside, 8))),
            ("aside-step-8-2", Some((Condition::MovedAside, 8))),
            (".tmp-step-9", Some((Condition::Unfinished, 9))),
            (".tmp-removed-step-9", Some((Condition::Unfinished, 9))),
            (".tmp-", None),
            ("step-", None),
            ("damaged-step-x", None),
            ("notes", None),
        ] {
            assert_eq!(condition(name), expected, "{name}");
        }
    }

    #[test]
    fn everything_is_listed_and_what_cannot_be_read_has_its_reason() {
        let temporary = tempfile::tempdir().unwrap();
        let run = RunDirectory::new(temporary.path());
        assert!(list(&run).unwrap().is_empty());
        for name in ["step-9", "step-10", "damaged-step-4", "aside-step-12", ".tmp-step-11"] {
            let path = run.checkpoints().join(name);
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join("manifest.json"), "{").unwrap();
        }
        let found = list(&run).unwrap();
        let seen: Vec<_> = found.iter().map(|one| (one.condition, one.step, one.bytes)).collect();
        let expected = [
            (Condition::Complete, 9, 1),
            (Condition::Complete, 10, 1),
            (Condition::Damaged, 4, 1),
            (Condition::MovedAside, 12, 1),
            (Condition::Unfinished, 11, 1),
        ];
        assert_eq!(seen, expected);
        assert!(found.iter().all(|one| one.state.is_err()));
    }
}
