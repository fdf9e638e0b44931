//! Files of other people, which are not read beyond a limit.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read as _};
#[cfg(unix)]
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use crate::{FileError, is_file, unusable};

/// Opens a file. A pipe with a name, whose reader would wait until somebody writes, is an error; one of this process, as
/// a shell makes for `<(command)`, is not.
pub fn open(path: &Path) -> io::Result<File> {
    let is_own = path.starts_with("/dev") || path.starts_with("/proc");
    #[cfg(unix)]
    if !is_own && fs::metadata(path).is_ok_and(|found| found.file_type().is_fifo()) {
        return Err(io::Error::new(ErrorKind::InvalidInput, "is a pipe, expected a file"));
    }
    File::open(path)
}

/// Returns the bytes of a file, as [`open`] opens it.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Returns the bytes of a file of at most `most`; `kind` names such a file in the message of a larger one, as in "a
/// recipe".
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

/// As [`read_bounded`]; `None` if there is nothing at `path`, not even a link.
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

/// Returns the text of a file with these bytes.
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
