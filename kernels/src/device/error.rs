//! The errors of operators and backends.

/// An error of a backend or an operator.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// The arguments of an operator do not fit each other.
    #[error("{operator}: {reason}")]
    Shape {
        /// The operator.
        operator: &'static str,
        /// The mismatch.
        reason: String,
    },
    /// A token id has no row in the embedding.
    #[error("token id {id} is outside the vocabulary of {vocab_size}")]
    Vocabulary {
        /// The id.
        id: u32,
        /// Rows of the embedding.
        vocab_size: usize,
    },
    /// A device that is missing, unfit or failing.
    #[error("{device}: {operation} failed: {reason}")]
    Device {
        /// The device.
        device: String,
        /// The operation that failed.
        operation: &'static str,
        /// The message of the device or its driver.
        reason: String,
    },
    /// The all-reduce of the ranks that share an operator failed.
    #[error("{0}")]
    Ranks(String),
    /// The profiler that is named in the environment cannot be loaded.
    #[error("{variable}={path}: {reason}: unset {variable} to run without a profiler")]
    Profiler {
        /// The variable of the environment.
        variable: &'static str,
        /// Its value.
        path: String,
        /// The problem.
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

/// Result of a backend's methods.
pub type Result<T> = std::result::Result<T, Error>;

/// The text of an error and of its cause, for errors whose own text does not include the cause,
/// such as the error of a library that cannot be loaded.
pub fn with_cause(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

/// Refuses a buffer whose length is not the one that the operator's shape implies.
pub(crate) fn check_len(
    operator: &'static str,
    what: &'static str,
    len: usize,
    expected: usize,
) -> Result<()> {
    if len == expected {
        return Ok(());
    }
    Err(Error::Shape {
        operator,
        reason: format!("{what} holds {len} elements, expected {expected}"),
    })
}

/// Returns an error with this `reason` unless `condition` is true.
pub(crate) fn ensure(
    operator: &'static str,
    condition: bool,
    reason: impl FnOnce() -> String,
) -> Result<()> {
    if condition { Ok(()) } else { Err(Error::Shape { operator, reason: reason() }) }
}
