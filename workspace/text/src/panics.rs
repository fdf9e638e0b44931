//! Catches panics of other crates. Some crates panic for damaged files and contradictory contents.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// Whether a panic of this thread is caught.
    static IS_CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Calls another crate. If it panics, prints nothing and returns `None`. Callers do not use the values that it changed.
pub(crate) fn quietly<T>(call: impl FnOnce() -> T) -> Option<T> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let others = take_hook();
        set_hook(Box::new(move |panic| {
            if !IS_CAUGHT.get() {
                others(panic);
            }
        }));
    });
    let before = IS_CAUGHT.replace(true);
    let done = catch_unwind(AssertUnwindSafe(call));
    IS_CAUGHT.set(before);
    done.ok()
}
