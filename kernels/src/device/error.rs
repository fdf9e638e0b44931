//! The errors of operators and backends.

use std::fmt::Display;

/// An error of a backend or an operator; its message is one sentence.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Error(String);

impl Error {
    /// Creates an error with this message.
    pub fn new(sentence: String) -> Self {
        Error(sentence)
    }

    /// Creates an error for arguments of an operator that do not fit each other.
    pub fn shape(operator: &str, reason: String) -> Self {
        Error(format!("{operator}: {reason}"))
    }

    pub(crate) fn device(device: &str, operation: &str, reason: impl Display) -> Self {
        Error(format!("{device}: {operation} failed: {reason}"))
    }

    pub(crate) fn no_room(device: &str, bytes: usize) -> Self {
        Error(format!(
            "{device} has no room for {bytes} bytes: use a smaller micro_batch or sequence_length"
        ))
    }
}

/// Result of a backend's methods.
pub type Result<T> = std::result::Result<T, Error>;

/// Returns the text of an error and of its cause. Some errors do not include the cause in their text, such
/// as the error of a library that cannot be loaded.
pub fn with_cause(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

/// Rejects a buffer if its length differs from the length that the operator's shape implies.
pub(crate) fn check_len(
    operator: &'static str,
    what: &'static str,
    len: usize,
    expected: usize,
) -> Result<()> {
    if len == expected {
        return Ok(());
    }
    Err(Error::shape(operator, format!("{what} holds {len} elements, expected {expected}")))
}

/// Rejects a token id without a row in the vocabulary.
pub(crate) fn check_ids(mut ids: impl Iterator<Item = u32>, vocab_size: usize) -> Result<()> {
    let outside = ids.find(|&id| id as usize >= vocab_size);
    let refuse = |id| Error(format!("token id {id} is outside the vocabulary of {vocab_size}"));
    outside.map_or(Ok(()), |id| Err(refuse(id)))
}

/// Returns an error with this `reason` unless `condition` is true.
pub(crate) fn ensure(
    operator: &'static str,
    condition: bool,
    reason: impl FnOnce() -> String,
) -> Result<()> {
    if condition { Ok(()) } else { Err(Error::shape(operator, reason())) }
}
