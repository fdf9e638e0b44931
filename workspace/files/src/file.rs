//! A file that appears complete or not at all.

use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use tempfile::TempPath;

use crate::temporary::{self, Registered};
use crate::{parent, sync_directory};

const BUFFER_BYTES: usize = 1 << 20;

/// A file that gets its final name when it is complete.
#[derive(Debug)]
pub struct PendingFile {
    path: PathBuf,
    temporary: TempPath,
    writer: BufWriter<File>,
    /// `None` if the file is kept when the program ends.
    _registered: Option<Registered>,
}

impl PendingFile {
    /// Creates a file with the final name `path`. Removes temporary files of `path` that a killed process
    /// has left.
    pub fn create(path: &Path) -> io::Result<Self> {
        let (file, temporary, registered) = temporary::create(path)?;
        let writer = BufWriter::with_capacity(BUFFER_BYTES, file);
        let _registered = Some(registered);
        Ok(PendingFile { path: path.to_path_buf(), temporary, writer, _registered })
    }

    /// Continues a file with the final name `path` that is at `working` until then, a path on the same file
    /// system. Removes the bytes after the first `length` bytes. If `length` is 0, creates the file if it is
    /// missing. The file stays at `working` if it is dropped before it is published, and when the program ends.
    ///
    /// # Errors
    /// Fails with `UnexpectedEof` if the file is shorter. Fails if it cannot be opened or shortened.
    pub fn resume(path: &Path, working: &Path, length: u64) -> io::Result<Self> {
        let mut options = File::options();
        let mut file =
            options.read(true).write(true).create(length == 0).truncate(false).open(working)?;
        shorten(&mut file, length)?;
        let mut temporary = TempPath::try_from_path(working)?;
        temporary.disable_cleanup(true);
        let writer = BufWriter::with_capacity(BUFFER_BYTES, file);
        Ok(PendingFile { path: path.to_path_buf(), temporary, writer, _registered: None })
    }

    /// Returns the final name.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the file, with all earlier writes flushed to it.
    pub fn flushed(&mut self) -> io::Result<&mut File> {
        self.writer.flush()?;
        Ok(self.writer.get_mut())
    }

    /// Syncs the contents to disk, so that publishing only renames.
    pub fn sync(&mut self) -> io::Result<()> {
        self.flushed()?.sync_all()
    }

    /// Renames the file to its final name, replacing an existing file.
    pub fn replace(mut self) -> io::Result<()> {
        self.sync()?;
        self.temporary.persist(&self.path).map_err(|failed| failed.error)?;
        sync_directory(parent(&self.path))
    }

    /// Renames the file to its final name, which must be free.
    ///
    /// # Errors
    /// Fails with `AlreadyExists` if another file has the name. Fails if the file cannot be synced or renamed.
    pub fn publish(mut self) -> io::Result<()> {
        self.sync()?;
        if let Err(failed) = self.temporary.persist_noclobber(&self.path) {
            // Some file systems can only link the new name and then remove the old name. A process that was killed
            // between the two steps has left both names.
            if !is_same_file(&failed.path, &self.path) {
                return Err(failed.error);
            }
            std::fs::remove_file(&failed.path)?;
        }
        sync_directory(parent(&self.path))
    }
}

#[cfg(unix)]
fn is_same_file(a: &Path, b: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let identity = |path: &Path| path.symlink_metadata().map(|file| (file.dev(), file.ino()));
    matches!((identity(a), identity(b)), (Ok(a), Ok(b)) if a == b)
}

/// Returns false: here files are renamed in a single step.
#[cfg(not(unix))]
fn is_same_file(_: &Path, _: &Path) -> bool {
    false
}

impl Write for PendingFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.writer.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}

/// Removes the bytes of `file` after the first `length` bytes. The next write starts there.
///
/// # Errors
/// Fails with `UnexpectedEof` if the file is shorter. Fails if it cannot be shortened.
pub fn shorten(file: &mut File, length: u64) -> io::Result<()> {
    // A longer length would fill the file with zeros.
    if file.metadata()?.len() < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    file.set_len(length)?;
    file.seek(SeekFrom::Start(length)).map(|_| ())
}

/// Writes a whole file and replaces an existing file, which is unchanged after a failure.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = PendingFile::create(path)?;
    file.write_all(bytes)?;
    file.replace()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::temporary::tests::names;

    #[test]
    fn a_dropped_file_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let mut file = PendingFile::create(&dir.path().join("a")).unwrap();
        file.write_all(b"half").unwrap();
        drop(file);
        assert!(names(dir.path()).is_empty());
    }

    #[test]
    fn a_file_of_that_name_stays_unless_it_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.b");
        write(&path, b"one").unwrap();
        let mut file = PendingFile::create(&path).unwrap();
        file.write_all(b"two").unwrap();
        assert_eq!(file.publish().unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read(&path).unwrap(), b"one");
        write(&path, b"two").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"two");
        assert_eq!(names(dir.path()).len(), 1);
    }

    #[test]
    fn a_file_continues_where_it_was_and_stays_when_it_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let (path, working) = (dir.path().join("a"), dir.path().join("a.part"));
        let mut file = PendingFile::resume(&path, &working, 0).unwrap();
        file.write_all(b"one two").unwrap();
        file.sync().unwrap();
        drop(file);
        let missing = PendingFile::resume(&path, &working, 8).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::UnexpectedEof);
        let mut file = PendingFile::resume(&path, &working, 4).unwrap();
        file.write_all(b"three").unwrap();
        file.publish().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"one three");
        assert_eq!(names(dir.path()).len(), 1);
    }

    #[cfg(unix)]
    #[test]
    fn a_file_that_was_linked_to_its_name_and_not_renamed_is_published() {
        let dir = tempfile::tempdir().unwrap();
        let (path, working) = (dir.path().join("a"), dir.path().join("a.part"));
        std::fs::write(&working, b"one").unwrap();
        std::fs::hard_link(&working, &path).unwrap();
        PendingFile::resume(&path, &working, 3).unwrap().publish().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"one");
        assert_eq!(names(dir.path()).len(), 1);
    }

    #[test]
    fn an_error_does_not_name_the_temporary_file() {
        let dir = tempfile::tempdir().unwrap();
        let error = write(&dir.path().join("missing/a"), b"").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert!(error.raw_os_error().is_some(), "{error}");
    }

    #[cfg(unix)]
    #[test]
    fn the_umask_alone_decides_who_may_read() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let mode = |name: &str| {
            let file = dir.path().join(name);
            std::fs::metadata(file).unwrap().permissions().mode() & 0o777
        };
        write(&dir.path().join("ours"), b"").unwrap();
        std::fs::write(dir.path().join("theirs"), b"").unwrap();
        assert_eq!(mode("ours"), mode("theirs"));
    }
}
