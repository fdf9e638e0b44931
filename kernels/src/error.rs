//! What an operator or a backend can refuse.

/// An error of a backend or an operator.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// The arguments of an operator do not fit each other.
    #[error("{operator}: {reason}")]
    Shape {
        /// The operator.
        operator: &'static str,
        /// What does not fit.
        reason: String,
    },
    /// The device has no room for a buffer.
    #[error("{device} has no room for {bytes} bytes: use a smaller micro_batch or sequence_length")]
    OutOfMemory {
        /// The device.
        device: String,
        /// Size of the buffer.
        bytes: usize,
    },
}
