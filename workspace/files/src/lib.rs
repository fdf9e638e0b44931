//! Files and directories that appear whole or not at all, whatever happens to the program or the
//! machine: they are written beside their place under a name that starts with [`TEMPORARY`], synced to
//! the disk, and renamed. What is dropped before that vanishes.

mod directory;
mod file;

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

pub use directory::PendingDirectory;
pub use file::{PendingFile, write};

/// Beginning of the names of what is not complete yet, or not any more.
pub const TEMPORARY: &str = ".tmp-";

/// The directory that holds `path`.
pub fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Puts the names in a directory on the disk, new ones and renamed ones; only Unix can.
///
/// # Errors
/// When the directory cannot be opened or synced.
pub fn sync_directory(path: &Path) -> io::Result<()> {
    match cfg!(unix) {
        true => File::open(path)?.sync_all(),
        false => Ok(()),
    }
}

/// Writes a new file and puts its bytes on the disk: for files of a [`PendingDirectory`], which need no
/// other name before they are complete.
///
/// # Errors
/// When there is a file of that name, or it cannot be written.
pub fn write_synced(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create_new(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Removes a directory with all that it holds; one that is not there is no error.
///
/// # Errors
/// When something in it cannot be removed.
pub fn remove_directory(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
