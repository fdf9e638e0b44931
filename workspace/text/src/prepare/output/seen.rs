//! The texts that were seen, for `--exact-dedup`: 16 bytes of the blake3 of each text, in memory and in a file from
//! which an interrupted preparation resumes.

use std::collections::HashSet;
use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use crate::prepare::{Error, Result};

const HASH_BYTES: usize = 16;
/// Bytes of memory for each hash at worst: a table that has just doubled is less than half full, and its
/// predecessor exists while it is copied.
const MEMORY_BYTES: u64 = 64;

#[derive(Debug)]
pub(crate) struct Seen {
    hashes: HashSet<u128>,
    capacity: u64,
    path: PathBuf,
    file: BufWriter<std::fs::File>,
}

impl Seen {
    /// Loads the first `count` hashes of the file `path`, and removes the rest of the file. If the file is missing and
    /// `count` is 0, creates it.
    pub(crate) fn resume(path: &Path, count: u64, memory: u64) -> Result<Self> {
        let mut options = std::fs::File::options();
        let options = options.read(true).write(true).create(count == 0).truncate(false);
        let mut file = options.open(path).map_err(moh_files::io(path))?;
        let mut hashes = HashSet::new();
        let mut reader = std::io::BufReader::new(&file);
        let mut hash = [0; HASH_BYTES];
        for _ in 0..count {
            reader.read_exact(&mut hash).map_err(moh_files::io(path))?;
            hashes.insert(u128::from_le_bytes(hash));
        }
        let length = count * HASH_BYTES as u64;
        moh_files::shorten(&mut file, length).map_err(moh_files::io(path))?;
        let (capacity, path) = (memory / MEMORY_BYTES, path.to_path_buf());
        Ok(Self { hashes, capacity, path, file: BufWriter::new(file) })
    }

    /// Adds a text by the first bytes of its hash. Returns whether the text is new.
    pub(crate) fn insert(&mut self, hash: &blake3::Hash) -> Result<bool> {
        let mut first = [0; HASH_BYTES];
        first.copy_from_slice(&hash.as_bytes()[..HASH_BYTES]);
        if !self.hashes.insert(u128::from_le_bytes(first)) {
            return Ok(false);
        }
        if self.count() > self.capacity {
            return Err(Error::Invalid(format!(
                "--exact-dedup: the inputs have more than {} different documents, which is what the memory has \
                 room for: raise --memory",
                self.capacity
            )));
        }
        self.file.write_all(&first).map_err(moh_files::io(&self.path))?;
        Ok(true)
    }

    pub(crate) fn count(&self) -> u64 {
        self.hashes.len() as u64
    }

    pub(crate) fn sync(&mut self) -> Result<()> {
        let done = self.file.flush().and_then(|()| self.file.get_ref().sync_data());
        done.map_err(moh_files::io(&self.path)).map_err(Error::from)
    }
}

#[cfg(test)]
mod tests {
    use moh_testkit::assert_refused;

    use super::*;

    #[test]
    fn a_text_is_new_once_and_again_after_what_was_not_recorded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("seen");
        let mut seen = Seen::resume(&path, 0, 1 << 20).unwrap();
        let [one, two] = ["one", "two"].map(|text| blake3::hash(text.as_bytes()));
        assert!(seen.insert(&one).unwrap() && !seen.insert(&one).unwrap());
        assert!(seen.insert(&two).unwrap());
        seen.sync().unwrap();
        drop(seen);
        let mut seen = Seen::resume(&path, 1, 1 << 20).unwrap();
        assert!(!seen.insert(&one).unwrap() && seen.insert(&two).unwrap());
        assert!(Seen::resume(&path, 3, 1 << 20).is_err());
    }

    #[test]
    fn memory_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let mut seen = Seen::resume(&dir.path().join("seen"), 0, 2 * MEMORY_BYTES).unwrap();
        for text in ["one", "two"] {
            seen.insert(&blake3::hash(text.as_bytes())).unwrap();
        }
        assert_refused(seen.insert(&blake3::hash(b"three")), "more than 2 different documents");
    }
}
