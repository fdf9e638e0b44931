//! A directory that appears complete or not at all.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::{TEMPORARY, parent, remove_directory, sync_directory};

/// A directory that gets its name when it is complete.
#[derive(Debug)]
pub struct PendingDirectory {
    place: PathBuf,
    path: PathBuf,
    published: bool,
}

impl PendingDirectory {
    /// Starts a directory with the final name `place`, under a unique temporary name.
    ///
    /// # Errors
    /// Fails if the parent directory is missing or not writable.
    pub fn create(place: &Path) -> io::Result<Self> {
        let name = place.file_name().unwrap_or_default().to_string_lossy();
        let path = unique(parent(place), &name)?;
        Ok(PendingDirectory { place: place.to_path_buf(), path, published: false })
    }

    /// Starts a directory with the final name `place`, under a temporary name that several
    /// processes know: [`PendingDirectory::shared_path`]. Leftovers of an earlier process are
    /// removed.
    ///
    /// # Errors
    /// Fails if the directory cannot be removed or created.
    pub fn create_shared(place: &Path) -> io::Result<Self> {
        let path = Self::shared_path(place);
        remove_directory(&path)?;
        fs::create_dir_all(&path)?;
        Ok(PendingDirectory { place: place.to_path_buf(), path, published: false })
    }

    /// The temporary path that [`PendingDirectory::create_shared`] uses for `place`.
    pub fn shared_path(place: &Path) -> PathBuf {
        let name = place.file_name().unwrap_or_default().to_string_lossy();
        parent(place).join(format!("{TEMPORARY}{name}"))
    }

    /// The temporary path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Renames the directory to its final name. Its files must be synced.
    ///
    /// # Errors
    /// Fails if the name is taken, except by an empty directory, or the directory cannot be
    /// renamed.
    pub fn publish(mut self) -> io::Result<()> {
        sync_directory(&self.path)?;
        if is_occupied(&self.place) == Some(false) {
            // Renaming replaces an empty directory on Unix only.
            fs::remove_dir(&self.place)?;
        }
        self.rename()
    }

    /// Renames the directory to its final name, replacing an existing directory.
    ///
    /// # Errors
    /// Fails if the directory cannot be renamed; the old directory is then restored.
    pub fn replace(mut self) -> io::Result<()> {
        if is_occupied(&self.place) != Some(true) {
            return self.publish();
        }
        sync_directory(&self.path)?;
        // The old directory is renamed aside first, so that a partial directory never has the name.
        let aside = unique(parent(&self.place), "replaced")?;
        let old = aside.join("old");
        let done = fs::rename(&self.place, &old).and_then(|()| self.rename());
        // If the old directory can neither be replaced nor restored, it stays aside.
        if done.is_ok() || !old.exists() || fs::rename(&old, &self.place).is_ok() {
            let _ = remove_directory(&aside);
        }
        done
    }

    fn rename(&mut self) -> io::Result<()> {
        fs::rename(&self.path, &self.place)?;
        self.published = true;
        sync_directory(parent(&self.place))
    }
}

impl Drop for PendingDirectory {
    fn drop(&mut self) {
        if !self.published {
            // A directory that cannot be removed keeps the prefix of temporary names.
            let _ = remove_directory(&self.path);
        }
    }
}

/// Whether a directory has entries; `None` if it is not a directory.
fn is_occupied(path: &Path) -> Option<bool> {
    fs::read_dir(path).ok().map(|mut entries| entries.next().is_some())
}

/// Creates a directory with a unique name.
fn unique(parent: &Path, name: &str) -> io::Result<PathBuf> {
    let prefix = format!("{TEMPORARY}{name}-");
    let mut builder = tempfile::Builder::new();
    builder.prefix(&prefix);
    // The final directory would keep the default mode of 0700; the umask still applies.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o777));
    Ok(builder.tempdir_in(parent)?.keep())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::write_synced;

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn pending(place: &Path, text: &str) -> PendingDirectory {
        let pending = PendingDirectory::create(place).unwrap();
        write_synced(&pending.path().join("file"), text.as_bytes()).unwrap();
        pending
    }

    #[test]
    fn a_directory_appears_with_all_its_files() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("model");
        let started = pending(&place, "one");
        assert!(!place.exists());
        started.publish().unwrap();
        assert_eq!(fs::read(place.join("file")).unwrap(), b"one");
        assert_eq!(names(dir.path()), ["model"]);
    }

    #[test]
    fn a_dropped_directory_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        drop(pending(&dir.path().join("model"), "one"));
        assert!(names(dir.path()).is_empty());
    }

    #[test]
    fn what_is_there_stays_unless_it_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("model");
        pending(&place, "one").publish().unwrap();
        assert!(pending(&place, "two").publish().is_err());
        assert_eq!(fs::read(place.join("file")).unwrap(), b"one");
        pending(&place, "two").replace().unwrap();
        assert_eq!(fs::read(place.join("file")).unwrap(), b"two");
        fs::remove_dir_all(&place).unwrap();
        fs::create_dir(&place).unwrap();
        pending(&place, "three").publish().unwrap();
        assert_eq!(names(dir.path()), ["model"]);
    }

    #[test]
    fn processes_share_a_name_and_remains_under_it_go() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("step-3");
        let path = PendingDirectory::shared_path(&place);
        fs::create_dir(&path).unwrap();
        write_synced(&path.join("old"), b"").unwrap();
        let pending = PendingDirectory::create_shared(&place).unwrap();
        assert_eq!(pending.path(), path);
        write_synced(&path.join("new"), b"").unwrap();
        pending.publish().unwrap();
        assert_eq!(names(&place), ["new"]);
    }
}
