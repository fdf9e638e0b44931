//! Read-only memory maps: the only unsafe code of this crate.

use std::fs::File;
use std::path::Path;

use memmap2::Mmap;

use crate::{Error, Result};

pub(crate) fn map(path: &Path) -> Result<Mmap> {
    let file = moh_files::open(path).map_err(Error::io(path, "read"))?;
    let kind = file.metadata().map_err(Error::io(path, "read"))?;
    if !kind.is_file() {
        return Err(Error::token_file(path, "not a regular file"));
    }
    map_file(&file, path)
}

/// Asks the system to read bytes of a map from the disk, without waiting. Bytes beyond the map are ignored.
pub(crate) fn read_ahead(map: &Mmap, start: u64, count: u64) {
    let length = (map.len() as u64).saturating_sub(start).min(count);
    // `length` is at most the map's length, and 0 if `start` is beyond the map. Failure costs only time.
    #[cfg(unix)]
    let _ = map.advise_range(memmap2::Advice::WillNeed, start as usize, length as usize);
    #[cfg(not(unix))]
    let _ = length;
}

/// Maps a whole open file for reading; `path` names it in errors.
#[allow(unsafe_code)]
pub(crate) fn map_file(file: &File, path: &Path) -> Result<Mmap> {
    // SAFETY: the map is read-only and private to the returned value. Its bytes change only if
    // another process writes into the file in place. This crate's writer never does: it renames a
    // finished file over the old name, and a mapped file keeps its contents. The writer maps its
    // own files when they are complete.
    unsafe { Mmap::map(file) }.map_err(Error::io(path, "map"))
}
