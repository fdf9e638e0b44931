//! Errors between processes. A [`Fault`] ends the job, and every rank reports the same fault. Any other
//! error is about a single call on a single rank.

use std::fmt::Display;

use serde::{Deserialize, Serialize};

/// The result of this crate's fallible functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why the job ended. It is sent to all processes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Fault {
    /// A rank that ended with an error. The rank also reports the error itself.
    #[error("{who} failed: {reason}")]
    Failed {
        /// The rank and its process.
        who: String,
        /// The rank's error.
        reason: String,
    },
    /// Ranks that did not arrive, differ, died or wait for each other.
    #[error("{0}")]
    Ranks(String),
}

impl Fault {
    /// Ranks of a job of `size` that did not reach the rendezvous in time.
    pub(crate) fn missing(missing: &[usize], size: usize, address: &str, seconds: u64) -> Self {
        Fault::Ranks(format!(
            "{} of {size} did not reach the rendezvous at {address} within {seconds} s: check that their \
             processes have started, and that no firewall blocks the port",
            ranks(missing)
        ))
    }

    /// Processes that have exited or no longer respond.
    pub(crate) fn lost(who: &str, reason: &str) -> Self {
        Fault::Ranks(format!("{who} died: {reason}; see its output or its node's log"))
    }
}

/// An error of this crate.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// The fault that ended the job.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// A call failed: its arguments or surroundings are invalid, or an engine or the system failed.
    #[error("{0}")]
    Call(String),
    /// A device error.
    #[error(transparent)]
    Device(#[from] moh_kernels::Error),
}

impl Error {
    pub(crate) fn engine(engine: &str, operation: &str, reason: impl Display) -> Self {
        Error::Call(format!("{engine}: {operation} failed: {reason}"))
    }
}

/// Formats ranks, as in `rank 3` or `ranks 1, 3-5`.
pub(crate) fn ranks(ranks: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &rank in ranks {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let run = |&(first, last): &(usize, usize)| match last - first {
        0 => first.to_string(),
        1 => format!("{first}, {last}"),
        _ => format!("{first}-{last}"),
    };
    let runs: Vec<String> = runs.iter().map(run).collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, runs.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_named_in_runs() {
        assert_eq!(ranks(&[3]), "rank 3");
        assert_eq!(ranks(&[1, 2]), "ranks 1, 2");
        assert_eq!(ranks(&[0, 2, 3, 4, 9]), "ranks 0, 2-4, 9");
    }
}
