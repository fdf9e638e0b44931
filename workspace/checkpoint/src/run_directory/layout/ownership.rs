//! Ownership of a directory.
//!
//! A run may use a directory that is absent, empty or marked by a run. [`MARK`] is written before all other
//! files, and no file is written into a directory without it. In a marked directory, the names in `layout.rs`
//! are the run's.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use moh_files::{PendingDirectory, TEMPORARY, first_free, first_free_suffixed};
use moh_recipe::Recipe;

use super::{CALIBRATION, RunDirectory};
use crate::listing::names;
use crate::run_directory::run_lock::LOCK;
use crate::{Error, Result};

/// The file that marks a directory as a run's. It contains the run's recipe.
pub(super) const MARK: &str = ".moh-run";

/// The directory that a file system creates in its root.
const OF_FILE_SYSTEM: &str = "lost+found";

/// Maximum number of other files' names in a message.
const MAX_NAMED: usize = 3;

/// Joins names for a message: the first names, and the number of further names.
pub fn join_names(names: &[String]) -> String {
    let shown = names[..names.len().min(MAX_NAMED)].join(", ");
    match names.len().checked_sub(MAX_NAMED) {
        Some(more @ 1..) => format!("{shown} and {more} more"),
        _ => shown,
    }
}

impl RunDirectory {
    /// Returns the path of the run's mark, which has its recipe.
    pub(super) fn mark_path(&self) -> PathBuf {
        self.root.join(MARK)
    }

    /// Returns the run with its `recipe.toml` at `path`, directly or through links, or `None` for any other file.
    pub fn of_recipe(path: &Path) -> Result<Option<Self>> {
        let mut path = path.to_owned();
        loop {
            let run = RunDirectory::new(moh_files::parent(&path));
            let is_its_name = path.file_name().is_some_and(|name| name == "recipe.toml");
            if is_its_name && run.is_run()? {
                return Ok(Some(run));
            }
            // An existing file ends a chain of links.
            let target = path.read_link().ok().filter(|_| path.is_file());
            let Some(target) = target else { return Ok(None) };
            path = path.parent().unwrap_or(Path::new("")).join(target);
        }
    }

