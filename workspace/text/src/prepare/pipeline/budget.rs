//! A limit on the bytes of texts between a reader and the writer.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

#[derive(Debug)]
pub(crate) struct Budget {
    limit: u64,
    taken: Mutex<u64>,
    changed: Condvar,
}

/// Bytes of a budget, returned when the permit is dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Budget {
    pub(crate) fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { limit, taken: Mutex::default(), changed: Condvar::new() })
    }

    /// Waits until `bytes` fit, or nothing else is in flight: more bytes than the limit pass alone.
    pub(crate) fn take(self: &Arc<Self>, bytes: u64) -> Permit {
        let waits = |taken: &mut u64| *taken > 0 && *taken + bytes > self.limit;
        let taken = self.changed.wait_while(self.lock(), waits);
        let mut taken = taken.unwrap_or_else(PoisonError::into_inner);
        *taken += bytes;
        Permit { budget: Arc::clone(self), bytes }
    }

    fn lock(&self) -> MutexGuard<'_, u64> {
        // Each change is one statement.
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        *self.budget.lock() -= self.bytes;
        self.budget.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_wait_for_room_and_the_largest_pass_alone() {
        let budget = Budget::new(10);
        let (six, four) = (budget.take(6), budget.take(4));
        let waiting = {
            let budget = Arc::clone(&budget);
            std::thread::spawn(move || budget.take(20).bytes)
        };
        drop(six);
        assert!(!waiting.is_finished());
        drop(four);
        assert_eq!(waiting.join().unwrap(), 20);
        assert_eq!(*budget.lock(), 0);
    }
}
