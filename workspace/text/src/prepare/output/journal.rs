//! The progress of a preparation: a file of JSON lines, each synced before it counts. The first line is the request.
//! Inputs, as they were when they were opened, and checkpoints follow. If a process was killed while it wrote, its last
//! line has no end.

use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use moh_data::Written;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::prepare::pipeline::Place;
use crate::prepare::reader::Identity;
use crate::prepare::remote::moved;
use crate::prepare::{Error, Result};

const MAX_BYTES: u64 = 1 << 30;

/// The values that identify the result of a preparation, by name: inputs and options that change bytes.
pub(crate) type Request = BTreeMap<String, Value>;

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    Request(Request),
    Input {
        number: usize,
        identity: Identity,
    },
    Checkpoint(Checkpoint),
    /// All documents are written and synced; only final names are missing.
    Complete,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Checkpoint {
    pub(crate) place: Place,
    pub(crate) files: Vec<FileState>,
    pub(crate) counts: super::Counts,
    #[serde(default)]
    pub(crate) notes: super::ChatNotes,
    /// Stored bytes of inputs.
    pub(crate) input_bytes: u64,
    /// Hashes of texts, for `--exact-dedup`.
    pub(crate) seen: u64,
    pub(crate) bad_bytes: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct FileState {
    pub(crate) written: Written,
    pub(crate) text_bytes: u64,
    /// The special tokens that texts named, with their number.
    pub(crate) special: BTreeMap<u32, u64>,
    /// Tokens of conversations that are trained on.
    #[serde(default)]
    pub(crate) trained: u64,
}

/// An open journal, which this process has locked.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    file: File,
}

#[derive(Debug, Default)]
pub(crate) struct Recorded {
    pub(crate) checkpoint: Option<Checkpoint>,
    pub(crate) inputs: BTreeMap<usize, Identity>,
    pub(crate) is_complete: bool,
}

impl Journal {
    /// Opens the journal `path` of a preparation, or starts it with `request`.
    pub(crate) fn open(path: &Path, request: &Request) -> Result<(Self, Recorded)> {
        let mut options = File::options();
        let options = options.read(true).write(true).create(true).truncate(false);
        let mut file = options.open(path).map_err(moh_files::io(path))?;
        // Without locks, as on some network file systems, another process is not noticed.
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            let reason = "another process prepares this token file: wait until it ends, or choose another --out";
            return Err(Error::unusable(path, reason));
        }
        let mut text = Vec::new();
        let mut limited = Read::by_ref(&mut file).take(MAX_BYTES);
        limited.read_to_end(&mut text).map_err(moh_files::io(path))?;
        // Bytes after the last end of a line were not synced.
        let length = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |last| last + 1);
        text.truncate(length);
        moh_files::shorten(&mut file, length as u64).map_err(moh_files::io(path))?;
        let mut journal = Self { path: path.to_path_buf(), file };
        let (found, mut recorded) = journal.read(&text)?;
        if recorded.is_complete || recorded.checkpoint.is_some() {
            journal.compare(&found, request)?;
        } else {
            // Without a checkpoint nothing is lost: all work is done again.
            recorded = Recorded::default();
            moh_files::shorten(&mut journal.file, 0).map_err(moh_files::io(path))?;
            journal.append(&Line::Request(request.clone()))?;
            let directory = moh_files::parent(path);
            moh_files::sync_directory(directory).map_err(moh_files::io(directory))?;
        }
        Ok((journal, recorded))
    }

    fn read(&self, text: &[u8]) -> Result<(Request, Recorded)> {
        let (mut request, mut recorded) = (Request::new(), Recorded::default());
        for (number, line) in text.split_inclusive(|&byte| byte == b'\n').enumerate() {
            let line = serde_json::from_slice(line).map_err(|error| {
                let reason = format!("line {}: {error}: begin anew with --begin-anew", number + 1);
                Error::unusable(&self.path, reason)
            })?;
            match line {
                Line::Request(found) => request = found,
                Line::Input { number, identity } => {
                    recorded.inputs.insert(number, identity);
                }
                Line::Checkpoint(checkpoint) => recorded.checkpoint = Some(checkpoint),
                Line::Complete => recorded.is_complete = true,
            }
        }
        Ok((request, recorded))
    }

    /// Checks that the journal was started for `request`.
    fn compare<'a>(&self, found: &'a Request, request: &'a Request) -> Result<()> {
        let names = found.keys().chain(request.keys());
        let Some(name) = names.into_iter().find(|&name| found.get(name) != request.get(name))
        else {
            return Ok(());
        };
        let shown =
            |request: &Request| request.get(name).map_or("nothing".to_owned(), Value::to_string);
        let directory = moh_files::parent(&self.path);
        let texts = |request: &'a Request| {
            let values = request.get(name).and_then(Value::as_array).into_iter().flatten();
            values.filter_map(Value::as_str)
        };
        if let Some(moved) = moved(texts(found), texts(request)) {
            let reason = format!(
                "holds what an interrupted preparation has done, and since then {moved} to continue, or begin anew with \
                 --begin-anew"
            );
            return Err(Error::unusable(directory, reason));
        }
        let reason = format!(
            "holds what an interrupted preparation has done with another {name} ({}, not {}): give the \
             command that was interrupted, or begin anew with --begin-anew",
            shown(found),
            shown(request)
        );
        Err(Error::unusable(directory, reason))
    }

    pub(crate) fn input(&mut self, number: usize, identity: Identity) -> Result<()> {
        // Synced with the next checkpoint: without one, the input counts as unread.
        self.write(&Line::Input { number, identity })
    }

    /// Records a checkpoint. Its files are synced already.
    pub(crate) fn checkpoint(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        self.append(&Line::Checkpoint(checkpoint.clone()))
    }

    pub(crate) fn complete(&mut self) -> Result<()> {
        self.append(&Line::Complete)
    }

    fn append(&mut self, line: &Line) -> Result<()> {
        self.write(line)?;
        Ok(self.file.sync_data().map_err(moh_files::io(&self.path))?)
    }

    fn write(&mut self, line: &Line) -> Result<()> {
        // Maps with keys of strings and integers always serialise.
        let mut text = serde_json::to_vec(line).unwrap_or_default();
        text.push(b'\n');
        Ok(self.file.write_all(&text).map_err(moh_files::io(&self.path))?)
    }
}

