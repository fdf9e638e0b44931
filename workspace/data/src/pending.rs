//! Atomic file creation with this crate's errors.

use std::ffi::OsString;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use moh_files::PendingFile;

use crate::mapped::map_file;
use crate::{Error, Result};

/// A file that gets its name when it is complete.
pub(crate) struct Pending {
    file: PendingFile,
}

impl Pending {
    /// Creates a file with the final name `path`, and its directory if missing.
    pub(crate) fn create(path: &Path) -> Result<Self> {
        let file = moh_files::create_parents(path).and_then(|()| PendingFile::create(path));
        let file = file.map_err(Error::io(path, "write"))?;
        Ok(Self { file })
    }

    /// Resumes the file of the same name in `directory` at `length` bytes; `path` is its final name. If the file is
    /// missing and `length` is 0, creates it. The file stays when it is dropped.
    pub(crate) fn resume(path: &Path, directory: &Path, length: u64) -> Result<Self> {
        let working = directory.join(path.file_name().unwrap_or_default());
        let file = PendingFile::resume(path, &working, length);
        Ok(Self { file: file.map_err(Error::io(&working, "continue"))? })
    }

    pub(crate) fn path(&self) -> &Path {
        self.file.path()
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(Error::io(self.file.path(), "write"))
    }

    /// Flushes all earlier writes and returns the file.
    pub(crate) fn flushed(&mut self) -> Result<&mut File> {
        let path = self.path().to_path_buf();
        self.file.flushed().map_err(Error::io(&path, "write"))
    }

    /// Maps all written bytes.
    pub(crate) fn map(&mut self) -> Result<Mmap> {
        let path = self.path().to_path_buf();
        map_file(self.flushed()?, &path)
    }

    /// Syncs the contents to disk, so that [`Pending::publish`] only renames.
    pub(crate) fn sync(&mut self) -> Result<()> {
        let path = self.path().to_path_buf();
        self.file.sync().map_err(Error::io(&path, "write"))
    }

    pub(crate) fn publish(self, overwrite: bool) -> Result<()> {
        let path = self.path().to_path_buf();
        let done = if overwrite { self.file.replace() } else { self.file.publish() };
        done.map_err(|source| match source.kind() {
            ErrorKind::AlreadyExists => Error::Exists { path },
            _ => Error::Io { path, action: "write", source },
        })
    }
}

/// Checks that an output does not exist, or may be overwritten.
pub fn refuse_existing(path: &Path, overwrite: bool) -> Result<()> {
    if !overwrite && path.symlink_metadata().is_ok() {
        return Err(Error::Exists { path: path.to_path_buf() });
    }
    Ok(())
}

/// Appends `ending` to `prefix`; dots inside the prefix stay.
pub fn with_ending(prefix: &Path, ending: &str) -> PathBuf {
    let mut name = OsString::from(prefix);
    name.push(ending);
    PathBuf::from(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_existing_file_is_kept_unless_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.b");
        let write = |bytes: &[u8], overwrite| {
            let mut file = Pending::create(&path).unwrap();
            file.write(bytes).unwrap();
            file.publish(overwrite)
        };
        write(b"one", false).unwrap();
        assert!(matches!(write(b"two", false), Err(Error::Exists { .. })));
        assert_eq!(std::fs::read(&path).unwrap(), b"one");
        write(b"two", true).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"two");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn endings_are_appended_behind_dots() {
        assert_eq!(with_ending(Path::new("a/b.v1"), ".bin"), Path::new("a/b.v1.bin"));
    }
}