    /// Fails if the directory was moved or removed since the run marked it. Ignores a file system that does not
    /// answer.
    pub fn check_mark(&self) -> Result<()> {
        let path = self.mark_path();
        match fs::metadata(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                Err(moh_files::io(&path)(error).into())
            }
            _ => Ok(()),
        }
    }

    /// Loads the recipe at `path` with `key=value` overrides. A run's own recipe may have a key that only earlier
    /// versions had.
    pub fn load_recipe(path: &Path, overrides: &[String]) -> Result<Recipe> {
        Ok(match Self::of_recipe(path)? {
            Some(_) => Recipe::load_stored(path, overrides)?,
            None => Recipe::load(path, overrides)?,
        })
    }

    /// Returns whether the directory is a run's: it has a mark, or a recipe and checkpoints of a version without marks.
    pub fn is_run(&self) -> Result<bool> {
        let has_checkpoints = || Ok::<_, Error>(self.marker().is_file() || self.has_names()?);
        Ok(self.mark_path().is_file() || (self.recipe().is_file() && has_checkpoints()?))
    }

    /// Fails if a run must not use the directory: it exists, is not empty and is not a run's.
    pub fn check(&self) -> Result<()> {
        if self.root.symlink_metadata().is_ok() && !self.root.is_dir() {
            let what = match self.root.read_link() {
                Ok(target) => format!("a link to {}, which is not a directory", target.display()),
                Err(_) => "a file".to_owned(),
            };
            let reason = format!(
                "run.dir is {what}: choose a directory that is new or a run's, such as --set run.dir={}",
                self.free_sibling().display()
            );
            return Err(moh_files::unusable(&self.root, reason).into());
        }
        if self.is_run()? {
            return Ok(());
        }
        let found = self.occupants()?;
        if found.is_empty() {
            return Ok(());
        }
        let reason = format!(
            "is not a run directory, and holds {}: a run takes a directory that is new, empty or its own, so choose \
             another one, such as --set run.dir={}",
            join_names(&found),
            self.free_sibling().display()
        );
        Err(moh_files::unusable(&self.root, reason).into())
    }

    /// Returns the names in the directory, except names that exist before a process has marked the directory.
    pub fn occupants(&self) -> Result<Vec<String>> {
        let mut found = names(&self.root)?;
        let unfinished = format!("{TEMPORARY}{MARK}");
        let precedes_mark = |name: &str| [LOCK, OF_FILE_SYSTEM].contains(&name);
        found.retain(|name| !precedes_mark(name) && !name.starts_with(&unfinished));
        Ok(found)
    }

    /// Returns a free name next to the directory, or in it if the directory has no name of its own, such as `.`.
    pub fn free_sibling(&self) -> PathBuf {
        let name = self.root.file_name();
        let Some(name) = name.map(|name| name.to_string_lossy()) else {
            return first_free_suffixed(|suffix| self.root.join(format!("run{suffix}")));
        };
        let parent = self.root.parent().unwrap_or(Path::new(""));
        first_free(|n| parent.join(format!("{name}-{}", n.saturating_add(1))))
    }

    /// Fails if this directory contains a file that the new run reads, or lies in the directory of a model that the run
    /// reads. Each input has its key in the recipe, its path, and whether it is a model's directory.
    pub fn check_inputs<'a>(
        &self,
        inputs: impl Iterator<Item = (String, &'a Path, bool)>,
    ) -> Result<()> {
        let root = absolute(&self.root);
        for (key, input, is_model) in inputs {
            let at = absolute(input);
            let relation = match () {
                () if at == root => "is",
                () if at.starts_with(&root) => "holds",
                () if is_model && root.starts_with(&at) => "lies inside",
                () => continue,
            };
            let reason = format!(
                "run.dir {relation} {}, which {key} names and no run may change: choose another run.dir",
                input.display()
            );
            return Err(moh_files::unusable(&self.root, reason).into());
        }
        Ok(())
    }

    /// Returns the files with the results of calibrations.
    pub fn calibration_files(&self) -> Result<Vec<PathBuf>> {
        let mut found = names(&self.root)?;
        found.retain(|name| name.starts_with(CALIBRATION));
        Ok(found.into_iter().map(|name| self.root.join(name)).collect())
    }

    /// Marks the directory as a run's, with `recipe`, unless it is already marked. The caller has locked it.
    pub fn claim(&self, recipe: &Recipe) -> Result<()> {
        self.check()?;
        match self.is_run()? {
            true => Ok(()),
            false => self.write_mark(&recipe.to_toml()?),
        }
    }

    /// Renames the directory of an earlier run to `NAME.before-1`, or the next free number, where that run can resume.
    /// Creates an empty directory in its place. Returns the new path, or `None` without an earlier run. The caller has
    /// locked the directory.
    ///
    /// # Errors
    /// Fails if the directory cannot be renamed or created, or if it is this process's working directory.
    pub fn set_aside(&self) -> Result<Option<PathBuf>> {
        if !self.is_run()? {
            return Ok(None);
        }
        // A link stays, and leads to the new directory.
        let root = self.root.canonicalize().map_err(moh_files::io(&self.root))?;
        // Relative paths of this process would lead into the earlier run.
        if std::env::current_dir().is_ok_and(|current| current.starts_with(&root)) {
            let reason = "is the working directory, so it cannot be renamed: start the command in another directory";
            return Err(moh_files::unusable(&self.root, reason).into());
        }
        let name = root.file_name().unwrap_or_default().to_string_lossy();
        let aside = first_free(|n| root.with_file_name(format!("{name}.before-{n}")));
        fs::rename(&root, &aside).map_err(moh_files::io(&root))?;
        fs::create_dir(&root).map_err(moh_files::io(&root))?;
        let parent = moh_files::parent(&root);
        moh_files::sync_directory(parent).map_err(moh_files::io(parent))?;
        Ok(Some(aside))
    }

    /// Removes the leftovers of earlier processes, and restores the name of an export that a process was replacing.
    /// The caller has locked the directory.
    pub fn clear_remains(&self) -> Result<()> {
        for place in [self.export(), self.model()] {
            PendingDirectory::recover(&place).map_err(moh_files::io(&place))?;
        }
        crate::remove(self, &[])
    }
}

/// Returns the absolute path without links. Its last components need not exist.
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
