//! Whose a directory is, and the files in it.
//!
//! A run takes a directory that is absent or empty, or that a run has marked: [`MARK`] is written before all other
//! files, and no file is written into a directory without it. In its directory a run replaces, moves and removes only
//! what has a name on the lists here. Runs of earlier versions have no mark, and are known by what they left.

use std::fs;
use std::path::{Path, PathBuf};

use moh_checkpoint::{AFTER, is_unfinished_checkpoint};
use moh_files::{TEMPORARY, first_free, first_free_suffixed};
use moh_recipe::Recipe;

use super::stored_recipe::MAX_BYTES;
use super::{CALIBRATION, EXPORT_BEFORE, RunDirectory};
use crate::Error;
use crate::run_lock::{CLOCK, HOLDER, LOCK};
use moh_files::unless_missing;

/// The file that makes a directory a run's: it has the run's recipe.
pub(super) const MARK: &str = ".moh-run";

/// The files and directories that a run has at most once.
const SINGLE: [&str; 15] = [
    "checkpoints",
    "export",
    "exported-files.json",
    "growth.jsonl",
    "has-checkpoints",
    "inputs.json",
    "machine.json",
    "metrics.jsonl",
    "model",
    "recipe.toml",
    "report.html",
    "rewinds.jsonl",
    "routing.jsonl",
    "run.svg",
    "summary.json",
];

/// TensorBoard's directory.
const TENSORBOARD: &str = "tensorboard";

/// Beginnings and endings of the names of those that have a number.
const NUMBERED: [(&str, &str); 8] = [
    (AFTER, ""),
    (CALIBRATION, ".json"),
    (CALIBRATION, ".safetensors"),
    (EXPORT_BEFORE, ""),
    ("metrics-before-rewind-", ".jsonl"),
    ("metrics-before-step-", ".jsonl"),
    ("routing-before-step-", ".jsonl"),
    ("trace-step-", ".json"),
];

/// Recipes of the run that a user has edited begin so.
pub(super) const EDITED: &str = "recipe-edited";

/// Directories with earlier runs begin so.
const BEFORE: &str = "before-";

/// What the root of a file system has of its own.
const OF_FILE_SYSTEM: &str = "lost+found";

/// Maximum number of foreign files that a message names.
const MAX_NAMED: usize = 3;

/// Whether a name in a run directory is that of a file or directory that a run writes, but for its mark, its lock
/// and earlier runs.
fn is_own(name: &str) -> bool {
    let is_number = |text: &str| text.starts_with(|first: char| first.is_ascii_digit());
    let is_numbered = |(start, end): &(&str, &str)| {
        let number = name.strip_prefix(start).and_then(|rest| rest.strip_suffix(end));
        number.is_some_and(is_number)
    };
    let edited = name.strip_prefix(EDITED).and_then(|rest| rest.strip_suffix(".toml"));
    SINGLE.contains(&name)
        || name == TENSORBOARD
        || NUMBERED.iter().any(is_numbered)
        || edited
            .is_some_and(|rest| rest.is_empty() || rest.strip_prefix('-').is_some_and(is_number))
}

/// Whether a name is that of a file or directory that a process was writing when it ended.
fn is_remain(name: &str) -> bool {
    let Some(rest) = name.strip_prefix(TEMPORARY) else { return false };
    let written = SINGLE.into_iter().chain(NUMBERED.map(|(start, _)| start));
    let starts = written.chain([TENSORBOARD, EDITED, MARK, HOLDER, CLOCK]);
    starts.into_iter().any(|start| rest.starts_with(start))
}

/// Whether a process that ended before it marked its directory may have left that name, or the file system has it.
fn precedes_mark(name: &str) -> bool {
    let rest = name.strip_prefix(TEMPORARY);
    let is_remain =
        rest.is_some_and(|rest| [MARK, HOLDER, CLOCK].iter().any(|of| rest.starts_with(of)));
    is_remain || [LOCK, HOLDER, OF_FILE_SYSTEM].contains(&name)
}

