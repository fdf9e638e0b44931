//! A buffer that an operation still works on.

use moh_kernels::span;

use crate::engine::Ticket;
use crate::error::Result;

/// A buffer of which an operation has been started; [`Pending::wait`] gives it back. Dropping it
/// waits as well.
#[must_use = "the buffer comes back by `wait`"]
pub struct Pending<T> {
    /// Some until the buffer is given back.
    buffer: Option<T>,
    ticket: Ticket,
    operation: &'static str,
}

impl<T> Pending<T> {
    pub(crate) fn new(buffer: T, ticket: Ticket, operation: &'static str) -> Self {
        Pending { buffer: Some(buffer), ticket, operation }
    }

    /// The buffer with the operation's result. On a GPU the call returns at once: what is asked of
    /// the device from now on starts after the operation.
    ///
    /// # Errors
    /// Whatever made the operation fail; the buffer is lost then.
    pub fn wait(mut self) -> Result<T> {
        if let Some(outstanding) = self.ticket.take() {
            let _span = span::enter(self.operation);
            outstanding.join()?;
        }
        // `new` puts a buffer in, and only this method, which consumes the value, takes it out.
        self.buffer.take().ok_or_else(|| unreachable!("a pending buffer is given back once"))
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        if let Some(outstanding) = self.ticket.take() {
            // The buffer is given up, after the device is done with it; there is nobody to tell of
            // an error, which the next operation of the group meets as well.
            let _ = outstanding.join();
        }
    }
}
