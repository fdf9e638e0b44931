//! `exported-files.json`: the content of the files of the export that the run has written, by which an export that
//! somebody has changed since is recognised, and kept.

use moh_hf::FileContent;
use serde::{Deserialize, Serialize};

use crate::{Error, RunDirectory};

/// The version of the format.
const FORMAT: u32 = 1;
/// Maximum bytes of a record: hundreds of thousands of tensors.
const MAX_BYTES: u64 = 64 << 20;

/// The files of an export.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportRecord {
    format: u32,
    files: Vec<FileContent>,
}

impl ExportRecord {
    /// A record of these files.
    pub fn new(files: Vec<FileContent>) -> Self {
        ExportRecord { format: FORMAT, files }
    }

    /// The run's record; `None` if it is missing, as in runs of earlier versions, or cannot be used.
    fn read(run: &RunDirectory) -> Option<Self> {
        let kind = "the record of an export";
        let bytes = moh_files::read_bounded(&run.export_record(), MAX_BYTES, kind).ok()?;
        let record: Self = serde_json::from_slice(&bytes).ok()?;
        (record.format == FORMAT).then_some(record)
    }

    /// Writes the record.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn write(&self, run: &RunDirectory) -> Result<(), Error> {
        let path = run.export_record();
        let text = serde_json::to_vec(self).map_err(|error| moh_files::io(&path)(error.into()))?;
        Ok(moh_files::write(&path, &text).map_err(moh_files::io(&path))?)
    }
}

/// Whether the run's export has the files that the run has written and no others. Reads all of them if their lengths
/// are as recorded; an export without a record counts as changed.
///
/// # Errors
/// Fails if the export cannot be read.
pub fn is_unchanged(run: &RunDirectory) -> Result<bool, Error> {
    match ExportRecord::read(run) {
        Some(record) => Ok(moh_hf::holds_exactly(&run.export(), &record.files)?),
        None => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_export_without_a_record_that_fits_counts_as_changed() {
        let dir = tempfile::tempdir().unwrap();
        let run = RunDirectory::new(dir.path());
        std::fs::create_dir(run.export()).unwrap();
        assert!(!is_unchanged(&run).unwrap());
        ExportRecord::new(Vec::new()).write(&run).unwrap();
        assert!(is_unchanged(&run).unwrap());
        let file =
            "{\"name\": \"../text\", \"parts\": [{\"bytes\": 99999999999, \"blake3\": \"\"}]}";
        for text in [
            "{\"format\": 2, \"files\": []}".to_owned(),
            "{\"format\": 1, \"files\": [".to_owned(),
            "[[[[".to_owned(),
            format!("{{\"format\": 1, \"files\": [{file}]}}"),
        ] {
            std::fs::write(run.export_record(), &text).unwrap();
            assert!(!is_unchanged(&run).unwrap(), "{text}");
        }
        std::fs::File::create(run.export_record()).unwrap().set_len(MAX_BYTES + 9).unwrap();
        assert!(!is_unchanged(&run).unwrap());
    }
}
