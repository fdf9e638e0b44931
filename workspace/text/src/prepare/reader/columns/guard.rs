//! Calls of the crates of Arrow and Parquet, which panic for some damaged files.

use std::cell::Cell;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::path::Path;
use std::sync::Once;

use crate::prepare::{Error, Result};

thread_local! {
    /// Whether a panic of this thread becomes an error.
    static IS_CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Calls a reader of a table. A panic is an error, too, and nothing else is said about it.
pub(super) fn guarded<T>(path: &Path, read: impl FnOnce() -> Result<T>) -> Result<T> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let others = take_hook();
        set_hook(Box::new(move |panic| {
            if !IS_CAUGHT.get() {
                others(panic);
            }
        }));
    });
    IS_CAUGHT.set(true);
    let read = catch_unwind(AssertUnwindSafe(read));
    IS_CAUGHT.set(false);
    read.unwrap_or_else(|_| Err(damaged(path, "a length or an offset is wrong")))
}

/// The error of a table that cannot be read.
pub(super) fn damaged(path: &Path, reason: impl Display) -> Error {
    // Some reasons are followed by where they were found, line by line.
    let reason = reason.to_string();
    let reason = reason.lines().next().unwrap_or_default().trim_end_matches('.');
    Error::unusable(path, format!("the table is damaged ({reason}): fetch it again"))
}
