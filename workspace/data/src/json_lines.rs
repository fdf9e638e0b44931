//! Lines of JSON objects from an untrusted input: one object per line, blank lines in between.
//! Memory holds one line, of a limited length.

use std::io::{BufRead, Read};
use std::path::Path;

use serde_json::{Map, Value};

use crate::{Error, Result};

/// Returns the objects of an input, each with its line number, counted from 1. Errors name `path` and the line. A line
/// longer than `max_line_bytes` is an error.
pub fn json_lines<R: BufRead>(
    path: &Path,
    mut reader: R,
    max_line_bytes: u64,
) -> impl Iterator<Item = Result<(u64, Map<String, Value>)>> {
    let (mut number, mut bytes) = (0, Vec::new());
    std::iter::from_fn(move || {
        loop {
            bytes.clear();
            let mut limited = reader.by_ref().take(max_line_bytes.saturating_add(1));
            match limited.read_until(b'\n', &mut bytes) {
                Ok(0) => return None,
                Ok(_) => number += 1,
                Err(error) => return Some(Err(Error::io(path, "read")(error))),
            }
            let fault = |reason| Error::Invalid(format!("{}:{number}: {reason}", path.display()));
            match object(&bytes, max_line_bytes, number == 1).map_err(fault) {
                Ok(None) => {}
                Ok(Some(fields)) => return Some(Ok((number, fields))),
                Err(error) => return Some(Err(error)),
            }
        }
    })
}

/// Parses the object of a line. Returns `None` if the line is blank.
fn object(line: &[u8], most: u64, is_first: bool) -> Result<Option<Map<String, Value>>, String> {
    if line.len() as u64 > most {
        return Err(format!("longer than {most} bytes, not JSON lines"));
    }
    let mut line = std::str::from_utf8(line)
        .map_err(|fault| format!("not UTF-8 at byte {} of the line", fault.valid_up_to()))?;
    if is_first {
        line = line.strip_prefix('\u{feff}').unwrap_or(line);
    }
    if line.trim().is_empty() {
        return Ok(None);
    }
    match serde_json::from_str(line) {
        Ok(Value::Object(fields)) => Ok(Some(fields)),
        Ok(_) => Err("expected one JSON object per line".to_owned()),
        Err(fault) => {
            // The column is useful; "line 1" is not.
            let text = fault.to_string();
            let reason = text.split(" at line ").next().unwrap_or(&text);
            Err(format!("broken JSON at column {}: {reason}", fault.column()))
        }
    }
}
