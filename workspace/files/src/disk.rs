//! Reads a file from its disk: past the memory in which the system keeps files, where the system
//! can.
//!
//! What a program has just written is usually read from that memory, the page cache, which says
//! nothing about the disk. Linux reads past it with `O_DIRECT` on file systems that have it;
//! elsewhere this is ordinary reading.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Offsets, lengths and addresses of direct reads are multiples of this: a disk's blocks are
/// smaller.
const ALIGNMENT: usize = 4096;

/// A file that is read from its disk.
#[derive(Debug)]
pub struct DiskReader {
    path: PathBuf,
    file: File,
    is_direct: bool,
    /// Reused; longer than the longest read by what aligning its start takes.
    buffer: Vec<u8>,
}

impl DiskReader {
    /// Opens a file, with `past_cache` to be read from its disk, else in the ordinary way. What is
    /// read from the disk must have been synced.
    ///
    /// # Errors
    /// Fails if the file cannot be opened.
    pub fn open(path: &Path, past_cache: bool) -> io::Result<Self> {
        let direct = if past_cache { open_direct(path) } else { None };
        let (file, is_direct) = match direct {
            Some(file) => (file, true),
            None => (File::open(path)?, false),
        };
        Ok(DiskReader { path: path.to_path_buf(), file, is_direct, buffer: Vec::new() })
    }

    /// Whether the bytes so far came from the disk; otherwise they may have come from memory.
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// Reads `length` bytes from `start`, which is a multiple of 4096.
    ///
    /// # Errors
    /// `UnexpectedEof` if the file ends before that; fails if the disk does.
    pub fn read(&mut self, start: u64, length: usize) -> io::Result<&[u8]> {
        let mut found = self.fill(start, length);
        let refused = |error: &io::Error| error.kind() == io::ErrorKind::InvalidInput;
        if self.is_direct && found.as_ref().is_err_and(refused) {
            // Some file systems refuse direct reads, or their alignment, only now.
            self.file = File::open(&self.path)?;
            self.is_direct = false;
            found = self.fill(start, length);
        }
        let offset = found?;
        Ok(&self.buffer[offset..offset + length])
    }

    /// Tells the system that these bytes, which are on the disk, will not be read again soon: it
    /// need not keep them in memory in place of others.
    #[cfg_attr(not(target_os = "linux"), allow(unused_variables))]
    pub fn release(&self, start: u64, length: usize) {
        #[cfg(target_os = "linux")]
        if let Some(length) = std::num::NonZero::new(length as u64) {
            // A file system without advice ignores it.
            let _ =
                rustix::fs::fadvise(&self.file, start, Some(length), rustix::fs::Advice::DontNeed);
        }
    }

    /// Fills the buffer from the returned offset on.
    fn fill(&mut self, start: u64, length: usize) -> io::Result<usize> {
        let whole = length.next_multiple_of(ALIGNMENT);
        if self.buffer.len() < whole + ALIGNMENT {
            self.buffer.resize(whole + ALIGNMENT, 0);
        }
        // Less than the alignment: every address is aligned within that many bytes.
        let offset = self.buffer.as_ptr().align_offset(ALIGNMENT);
        self.file.seek(SeekFrom::Start(start))?;
        let mut filled = 0;
        while filled < length {
            match self.file.read(&mut self.buffer[offset + filled..offset + whole]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                // A direct read ends between two blocks at the end of the file alone.
                Ok(count)
                    if self.is_direct && count % ALIGNMENT != 0 && filled + count < length =>
                {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(offset)
    }
}

/// Opens a file for reading past the page cache; `None` if that is impossible.
#[cfg(target_os = "linux")]
fn open_direct(path: &Path) -> Option<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let flag = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).ok()?;
    File::options().read(true).custom_flags(flag).open(path).ok()
}

#[cfg(not(target_os = "linux"))]
fn open_direct(_: &Path) -> Option<File> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::write_synced;

    fn file(directory: &Path, length: usize) -> (PathBuf, Vec<u8>) {
        let bytes: Vec<u8> = (0..length).map(|byte| (byte * 7 + byte / 251) as u8).collect();
        let path = directory.join(length.to_string());
        write_synced(&path, &bytes).unwrap();
        (path, bytes)
    }

    #[test]
    fn any_part_of_a_file_is_read() {
        let dir = tempfile::tempdir().unwrap();
        for length in [1, 4095, 4096, 4097, 30_000] {
            let (path, bytes) = file(dir.path(), length);
            for past_cache in [true, false] {
                let mut reader = DiskReader::open(&path, past_cache).unwrap();
                assert!(past_cache || !reader.is_direct());
                assert_eq!(reader.read(0, length).unwrap(), bytes);
                reader.release(0, length);
                assert_eq!(reader.read(0, length).unwrap(), bytes);
                for start in (0..length).step_by(ALIGNMENT) {
                    for end in [start + 1, start + 5000, length] {
                        let end = end.min(length);
                        let found = reader.read(start as u64, end - start).unwrap();
                        assert_eq!(found, &bytes[start..end], "{start}..{end} of {length}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_file_that_ends_early_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        for length in [0, 100, 4096, 5000] {
            let (path, _) = file(dir.path(), length);
            let mut reader = DiskReader::open(&path, true).unwrap();
            for (start, more) in [(0, length + 1), (0, length + 10_000), (8192, 1)] {
                let error = reader.read(start, more).unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{start} {more} {length}");
            }
        }
        assert!(DiskReader::open(&dir.path().join("none"), true).is_err());
    }

    #[test]
    fn a_read_that_cannot_be_direct_is_an_ordinary_one() {
        let dir = tempfile::tempdir().unwrap();
        let (path, bytes) = file(dir.path(), 9000);
        let mut reader = DiskReader::open(&path, true).unwrap();
        // Not aligned, which most file systems refuse.
        assert_eq!(reader.read(1000, 8000).unwrap(), &bytes[1000..]);
    }
}
