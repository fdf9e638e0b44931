//! The runs of a page: run directories, and run directories within a directory. Remarks say which are omitted.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context as _, bail};

use crate::chart::{printable, shorten};
use crate::run_log::{LeftOut, RunLog, is_run};
use moh_program::counted;

/// The most runs of a directory on a page, the newest. More curves could not be told apart.
const MAX_RUNS: usize = 20;

/// The most directories that a remark names.
const MAX_NAMED: usize = 8;

/// The most characters of the reason why a run is omitted.
const REASON_CHARACTERS: usize = 240;

#[derive(Debug)]
pub struct Runs {
    /// The runs, with distinct names.
    pub logs: Vec<RunLog>,
    /// Sentences on omitted runs, directories and lines, with the reasons.
    pub remarks: Vec<String>,
}

impl Runs {
    /// Reads the directories `paths`. Each is a run directory, or contains run directories.
    ///
    /// # Errors
    /// Fails if a directory is neither, or if a file of a run cannot be read. Within a directory of runs, such a run is
    /// omitted instead, unless no run can be read.
    pub fn read(paths: &[PathBuf]) -> anyhow::Result<Self> {
        let mut runs = Runs { logs: Vec::new(), remarks: Vec::new() };
        for path in paths {
            match path.is_dir() && !is_run(path) {
                true => runs.add_those_in(path)?,
                false => runs.logs.push(RunLog::read(path)?),
            }
        }
        name(&mut runs.logs);
        for log in &runs.logs {
            runs.remarks.extend(log.left_out.iter().map(|left_out| of_lines(log, left_out)));
        }
        Ok(runs)
    }

    /// Adds the runs in the directory `path`, by name.
    fn add_those_in(&mut self, path: &Path) -> anyhow::Result<()> {
        let shown = path.display();
        let (mut found, mut others) = (Vec::new(), Vec::new());
        for entry in std::fs::read_dir(path).with_context(|| shown.to_string())? {
            let path = entry.with_context(|| shown.to_string())?.path();
            match path.is_dir() {
                true if is_run(&path) => found.push((written(&path), path)),
                true => others.push(path),
                false => {}
            }
        }
        if found.is_empty() {
            bail!(
                "{shown}: is not a run directory, which has a recipe.toml and a metrics.jsonl, and holds none: name \
                 the run.dir of a recipe, or a directory of such directories"
            );
        }
        // The newest first; runs of the same moment are ordered by name.
        found.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
        let mut found: Vec<PathBuf> = found.into_iter().map(|(_, path)| path).collect();
        let older = found.split_off(found.len().min(MAX_RUNS));
        found.sort();
        let mut broken = Vec::new();
        for path in &found {
            match RunLog::read(path) {
                Ok(log) => self.logs.push(log),
                Err(error) => broken.push(format!("{error:#}")),
            }
        }
        if broken.len() == found.len() {
            bail!("{shown}: none of its runs can be read: {}", broken.swap_remove(0));
        }
        let remarks = broken.into_iter().take(MAX_NAMED);
        self.remarks.extend(
            remarks.map(|error| format!("left out: {}", shorten(&error, REASON_CHARACTERS))),
        );
        let newest = format!("older than the newest {MAX_RUNS} runs");
        self.remarks.extend(of_directories(path, older, &newest));
        self.remarks.extend(of_directories(path, others, "not run directories"));
        Ok(())
    }
}

/// Returns when a run last wrote a step, or else its recipe.
fn written(run: &Path) -> SystemTime {
    let run = moh_checkpoint::run_directory::RunDirectory::new(run);
    let moment = |path: PathBuf| std::fs::metadata(path).and_then(|data| data.modified()).ok();
    moment(run.metrics()).or_else(|| moment(run.recipe())).unwrap_or(SystemTime::UNIX_EPOCH)
}

/// Returns the remark that directories in `path` are left out; `None` without any.
fn of_directories(path: &Path, mut left_out: Vec<PathBuf>, reason: &str) -> Option<String> {
    left_out.sort();
    let count = left_out.len();
    let names = left_out.iter().filter_map(|path| path.file_name()).take(MAX_NAMED);
    let names: Vec<String> =
        names.map(|name| shorten(&name.to_string_lossy(), REASON_CHARACTERS / 4)).collect();
    let more = count.saturating_sub(names.len());
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let path = printable(&path.to_string_lossy());
    (count > 0).then(|| format!("left out of {path}, as {reason}: {}{more}", names.join(", ")))
}

/// Returns the remark that lines of a file are left out.
fn of_lines(log: &RunLog, left_out: &LeftOut) -> String {
    let LeftOut { file, count, first } = left_out;
    let lines: Vec<String> =
        first.iter().map(|(number, reason)| format!("line {number}: {reason}")).collect();
    let more = count.saturating_sub(first.len() as u64);
    let more = if more > 0 { format!("; and {more} more") } else { String::new() };
    let file = printable(&log.root.join(file).to_string_lossy());
    format!("left out of {file}: {}, {}{more}", counted(*count, "line"), lines.join("; "))
}

/// Renames runs with the same name to their paths.
fn name(logs: &mut [RunLog]) {
    let mut count = BTreeMap::<String, usize>::new();
    for log in &*logs {
        *count.entry(log.name.clone()).or_default() += 1;
    }
    for log in logs {
        if count.get(&log.name).is_some_and(|&count| count > 1) {
            log.name = printable(&log.root.to_string_lossy());
        }
    }
}
