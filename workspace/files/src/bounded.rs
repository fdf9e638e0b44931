//! Files of other people, which are not read beyond a limit.

use std::fs::File;
use std::io::{ErrorKind, Read as _};
use std::path::Path;

use crate::{FileError, io, unusable};

/// The bytes of a file of at most `most`; `kind` names such a file in the message of a larger one, as in "a recipe".
pub fn read_bounded(path: &Path, most: u64, kind: &str) -> Result<Vec<u8>, FileError> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(io(path))?;
    let read = file.take(most.saturating_add(1)).read_to_end(&mut bytes).map_err(io(path))?;
    match read as u64 > most {
        true => Err(unusable(path, format!("more than {most} bytes: {kind} has at most {most}"))),
        false => Ok(bytes),
    }
}

/// As [`read_bounded`]; `None` if there is nothing at `path`.
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

/// The text of a file with these bytes.
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
    }
}
