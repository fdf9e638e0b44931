//! Lines of JSON in a file that grows in place. A line is complete once its newline is written. Text
//! after the last newline is the remainder of an interrupted write.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

use crate::{Error, Result};
use moh_files::unless_missing;

const MAX_LINE_BYTES: u64 = 64 << 10;

/// Iterates over the complete lines of a file, with a maximum length.
pub(crate) struct Lines {
    path: PathBuf,
    file: BufReader<File>,
    number: u64,
    line: Vec<u8>,
}

impl Lines {
    /// Opens a file. Returns `None` if it is missing.
    pub(crate) fn open(path: &Path) -> Result<Option<Self>> {
        let file = unless_missing(path, moh_files::open(path))?;
        Ok(file.map(|file| Lines {
            path: path.to_path_buf(),
            file: BufReader::new(file),
            number: 0,
            line: Vec::new(),
        }))
    }

    /// Returns the next line with its newline, or `None` at the end. An incomplete last line is skipped.
    pub(crate) fn next(&mut self) -> Result<Option<&[u8]>> {
        self.line.clear();
        let mut bounded = (&mut self.file).take(MAX_LINE_BYTES);
        bounded.read_until(b'\n', &mut self.line).map_err(moh_files::io(&self.path))?;
        if self.line.last() == Some(&b'\n') {
            self.number += 1;
            return Ok(Some(&self.line));
        }
        if self.line.len() as u64 == MAX_LINE_BYTES {
            let reason = format!("a line has at most {MAX_LINE_BYTES} bytes");
            return Err(self.refuse_line(self.number + 1, reason));
        }
        Ok(None)
    }

    /// Returns the values of all remaining lines.
    pub(crate) fn parse<T: DeserializeOwned>(self) -> Result<Vec<T>> {
        let mut values = Vec::new();
        self.for_each(|value| values.push(value))?;
        Ok(values)
    }

    /// Passes the value of each remaining line to `visit`.
    pub(crate) fn for_each<T: DeserializeOwned>(mut self, mut visit: impl FnMut(T)) -> Result<()> {
        while let Some(line) = self.next()? {
            match serde_json::from_slice(line) {
                Ok(value) => visit(value),
                Err(error) => return Err(self.refuse(error.to_string())),
            }
        }
        Ok(())
    }

    /// Returns an error of the line that was read last.
    pub(crate) fn refuse(&self, reason: String) -> Error {
        self.refuse_line(self.number, reason)
    }

    fn refuse_line(&self, line: u64, reason: String) -> Error {
        Error::Lines(format!("{}:{line}: {reason}", self.path.display()))
    }
}
