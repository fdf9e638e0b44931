//! The content of the files of a model directory, by which a later look finds out whether anybody has changed them.
//!
//! A file is recorded as it is written, part by part, so that nothing is read for the record.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use blake3::{Hash, Hasher};
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::destination::list;
use crate::model_directory::PIECE_BYTES;

/// The content of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileContent {
    /// The file's name in its directory.
    pub name: String,
    /// Its consecutive parts: of a weight file the header and each tensor.
    pub parts: Vec<PartContent>,
}

/// The content of a part of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartContent {
    /// Its length.
    pub bytes: u64,
    /// Its blake3, in hexadecimal.
    pub blake3: String,
}

impl FileContent {
    /// A file of these parts, in order.
    pub(crate) fn new(name: &str, parts: impl IntoIterator<Item = (u64, Hash)>) -> Self {
        let part = |(bytes, hash): (u64, Hash)| {
            let blake3 = hash.to_hex().to_string();
            PartContent { bytes, blake3 }
        };
        FileContent { name: name.to_owned(), parts: parts.into_iter().map(part).collect() }
    }

    /// A file of one part.
    pub(crate) fn from_bytes(name: &str, bytes: &[u8]) -> Self {
        FileContent::new(name, [(bytes.len() as u64, blake3::hash(bytes))])
    }

    /// The file's length; `None` if it overflows.
    fn num_bytes(&self) -> Option<u64> {
        self.parts.iter().try_fold(0u64, |sum, part| sum.checked_add(part.bytes))
    }

    /// Whether the file at `path`, which has as many bytes, has this content.
    fn equals(&self, path: &Path) -> io::Result<bool> {
        let mut file = File::open(path)?;
        let mut buffer = Vec::new();
        for part in &self.parts {
            let mut hasher = Hasher::new();
            let mut missing = part.bytes;
            while missing > 0 {
                buffer.clear();
                let piece = missing.min(PIECE_BYTES as u64);
                if (&mut file).take(piece).read_to_end(&mut buffer)? as u64 != piece {
                    return Ok(false);
                }
                hasher.update_rayon(&buffer);
                missing -= piece;
            }
            if hasher.finalize().to_hex().as_str() != part.blake3 {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Whether a directory has exactly these files. The names and lengths of all of them are compared before one is read.
///
/// # Errors
/// Fails if the directory cannot be listed, or a file cannot be read.
pub fn holds_exactly(dir: &Path, files: &[FileContent]) -> Result<bool, Error> {
    let entries = list(dir)?.unwrap_or_default();
    let mut files: Vec<&FileContent> = files.iter().collect();
    files.sort_by(|a, b| a.name.cmp(&b.name));
    if entries.len() != files.len() {
        return Ok(false);
    }
    for (entry, file) in entries.iter().zip(&files) {
        if !entry.is_file || entry.name != file.name {
            return Ok(false);
        }
        let path = dir.join(&file.name);
        let length = path.metadata().map_err(Error::io(&path))?.len();
        if Some(length) != file.num_bytes() {
            return Ok(false);
        }
    }
    for file in files {
        let path = dir.join(&file.name);
        if !file.equals(&path).map_err(Error::io(&path))? {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_directory_is_told_from_one_that_was_changed() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let halves = [&b"he"[..], b"ad", b""].map(|part| (part.len() as u64, blake3::hash(part)));
        let files = [FileContent::new("weights", halves), FileContent::from_bytes("card", b"mine")];
        assert!(!holds_exactly(dir.path(), &files).unwrap());
        assert!(!holds_exactly(&path("missing"), &files).unwrap());
        let restore = || {
            fs::write(path("weights"), "head").unwrap();
            fs::write(path("card"), "mine").unwrap();
        };
        restore();
        assert!(holds_exactly(dir.path(), &files).unwrap());
        for (name, text) in [
            ("weights", "heap"),
            ("weights", "heads"),
            ("weights", "hea"),
            ("more", ""),
            ("card", ""),
        ] {
            fs::write(path(name), text).unwrap();
            assert!(!holds_exactly(dir.path(), &files).unwrap(), "{name} {text}");
            restore();
            let _ = fs::remove_file(path("more"));
        }
        fs::remove_file(path("card")).unwrap();
        assert!(!holds_exactly(dir.path(), &files).unwrap());
        fs::create_dir(path("card")).unwrap();
        assert!(!holds_exactly(dir.path(), &files).unwrap());
    }

    #[test]
    fn lengths_without_a_sum_are_those_of_no_file() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("weights"), "head").unwrap();
        let parts = [u64::MAX, 5].map(|bytes| (bytes, blake3::hash(b"head")));
        assert!(!holds_exactly(dir.path(), &[FileContent::new("weights", parts)]).unwrap());
    }
}