/// The names in a directory, sorted; none if it does not exist.
fn names(directory: &Path) -> Result<Vec<String>, Error> {
    let entries = unless_missing(directory, fs::read_dir(directory))?;
    let mut names = Vec::new();
    for entry in entries.into_iter().flatten() {
        let entry = entry.map_err(moh_files::io(directory))?;
        names.push(entry.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// Names for a message: the first ones, and how many more there are.
pub fn join_names(names: &[String]) -> String {
    let shown = names[..names.len().min(MAX_NAMED)].join(", ");
    match names.len().checked_sub(MAX_NAMED) {
        Some(more @ 1..) => format!("{shown} and {more} more"),
        _ => shown,
    }
}

impl RunDirectory {
    /// The run's mark, which has its recipe.
    pub(super) fn mark_path(&self) -> PathBuf {
        self.root.join(MARK)
    }

    /// The run whose `recipe.toml` is at `path`, itself or through links; `None` for any other file.
    ///
    /// # Errors
    /// Fails if the directory of checkpoints exists and cannot be listed.
    pub fn of_recipe(path: &Path) -> Result<Option<Self>, Error> {
        let mut path = path.to_owned();
        loop {
            let run = RunDirectory::new(moh_files::parent(&path));
            let is_its_name = path.file_name().is_some_and(|name| name == "recipe.toml");
            if is_its_name && run.is_run()? {
                return Ok(Some(run));
            }
            // A file that is there ends a chain of links.
            let target = path.read_link().ok().filter(|_| path.is_file());
            let Some(target) = target else { return Ok(None) };
            path = path.parent().unwrap_or(Path::new("")).join(target);
        }
    }

    /// Whether the directory is a run's: marked, or left by a version without marks.
    ///
    /// # Errors
    /// Fails if the directory of checkpoints exists and cannot be listed.
    pub fn is_run(&self) -> Result<bool, Error> {
        if self.mark_path().is_file() {
            return Ok(true);
        }
        if !self.recipe().is_file() {
            return Ok(false);
        }
        // Earlier versions have left a lock or, where it was not copied, what follows a checkpoint.
        let is_locked = self.root.join(LOCK).is_file();
        Ok(self.marker().is_file()
            || self.checkpoint_directory().has_names()?
            || (is_locked && self.has_completed_work()?))
    }

    /// Fails if a run must not take the directory: it is neither absent nor empty nor a run's.
    ///
    /// # Errors
    /// [`Error::NotARun`] with what the directory holds, [`Error::NotADirectory`] if it is none; fails also if it
    /// cannot be listed.
    pub fn check(&self) -> Result<(), Error> {
        if self.root.symlink_metadata().is_ok() && !self.root.is_dir() {
            let what = match self.root.read_link() {
                Ok(target) => format!("a link to {}, which is not a directory", target.display()),
                Err(_) => "a file".to_owned(),
            };
            let instead = self.free_sibling();
            return Err(Error::NotADirectory { path: self.root.clone(), what, instead });
        }
        if self.is_run()? {
            return Ok(());
        }
        let found = self.occupants()?;
        match found.is_empty() {
            true => Ok(()),
            false => Err(Error::NotARun {
                path: self.root.clone(),
                found: join_names(&found),
                instead: self.free_sibling(),
            }),
        }
    }

    /// The names in the directory, but for those that a process leaves before it has marked its directory.
    pub fn occupants(&self) -> Result<Vec<String>, Error> {
        let mut found = names(&self.root)?;
        found.retain(|name| !precedes_mark(name));
        Ok(found)
    }

    /// A free name beside the directory, or in it where it has no name of its own, as `.` has none.
    pub fn free_sibling(&self) -> PathBuf {
        let name = self.root.file_name();
        let Some(name) = name.map(|name| name.to_string_lossy()) else {
            return first_free_suffixed(|suffix| self.root.join(format!("run{suffix}")));
        };
        let parent = self.root.parent().unwrap_or(Path::new(""));
        first_free(|n| parent.join(format!("{name}-{}", n.saturating_add(1))))
    }

    /// Fails if a new run in this directory would have a file that it reads under its own ones, or would lie in the
    /// directory of a model that it reads. Each input has its key in the recipe; `is_model` are directories.
    ///
    /// # Errors
    /// [`Error::HoldsInput`] with the first such input.
    pub fn check_inputs<'a>(
        &self,
        inputs: impl Iterator<Item = (String, &'a Path, bool)>,
    ) -> Result<(), Error> {
        let root = absolute(&self.root);
        for (key, input, is_model) in inputs {
            let at = absolute(input);
            let relation = match () {
                () if at == root => "is",
                () if at.starts_with(&root) => "holds",
                () if is_model && root.starts_with(&at) => "lies inside",
                () => continue,
            };
            return Err(Error::HoldsInput {
                path: self.root.clone(),
                relation,
                key,
                input: input.to_owned(),
            });
        }
        Ok(())
    }

    /// The files with the results of calibrations.
    ///
    /// # Errors
    /// Fails if the directory cannot be listed.
    pub fn calibration_files(&self) -> Result<Vec<PathBuf>, Error> {
        let mut found = names(&self.root)?;
        found.retain(|name| name.starts_with(CALIBRATION));
        Ok(found.into_iter().map(|name| self.root.join(name)).collect())
    }

    /// Marks the directory as that of a run of `recipe`, unless it is a run's. The caller has locked it.
    ///
    /// # Errors
    /// As [`Self::check`], and if the mark cannot be written.
    pub fn claim(&self, recipe: &Recipe) -> Result<(), Error> {
        self.check()?;
        match self.is_run()? {
            true => Ok(()),
            false => self.write_mark(&recipe.to_toml()?),
        }
    }

    /// Moves every file of an earlier run into `before-1`, or the next free number, where that run can go on; other
    /// files stay. The directory is then one of a run of `recipe`. The caller has claimed and locked it.
    ///
    /// # Errors
    /// Fails if a file cannot be moved or written. The directory is then still the earlier run's.
    pub fn begin_anew(&self, recipe: &Recipe) -> Result<(), Error> {
        let mut moved = names(&self.root)?;
        moved.retain(|name| is_own(name));
        if moved.is_empty() {
            return Ok(());
        }
        // Until everything has moved, the directory keeps the earlier recipe.
        let earlier = match self.marked_recipe()? {
            Some(text) => text,
            None => {
                let path = self.recipe();
                moh_files::utf8(&path, moh_files::read_bounded(&path, MAX_BYTES, "a recipe")?)?
            }
        };
        self.write_mark(&earlier)?;
        let aside = RunDirectory::new(first_free(|n| self.root.join(format!("{BEFORE}{n}"))));
        fs::create_dir(aside.root()).map_err(moh_files::io(aside.root()))?;
        aside.write_mark(&earlier)?;
        for name in moved {
            let from = self.root.join(&name);
            fs::rename(&from, aside.root().join(&name)).map_err(moh_files::io(&from))?;
        }
        moh_files::sync_directory(&self.root).map_err(moh_files::io(&self.root))?;
        self.write_mark(&recipe.to_toml()?)
    }

    /// Removes the leftovers of earlier processes beside and among the checkpoints, and gives an export that one of
    /// them was replacing its name back. The caller has locked the directory.
    pub fn clear_remains(&self) -> Result<(), Error> {
        for place in [self.export(), self.model()] {
            moh_files::PendingDirectory::recover(&place).map_err(moh_files::io(&place))?;
        }
        let checkpoints = self.checkpoints();
        let kinds =
            [(&self.root, is_remain as fn(&str) -> bool), (&checkpoints, is_unfinished_checkpoint)];
        for (directory, is_one) in kinds {
            for name in names(directory)?.into_iter().filter(|name| is_one(name)) {
                let path = directory.join(name);
                let removed = match path.is_dir() {
                    true => fs::remove_dir_all(&path),
                    false => fs::remove_file(&path),
                };
                unless_missing(&path, removed)?;
            }
        }
        Ok(())
    }
}

/// The path without links, whose end need not exist.
fn absolute(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let mut missing = Vec::new();
    let mut known = path.as_path();
    loop {
        if let Ok(found) = known.canonicalize() {
            return missing.into_iter().rev().fold(found, |path: PathBuf, name| path.join(name));
        }
        let (Some(parent), Some(name)) = (known.parent(), known.file_name()) else { return path };
        missing.push(name.to_owned());
        known = parent;
    }
}
