//! Whose turn it is to hold more than a share of the memory. Several parts of inputs are read at once, and
//! each of them may hold its share at any time. What is larger, such as a document of a gigabyte, waits until
//! its part is the one whose documents are written next: that one never waits, and at most one is there.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The turns of the parts, in their order.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    /// The part whose turn it is.
    current: Mutex<u64>,
    changed: Condvar,
}

/// The turn of one part; by default that of an only reader, which is always there.
#[derive(Clone, Debug, Default)]
pub(crate) struct Turn(Option<(u64, Arc<Turns>)>);

impl Turns {
    /// The turn of the part `number`.
    pub(crate) fn of(self: &Arc<Self>, number: u64) -> Turn {
        Turn(Some((number, Arc::clone(self))))
    }

    /// Gives the next part its turn.
    pub(crate) fn next(&self) {
        *self.lock() += 1;
        self.changed.notify_all();
    }

    /// Lets every part go on to its end when what it returns is dropped, in a panic too.
    pub(crate) fn end_later(&self) -> impl Drop {
        End(self)
    }

    fn lock(&self) -> MutexGuard<'_, u64> {
        // Each change is one statement.
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct End<'a>(&'a Turns);

impl Drop for End<'_> {
    fn drop(&mut self) {
        *self.0.lock() = u64::MAX;
        self.0.changed.notify_all();
    }
}

impl Turn {
    /// Waits for it.
    pub(crate) fn wait(&self) {
        let Some((number, turns)) = &self.0 else { return };
        let mut current = turns.lock();
        while *current < *number {
            current = turns.changed.wait(current).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_their_turns_in_order_and_all_at_the_end() {
        let turns = Arc::new(Turns::default());
        Turn::default().wait();
        turns.of(0).wait();
        let [second, last] = [1, 9].map(|number| {
            let turn = turns.of(number);
            std::thread::spawn(move || turn.wait())
        });
        turns.next();
        second.join().unwrap();
        assert!(!last.is_finished());
        drop(turns.end_later());
        last.join().unwrap();
    }
}
