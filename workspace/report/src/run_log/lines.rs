//! Lines of JSON for a page. A line that cannot be read is omitted with a remark, so that a broken line costs neither
//! other lines nor the page. Training and `moh-train` are strict instead (`moh_checkpoint::run_log::metrics`).

use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read as _};
use std::path::Path;

use anyhow::Context as _;

use crate::chart::shorten;

/// Maximum bytes of a line, as in `moh_checkpoint::run_log`.
const MAX_LINE_BYTES: u64 = 64 << 10;

/// The most lines of a file that are named. Further lines are only counted.
const MAX_NAMED: usize = 5;

/// The most characters of a reason, which may quote the line.
const REASON_CHARACTERS: usize = 160;

#[derive(Debug, Clone, PartialEq)]
pub struct LeftOut {
    /// The file's name in the run directory.
    pub file: String,
    pub count: u64,
    /// The first omitted lines: number from 1, and reason.
    pub first: Vec<(u64, String)>,
}

impl LeftOut {
    fn add(&mut self, line: u64, reason: &str) {
        self.count += 1;
        if self.first.len() < MAX_NAMED {
            self.first.push((line, shorten(reason, REASON_CHARACTERS)));
        }
    }
}

/// Calls `visit` with the number and the text of each complete line of the file at `path`. Adds lines that `visit`
/// rejects to `left_out`. Returns the number of lines, 0 for a missing file. Text after the last line end is a line
/// that is still being written.
pub(super) fn for_each(
    path: &Path,
    left_out: &mut Vec<LeftOut>,
    mut visit: impl FnMut(u64, &[u8]) -> Result<(), String>,
) -> anyhow::Result<u64> {
    let shown = || path.display().to_string();
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(error).with_context(shown),
    };
    let file_name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut refused = LeftOut { file: file_name, count: 0, first: Vec::new() };
    let (mut file, mut text) = (BufReader::new(file), Vec::new());
    let mut count = 0;
    loop {
        text.clear();
        (&mut file).take(MAX_LINE_BYTES).read_until(b'\n', &mut text).with_context(shown)?;
        if text.last() == Some(&b'\n') {
            count += 1;
            visit(count, &text).unwrap_or_else(|reason| refused.add(count, &reason));
        } else if text.len() as u64 == MAX_LINE_BYTES {
            count += 1;
            refused.add(count, &format!("a line has at most {MAX_LINE_BYTES} bytes"));
            file.skip_until(b'\n').with_context(shown)?;
        } else {
            break;
        }
    }
    left_out.extend((refused.count > 0).then_some(refused));
    Ok(count)
}

/// Returns the fault of a line, without the parser's line number, which is not the number in the file.
pub(super) fn reason(error: serde_json::Error) -> String {
    let text = error.to_string();
    match text.rsplit_once(" at line ") {
        Some((reason, _)) if error.column() > 0 => {
            format!("{reason} at column {}", error.column())
        }
        _ => text,
    }
}
