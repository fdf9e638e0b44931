//! Writes texts as input of [`prepare`](crate::prepare()): JSON lines, one document per line.

use std::path::Path;

use crate::pending::{Pending, refuse_existing};
use crate::{Error, Result};

/// Writes `text(0)` to `text(count - 1)` as JSON lines, `{"text": ...}` each. `progress` receives
/// the number of texts written and their total.
///
/// # Errors
/// [`Error::Exists`] if the file exists and may not be overwritten, [`Error::Empty`] if `count` is
/// 0; [`Error::Io`] if the file cannot be written.
pub fn write_documents(
    path: &Path,
    count: u64,
    text: impl Fn(u64) -> String,
    overwrite: bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<()> {
    if count == 0 {
        return Err(Error::Empty { reason: "no documents: write at least one".to_owned() });
    }
    refuse_existing(path, overwrite)?;
    let mut file = Pending::create(path)?;
    for number in 0..count {
        let line = serde_json::json!({"text": text(number)});
        file.write(format!("{line}\n").as_bytes())?;
        progress(number + 1, count);
    }
    file.publish(overwrite)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_written_as_json_lines() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.jsonl");
        let text = |number| format!("\"{number}\"\nline");
        let write =
            |count, overwrite| write_documents(&path, count, text, overwrite, &mut |_, _| {});
        write(3, false).unwrap();
        let written = std::fs::read_to_string(&path).unwrap();
        assert_eq!(written.lines().count(), 3);
        for (number, line) in written.lines().enumerate() {
            let object: serde_json::Value = serde_json::from_str(line).unwrap();
            assert_eq!(object["text"], text(number as u64));
        }
        assert!(matches!(write(3, false), Err(Error::Exists { .. })));
        assert!(matches!(write(0, true), Err(Error::Empty { .. })));
        write(2, true).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 2);
    }
}
