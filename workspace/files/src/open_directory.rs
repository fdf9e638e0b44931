//! A directory that is held open, so that a program notices when it is moved or removed, and finds it where it is.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// A directory, known by itself and not by its path.
#[derive(Debug)]
pub struct OpenDirectory {
    /// Open, so that no other directory can get its number; `None` where directories cannot be opened.
    file: Option<File>,
}

impl OpenDirectory {
    /// Holds the directory at `path`.
    ///
    /// # Errors
    /// Fails if it cannot be opened.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = if cfg!(unix) { Some(File::open(path)?) } else { None };
        Ok(OpenDirectory { file })
    }

    /// Whether the directory has left `path`: nothing is there, or something else. A file system that does not answer
    /// says nothing.
    pub fn has_left(&self, path: &Path) -> bool {
        match fs::metadata(path) {
            Ok(found) => !found.is_dir() || !self.is(&found),
            Err(error) => {
                [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory].contains(&error.kind())
            }
        }
    }

    /// Where the directory is now; `None` if it was removed, or if the system does not say.
    pub fn place(&self) -> Option<PathBuf> {
        let place = self.link()?;
        (!self.has_left(&place)).then_some(place)
    }

    #[cfg(unix)]
    fn is(&self, found: &fs::Metadata) -> bool {
        use std::os::unix::fs::MetadataExt as _;
        let own = self.file.as_ref().and_then(|file| file.metadata().ok());
        own.is_none_or(|own| (own.dev(), own.ino()) == (found.dev(), found.ino()))
    }

    #[cfg(not(unix))]
    fn is(&self, _: &fs::Metadata) -> bool {
        true
    }

    /// What Linux calls the directory; one that was removed has a name that nothing has.
    #[cfg(target_os = "linux")]
    fn link(&self) -> Option<PathBuf> {
        use std::os::fd::AsRawFd as _;
        let file = self.file.as_ref()?;
        fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()
    }

    #[cfg(not(target_os = "linux"))]
    fn link(&self) -> Option<PathBuf> {
        None
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_known_where_it_was_moved_and_another_at_its_place_is_not_it() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let (old, new) = (root.join("old"), root.join("new"));
        fs::create_dir(&old).unwrap();
        let held = OpenDirectory::open(&old).unwrap();
        assert!(!held.has_left(&old));
        fs::rename(&old, &new).unwrap();
        assert!(held.has_left(&old));
        assert_eq!(held.place(), Some(new.clone()));
        fs::create_dir(&old).unwrap();
        assert!(held.has_left(&old));
        fs::remove_dir(&new).unwrap();
        assert_eq!(held.place(), None);
    }
}
