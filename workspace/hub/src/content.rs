//! The hub's content addresses: the SHA-256 of a large file, or git's SHA-1 of a small one.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};

/// Bytes that are read at a time.
const BUFFER: usize = 1 << 20;
/// Hexadecimal digits of both kinds of addresses.
const SHA256_DIGITS: usize = 64;
const SHA1_DIGITS: usize = 40;

/// Whether the file at `path` has the content of this address; `None` for an address of another
/// kind.
pub(crate) fn has_address(path: &Path, address: &str) -> io::Result<Option<bool>> {
    let mut file = File::open(path)?;
    let mut context = match address.len() {
        SHA256_DIGITS => Context::new(&SHA256),
        SHA1_DIGITS => {
            let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
            // The header of a blob in git.
            context.update(format!("blob {}\0", file.metadata()?.len()).as_bytes());
            context
        }
        _ => return Ok(None),
    };
    let mut buffer = vec![0; BUFFER];
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            count => context.update(&buffer[..count]),
        }
    }
    let mut found = String::new();
    for byte in context.finish().as_ref() {
        // Writing to a string cannot fail.
        let _ = write!(found, "{byte:02x}");
    }
    Ok(Some(found.eq_ignore_ascii_case(address)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_contents_have_their_addresses() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        // As of `git hash-object` and `sha256sum`.
        for (content, git, sha256) in [
            (
                "",
                "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391",
                "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
            ),
            (
                "abc",
                "f2ba8f84ab5c1bce84a7b441cb1959cfc7093b7f",
                "BA7816BF8F01CFEA414140DE5DAE2223B00361A396177A9CB410FF61F20015AD",
            ),
        ] {
            std::fs::write(&path, content).unwrap();
            for address in [git, sha256] {
                assert_eq!(has_address(&path, address).unwrap(), Some(true), "{content}");
                let other = address.replacen(&address[..1], "0", 1);
                assert_eq!(has_address(&path, &other).unwrap(), Some(false), "{content}");
            }
            assert_eq!(has_address(&path, "x1").unwrap(), None);
        }
        assert!(has_address(&dir.path().join("none"), &"0".repeat(40)).is_err());
    }
}
