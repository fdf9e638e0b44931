//! Names that nothing has yet, for files that are moved aside.

use std::path::PathBuf;

/// The first of the names with the suffixes "", "-2", "-3", ... that does not exist.
pub fn first_free_suffixed(name: impl Fn(&str) -> PathBuf) -> PathBuf {
    first_free(|n| match n {
        1 => name(""),
        _ => name(&format!("-{n}")),
    })
}

/// The first of the names for 1, 2, ... that does not exist.
pub fn first_free(name: impl Fn(u64) -> PathBuf) -> PathBuf {
    let mut number = 1;
    loop {
        let path = name(number);
        if path.symlink_metadata().is_err() {
            return path;
        }
        number += 1;
    }
}
