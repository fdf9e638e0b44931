//! What can go wrong between processes. A [`Fault`] ends the job: every rank learns of it and
//! reports the same one. The other errors are those of one call on one rank.

use serde::{Deserialize, Serialize};

/// The result of this crate's fallible functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why the job cannot go on; it travels between the processes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// Ranks that did not come to the rendezvous in time.
    #[error(
        "{} of {size} did not reach the rendezvous at {address} within {seconds} s: see why their \
         processes did not start, or whether a firewall keeps them from that port",
        ranks(missing)
    )]
    Missing {
        /// The ranks.
        missing: Vec<usize>,
        /// Ranks of the job.
        size: usize,
        /// Where they were awaited.
        address: String,
        /// The time limit.
        seconds: u64,
    },
    /// A rank that was started differently from rank 0.
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
    /// A rank whose process is gone, or does not answer any more.
    #[error("{who} died: {reason}; its own output, or its node's log, may say why")]
    Lost {
        /// The rank, or the ranks, and their processes.
        who: String,
        /// How it showed.
        reason: String,
    },
    /// A rank that ended with an error of its own.
    #[error("{who} failed: {reason}")]
    Failed {
        /// The rank and its process.
        who: String,
        /// Its error.
        reason: String,
    },
    /// A collective that did not end in time.
    #[error(
        "{who} waits in {operation}; {report}: a rank that is not in the same operation is the one \
         to look at"
    )]
    Stuck {
        /// The rank that noticed, and its process.
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
    /// What ended the job.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// Variables of a launcher, or a rendezvous, that make no sense.
    #[error("{0}")]
    Launch(String),
    /// Sizes of the parallel dimensions that do not fit the number of ranks.
    #[error("{0}")]
    Layout(String),
    /// No meeting with the other ranks.
    #[error("rendezvous at {address}: {reason}")]
    Rendezvous {
        /// The address.
        address: String,
        /// What went wrong.
        reason: String,
    },
    /// No engine for the buffers of this run.
    #[error("{0}")]
    NoEngine(String),
    /// Arguments that an operation cannot be carried out with.
    #[error("{operation} of group {group}: {reason}")]
    Argument {
        /// The operation.
        operation: &'static str,
        /// The group.
        group: String,
        /// What does not fit, and what would.
        reason: String,
    },
    /// A member of a group of threads that is gone.
    #[error("rank {rank} of the group left it while others waited for it")]
    Left {
        /// Its rank in the group.
        rank: usize,
    },
    /// An engine, or a system call, that failed.
    #[error("{engine}: {operation} failed: {reason}")]
    Engine {
        /// The engine.
        engine: &'static str,
        /// What was tried.
        operation: &'static str,
        /// What it says.
        reason: String,
    },
    /// A device that failed.
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
            "ranks 2, 3 of 4 did not reach the rendezvous at n1:29500 within 300 s: see why their \
             processes did not start, or whether a firewall keeps them from that port"
        );
    }
}
