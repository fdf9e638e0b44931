//! A buffer with an operation in flight.

use moh_kernels::span;

use crate::engine::Ticket;
use crate::error::Result;

/// A buffer with an operation in flight; [`Pending::wait`] returns it. Dropping it waits as well.
#[must_use = "`wait` returns the buffer"]
pub struct Pending<T> {
    /// `None` once the buffer has been returned.
    buffer: Option<T>,
    ticket: Ticket,
    operation: &'static str,
}

impl<T> Pending<T> {
    pub(crate) fn new(buffer: T, ticket: Ticket, operation: &'static str) -> Self {
        Pending { buffer: Some(buffer), ticket, operation }
    }

    /// Returns the buffer with the operation's result. On a GPU the call returns at once, and later
    /// work on the device starts after the operation.
    ///
    /// # Errors
    /// The error of the operation; the buffer is lost then.
    pub fn wait(mut self) -> Result<T> {
        if let Some(outstanding) = self.ticket.take() {
            let _span = span::enter(self.operation);
            outstanding.join()?;
        }
        Ok(self
            .buffer
            .take()
            .expect("`new` stores a buffer, and only `wait`, which consumes, takes it"))
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        if let Some(outstanding) = self.ticket.take() {
            // The device is done with the buffer before it is dropped. Drop cannot report errors;
            // the group's next operation reports the same one.
            let _ = outstanding.join();
        }
    }
}
