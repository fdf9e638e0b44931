//! Lines of JSON objects from an untrusted input: one object per line, blank lines in between.
//! Memory holds one line, of a limited length.

use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::{Error, Result};

/// Iterates over the objects of an input; errors name the input and the line.
pub struct JsonLines<R> {
    path: PathBuf,
    reader: R,
    max_line_bytes: u64,
    line: u64,
    bytes: Vec<u8>,
}

/// An object and its place in the input.
pub struct JsonLine {
    /// The number of the line, counted from 1.
    pub line: u64,
    /// Its fields.
    pub fields: Map<String, Value>,
}

impl<R: BufRead> JsonLines<R> {
    /// Reads the lines of `reader`, which errors call `path`; a line longer than `max_line_bytes`
    /// is an error.
    pub fn new(path: &Path, reader: R, max_line_bytes: u64) -> Self {
        JsonLines { path: path.to_path_buf(), reader, max_line_bytes, line: 0, bytes: Vec::new() }
    }

    /// The next object; `None` at the end.
    pub fn next_object(&mut self) -> Result<Option<JsonLine>> {
        loop {
            self.bytes.clear();
            let mut limited = self.reader.by_ref().take(self.max_line_bytes.saturating_add(1));
            let read = limited
                .read_until(b'\n', &mut self.bytes)
                .map_err(Error::io(&self.path, "read"))?;
            if read == 0 {
                return Ok(None);
            }
            self.line += 1;
            if read as u64 > self.max_line_bytes {
                return Err(self
                    .fault(format!("longer than {} bytes, not JSON lines", self.max_line_bytes)));
            }
            let mut line = std::str::from_utf8(&self.bytes).map_err(|fault| {
                self.fault(format!("not UTF-8 at byte {} of the line", fault.valid_up_to()))
            })?;
            if self.line == 1 {
                line = line.strip_prefix('\u{feff}').unwrap_or(line);
            }
            if line.trim().is_empty() {
                continue;
            }
            let fields = object(line).map_err(|reason| self.fault(reason))?;
            return Ok(Some(JsonLine { line: self.line, fields }));
        }
    }

    /// An error of the line that was read last.
    fn fault(&self, reason: String) -> Error {
        Error::Invalid(format!("{}:{}: {reason}", self.path.display(), self.line))
    }
}

fn object(line: &str) -> Result<Map<String, Value>, String> {
    let value = serde_json::from_str(line).map_err(|fault| {
        // The column is useful; "line 1" is not.
        let text = fault.to_string();
        let reason = text.split(" at line ").next().unwrap_or(&text);
        format!("broken JSON at column {}: {reason}", fault.column())
    })?;
    match value {
        Value::Object(fields) => Ok(fields),
        _ => Err("expected one JSON object per line".to_owned()),
    }
}