#[cfg(test)]
mod tests {
    use moh_testkit::assert_refused;

    use super::*;

    fn place() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        (dir, path)
    }

    fn request(field: &str) -> Request {
        Request::from([("field".to_owned(), field.into())])
    }

    fn checkpoint(input_bytes: u64) -> Checkpoint {
        Checkpoint { input_bytes, files: vec![FileState::default()], ..Checkpoint::default() }
    }

    #[test]
    fn the_newest_complete_line_counts() {
        let (_dir, path) = place();
        let (mut journal, recorded) = Journal::open(&path, &request("text")).unwrap();
        assert!(recorded.checkpoint.is_none());
        journal.input(0, Identity::default()).unwrap();
        journal.checkpoint(&checkpoint(1)).unwrap();
        journal.checkpoint(&checkpoint(2)).unwrap();
        drop(journal);
        let whole = std::fs::read(&path).unwrap();
        let last = whole[..whole.len() - 1].iter().rposition(|&byte| byte == b'\n').unwrap() + 1;
        for cut in last..whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let (journal, recorded) = Journal::open(&path, &request("text")).unwrap();
            assert_eq!(recorded.checkpoint, Some(checkpoint(1)), "{cut}");
            assert_eq!(recorded.inputs.len(), 1);
            drop(journal);
            assert_eq!(std::fs::read(&path).unwrap().len(), last);
        }
    }

    #[test]
    fn without_a_checkpoint_it_begins_again() {
        let (_dir, path) = place();
        drop(Journal::open(&path, &request("text")).unwrap());
        let (mut journal, _) = Journal::open(&path, &request("body")).unwrap();
        journal.complete().unwrap();
        drop(journal);
        assert!(Journal::open(&path, &request("body")).unwrap().1.is_complete);
        assert!(Journal::open(&path, &request("text")).is_err());
    }

    #[test]
    fn another_request_is_refused_and_another_process_too() {
        let (_dir, path) = place();
        let (mut journal, _) = Journal::open(&path, &request("text")).unwrap();
        journal.checkpoint(&checkpoint(1)).unwrap();
        assert_refused(Journal::open(&path, &request("text")), "another process");
        drop(journal);
        assert_refused(
            Journal::open(&path, &request("body")),
            "another field (\"text\", not \"body\")",
        );
    }

    #[test]
    fn bytes_of_other_programs_are_refused() {
        let (_dir, path) = place();
        for bytes in [&b"no journal\n"[..], b"{\"checkpoint\":{}}\n", b"\xff\n", b"{}\n"] {
            std::fs::write(&path, bytes).unwrap();
            assert_refused(Journal::open(&path, &request("text")), "line 1: ");
        }
    }
}
