//! The list of bad records, and the limit on their number.

use std::io::Write;
use std::path::{Path, PathBuf};

use moh_files::PendingFile;
use serde_json::json;

use super::Counts;
use crate::prepare::preparation::BadRecords;
use crate::prepare::reader::BadRecord;
use crate::prepare::reader::Place;
use crate::prepare::{Error, Result};

/// Bad records after which their share is checked while more records are read. Before that, a few bad records would be
/// a large share.
const CHECKED_AFTER: u64 = 100;

/// The name of the list until it is complete.
const NAME: &str = "bad.jsonl";

/// The list, one JSON object a line: `path`, `line` or `row`, `reason`.
#[derive(Debug)]
pub(crate) struct BadList {
    working: PathBuf,
    file: PendingFile,
    bytes: u64,
}

impl BadList {
    /// Returns the list of a preparation that was interrupted while its files got their names. Returns `None` if the
    /// list has its name, or is empty.
    pub(crate) fn complete(path: &Path, directory: &Path) -> Result<Option<Self>> {
        let working = directory.join(NAME);
        match moh_files::unless_missing(&working, working.metadata())? {
            Some(file) if file.len() > 0 => Self::resume(path, directory, file.len()).map(Some),
            _ => Ok(None),
        }
    }

    /// Resumes the list for `path` in `directory` after `bytes`. If the list is missing and `bytes` is 0, creates it.
    pub(crate) fn resume(path: &Path, directory: &Path, bytes: u64) -> Result<Self> {
        let working = directory.join(NAME);
        let file = PendingFile::resume(path, &working, bytes).map_err(moh_files::io(&working))?;
        Ok(Self { working, file, bytes })
    }

    /// Adds a record of the input `path`. Fails with the record if bad records are not skipped. Also fails if too many
    /// records are bad, or if the disk is full.
    pub(crate) fn push(
        &mut self,
        path: &Path,
        record: &BadRecord,
        allowed: BadRecords,
        counts: Counts,
    ) -> Result<()> {
        if allowed == BadRecords::Refuse {
            return Err(record.clone().error(path));
        }
        let BadRecord { place, reason } = record;
        let shown = path.display().to_string();
        let line = match place {
            Place::Line(line) => json!({"path": shown, "line": line, "reason": reason}),
            Place::Row(row) => json!({"path": shown, "row": row, "reason": reason}),
            Place::Whole => json!({"path": shown, "reason": reason}),
        };
        let line = format!("{line}\n");
        self.file.write_all(line.as_bytes()).map_err(moh_files::io(&self.working))?;
        self.bytes += line.len() as u64;
        self.check(allowed, counts, false)
    }

    /// Checks the share of bad records. Unless `is_end`, checks it only if there are many bad records.
    pub(crate) fn check(&self, allowed: BadRecords, counts: Counts, is_end: bool) -> Result<()> {
        let BadRecords::Skip { max_share } = allowed else { return Ok(()) };
        let share = counts.bad as f64 / counts.records.max(1) as f64;
        if share <= max_share || (!is_end && counts.bad <= CHECKED_AFTER) {
            return Ok(());
        }
        Err(Error::Invalid(format!(
            "{} of {} records are bad, {:.3}% and more than --max-bad {}%: correct the inputs, or allow more",
            counts.bad,
            counts.records,
            100.0 * share,
            100.0 * max_share
        )))
    }

    pub(crate) fn sync(&mut self) -> Result<u64> {
        self.file.sync().map_err(moh_files::io(&self.working))?;
        Ok(self.bytes)
    }

    /// Renames the synced list to its final name if it has a record.
    pub(crate) fn publish(self) -> Result<Option<PathBuf>> {
        if self.bytes == 0 {
            return Ok(None);
        }
        let path = self.file.path().to_path_buf();
        self.file.replace().map_err(moh_files::io(&path))?;
        Ok(Some(path))
    }
}
