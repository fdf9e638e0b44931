//! Files that appear whole or not at all: written beside their final place under a temporary
//! name, flushed to the disk, then renamed. Dropped before that, they vanish.

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use crate::{Error, Result};

/// Room between the program and the file.
const BUFFER_BYTES: usize = 1 << 20;

/// A file under construction.
pub(crate) struct Pending {
    path: PathBuf,
    writer: BufWriter<NamedTempFile>,
}

impl Pending {
    /// Starts a file that will be called `path`.
    pub(crate) fn create(path: &Path) -> Result<Self> {
        let mut builder = tempfile::Builder::new();
        builder.prefix(".tmp-");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            // As open(2) would make it: the umask takes away what it should.
            builder.permissions(std::fs::Permissions::from_mode(0o666));
        }
        let file = builder.tempfile_in(folder(path)).map_err(Error::io(path, "write"))?;
        let writer = BufWriter::with_capacity(BUFFER_BYTES, file);
        Ok(Self { path: path.to_path_buf(), writer })
    }

    /// The final name.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Appends bytes.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.writer.write_all(bytes).map_err(Error::io(&self.path, "write"))
    }

    /// The file itself, after everything written so far has reached it.
    pub(crate) fn flushed(&mut self) -> Result<&mut File> {
        self.writer.flush().map_err(Error::io(&self.path, "write"))?;
        Ok(self.writer.get_mut().as_file_mut())
    }

    /// Flushes to the disk, so that [`Pending::publish`] is a mere rename.
    pub(crate) fn sync(&mut self) -> Result<()> {
        let path = self.path.clone();
        self.flushed()?.sync_all().map_err(Error::io(&path, "write"))
    }

    /// Gives the file its name; `overwrite` replaces a file of that name, else it is an error.
    pub(crate) fn publish(mut self, overwrite: bool) -> Result<()> {
        self.sync()?;
        let Self { path, writer } = self;
        let (file, _) = writer.into_parts();
        let done = if overwrite { file.persist(&path) } else { file.persist_noclobber(&path) };
        match done {
            Ok(_) => sync_folder(&path),
            Err(failed) if failed.error.kind() == std::io::ErrorKind::AlreadyExists => {
                Err(Error::Exists { path })
            }
            Err(failed) => Err(Error::Io { path, action: "write", source: failed.error }),
        }
    }
}

/// Writes a whole small file.
pub(crate) fn write_whole(path: &Path, bytes: &[u8], overwrite: bool) -> Result<()> {
    let mut pending = Pending::create(path)?;
    pending.write(bytes)?;
    pending.publish(overwrite)
}

/// Refuses an output that is already there, unless it may be overwritten.
pub(crate) fn refuse_existing(path: &Path, overwrite: bool) -> Result<()> {
    if !overwrite && path.symlink_metadata().is_ok() {
        return Err(Error::Exists { path: path.to_path_buf() });
    }
    Ok(())
}

/// `prefix` with `ending` appended; a dot inside the prefix stays.
pub(crate) fn with_ending(prefix: &Path, ending: &str) -> PathBuf {
    let mut name = OsString::from(prefix);
    name.push(ending);
    PathBuf::from(name)
}

/// The folder that holds `path`.
pub(crate) fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Makes a rename last through a power cut.
fn sync_folder(path: &Path) -> Result<()> {
    let folder = folder(path);
    #[cfg(unix)]
    File::open(folder).and_then(|file| file.sync_all()).map_err(Error::io(folder, "write"))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_file_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let mut pending = Pending::create(&dir.path().join("a")).unwrap();
        pending.write(b"half").unwrap();
        drop(pending);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn an_existing_file_is_kept_unless_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.b");
        write_whole(&path, b"one", false).unwrap();
        assert!(matches!(write_whole(&path, b"two", false), Err(Error::Exists { .. })));
        assert_eq!(std::fs::read(&path).unwrap(), b"one");
        write_whole(&path, b"two", true).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"two");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn endings_are_appended_behind_dots() {
        assert_eq!(with_ending(Path::new("a/b.v1"), ".bin"), Path::new("a/b.v1.bin"));
    }
}
