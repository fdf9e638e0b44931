//! Reads untrusted files up to a limit.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read as _};
#[cfg(unix)]
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use crate::{FileError, is_file, unusable};

/// Opens a file. Fails for a named pipe, since its reader would wait until another process writes. A pipe of this
/// process, such as a shell creates for `<(command)`, is accepted.
pub fn open(path: &Path) -> io::Result<File> {
    let is_own = path.starts_with("/dev") || path.starts_with("/proc");
    #[cfg(unix)]
    if !is_own && fs::metadata(path).is_ok_and(|found| found.file_type().is_fifo()) {
        return Err(io::Error::new(ErrorKind::InvalidInput, "is a pipe, expected a file"));
    }
    File::open(path)
}

/// Returns the bytes of a file, opened by [`open`].
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Returns the bytes of a file of at most `most` bytes. If the file is larger, the message names it by `kind`, such as
/// "a recipe".
pub fn read_bounded(path: &Path, most: u64, kind: &str) -> Result<Vec<u8>, FileError> {
    let mut bytes = Vec::new();
    is_file(path)?;
    let file = open(path).map_err(crate::io(path))?;
    let read =
        file.take(most.saturating_add(1)).read_to_end(&mut bytes).map_err(crate::io(path))?;
    match read as u64 > most {
        true => Err(unusable(path, format!("more than {most} bytes: {kind} has at most {most}"))),
        false => Ok(bytes),
    }
}

/// Reads a file as [`read_bounded`] does. Returns `None` if nothing exists at `path`, not even a link.
pub fn read_bounded_if_any(
    path: &Path,
    most: u64,
    kind: &str,
) -> Result<Option<Vec<u8>>, FileError> {
    match read_bounded(path, most, kind) {
        Err(FileError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
        read => read.map(Some),
    }
}

/// Converts the bytes of a file to text.
pub fn utf8(path: &Path, bytes: Vec<u8>) -> Result<String, FileError> {
    String::from_utf8(bytes).map_err(|error| unusable(path, format!("not text in UTF-8: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_no_text_are_refused() {
        let path = Path::new("file");
        assert_eq!(utf8(path, b"text".to_vec()).unwrap(), "text");
        let message = utf8(path, b"te\xffxt".to_vec()).unwrap_err().to_string();
        assert!(message.starts_with("file: not text in UTF-8: invalid utf-8"), "{message}");
    }

    #[test]
    fn a_file_is_read_up_to_its_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "12345").unwrap();
        assert_eq!(read_bounded(&path, 5, "a file").unwrap(), b"12345");
        let message = read_bounded(&path, 4, "a file").unwrap_err().to_string();
        assert!(message.ends_with("file: more than 4 bytes: a file has at most 4"), "{message}");
        assert!(read_bounded_if_any(&path, 4, "a file").is_err());
    }

    #[test]
    fn a_missing_file_is_none_and_a_directory_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("none");
        assert!(read_bounded(&path, 4, "a file").is_err());
        assert_eq!(read_bounded_if_any(&path, 4, "a file").unwrap(), None);
        assert!(read_bounded_if_any(dir.path(), 4, "a file").is_err());
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink("gone", &path).unwrap();
            let message = read_bounded_if_any(&path, 4, "a file").unwrap_err().to_string();
            assert!(
                message.contains("none: is a link to gone, where there is nothing"),
                "{message}"
            );
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_pipe_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        std::process::Command::new("mkfifo").arg(&path).status().unwrap();
        let message = read_bounded(&path, 4, "a file").unwrap_err().to_string();
        assert!(message.ends_with("pipe: is a pipe, expected a file"), "{message}");
    }
}
