//! A file under construction.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use crate::{TEMPORARY, parent, sync_directory};

/// Room between the program and the file.
const BUFFER_BYTES: usize = 1 << 20;

/// A file that has its name once it is complete.
#[derive(Debug)]
pub struct PendingFile {
    path: PathBuf,
    writer: BufWriter<NamedTempFile>,
}

impl PendingFile {
    /// Starts a file that will be called `path`.
    ///
    /// # Errors
    /// When its directory is missing or cannot be written to.
    pub fn create(path: &Path) -> io::Result<Self> {
        let mut builder = tempfile::Builder::new();
        builder.prefix(TEMPORARY);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            // As open(2) would make it: the umask takes away what it should.
            builder.permissions(std::fs::Permissions::from_mode(0o666));
        }
        let file = builder.tempfile_in(parent(path))?;
        let writer = BufWriter::with_capacity(BUFFER_BYTES, file);
        Ok(PendingFile { path: path.to_path_buf(), writer })
    }

    /// The name that it will have.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file itself, after everything written so far has reached it.
    ///
    /// # Errors
    /// When the disk is full, or fails.
    pub fn flushed(&mut self) -> io::Result<&mut File> {
        self.writer.flush()?;
        Ok(self.writer.get_mut().as_file_mut())
    }

    /// Puts what was written on the disk, so that publishing is a mere rename.
    ///
    /// # Errors
    /// When the disk is full, or fails.
    pub fn sync(&mut self) -> io::Result<()> {
        self.flushed()?.sync_all()
    }

    /// Gives the file its name, in place of a file that has it.
    ///
    /// # Errors
    /// When the file cannot be synced or renamed.
    pub fn replace(mut self) -> io::Result<()> {
        self.sync()?;
        let (file, _) = self.writer.into_parts();
        file.persist(&self.path).map_err(|failed| failed.error)?;
        sync_directory(parent(&self.path))
    }

    /// Gives the file its name.
    ///
    /// # Errors
    /// `AlreadyExists` when another file has it; when the file cannot be synced or renamed.
    pub fn publish(mut self) -> io::Result<()> {
        self.sync()?;
        let (file, _) = self.writer.into_parts();
        file.persist_noclobber(&self.path).map_err(|failed| failed.error)?;
        sync_directory(parent(&self.path))
    }
}

impl Write for PendingFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.writer.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}

/// Writes a whole file, in place of one of that name.
///
/// # Errors
/// When it cannot be written; then an older file of that name is still there.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = PendingFile::create(path)?;
    file.write_all(bytes)?;
    file.replace()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> usize {
        std::fs::read_dir(dir).unwrap().count()
    }

    #[test]
    fn a_dropped_file_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let mut file = PendingFile::create(&dir.path().join("a")).unwrap();
        file.write_all(b"half").unwrap();
        drop(file);
        assert_eq!(names(dir.path()), 0);
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
        assert_eq!(names(dir.path()), 1);
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
