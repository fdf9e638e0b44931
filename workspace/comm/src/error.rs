//! Errors between processes. A [`Fault`] ends the job: every rank reports the same one. The other
//! errors concern one call on one rank.

use serde::{Deserialize, Serialize};

/// The result of this crate's fallible functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why the job ended; it is sent to all processes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// Ranks that did not reach the rendezvous in time.
    #[error(
        "{} of {size} did not reach the rendezvous at {address} within {seconds} s: check that \
         their processes have started, and that no firewall blocks the port",
        ranks(missing)
    )]
    Missing {
        /// The ranks.
        missing: Vec<usize>,
        /// The number of ranks of the job.
        size: usize,
        /// The address of the rendezvous.
        address: String,
        /// The time limit.
        seconds: u64,
    },
    /// A rank whose fingerprint differs from rank 0's.
    #[error(
        "{who} was started with `{theirs}`, rank 0 with `{ours}`: start every rank with the same \
         program and the same recipe"
    )]
    Different {
        /// The rank and its process.
        who: String,
        /// Its fingerprint.
        theirs: String,
        /// Rank 0's fingerprint.
        ours: String,
    },
    /// A rank whose process has exited or no longer responds.
    #[error("{who} died: {reason}; see its output or its node's log")]
    Lost {
        /// The ranks and their processes.
        who: String,
        /// How the loss was detected.
        reason: String,
    },
    /// A rank that ended with an error.
    #[error("{who} failed: {reason}")]
    Failed {
        /// The rank and its process.
        who: String,
        /// Its error.
        reason: String,
    },
    /// An operation that exceeded its time limit.
    #[error(
        "{who} waits in {operation}; {report}: look first at a rank that is not in the same \
         operation"
    )]
    Stuck {
        /// The rank that reported it, and its process.
        who: String,
        /// The operation that did not end.
        operation: String,
        /// What every rank was doing.
        report: String,
    },
}

/// An error of this crate.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The fault that ended the job.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// Invalid launcher variables, or an invalid rendezvous address.
    #[error("{0}")]
    Launch(String),
    /// Sizes of the parallel dimensions that do not fit the number of ranks.
    #[error("{0}")]
    Layout(String),
    /// The rendezvous with the other ranks failed.
    #[error("rendezvous at {address}: {reason}")]
    Rendezvous {
        /// The address.
        address: String,
        /// The cause.
        reason: String,
    },
    /// This build has no engine for the buffers of the run.
    #[error("{0}")]
    NoEngine(String),
    /// Invalid arguments of an operation.
    #[error("{operation} of group {group}: {reason}")]
    Argument {
        /// The operation.
        operation: &'static str,
        /// The group.
        group: String,
        /// What is wrong and what is expected.
        reason: String,
    },
    /// A rank of a group of threads that has left.
    #[error("rank {rank} left the group while other ranks waited for it")]
    Left {
        /// Its rank in the group.
        rank: usize,
    },
    /// A failed call of an engine or of the system.
    #[error("{engine}: {operation} failed: {reason}")]
    Engine {
        /// The engine.
        engine: &'static str,
        /// The failed operation.
        operation: &'static str,
        /// The engine's message.
        reason: String,
    },
    /// A device error.
    #[error(transparent)]
    Device(#[from] moh_kernels::Error),
}

/// `rank 3`, or `ranks 1, 3-5`.
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

    #[test]
    fn a_fault_names_the_ranks_and_what_to_do() {
        let missing = Fault::Missing {
            missing: vec![2, 3],
            size: 4,
            address: "n1:29500".into(),
            seconds: 300,
        };
        assert_eq!(
            missing.to_string(),
            "ranks 2, 3 of 4 did not reach the rendezvous at n1:29500 within 300 s: check that \
             their processes have started, and that no firewall blocks the port"
        );
    }
}
