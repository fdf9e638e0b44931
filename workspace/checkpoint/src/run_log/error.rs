//! The errors of this crate.

use std::path::PathBuf;

/// An error of this crate; its message is one sentence: what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file could not be read or written, or cannot be used.
    #[error(transparent)]
    File(#[from] moh_files::FileError),
    /// The list of steps to trace is invalid.
    #[error("{text:?}: {reason}")]
    TraceSteps {
        /// The invalid part of the list.
        text: String,
        /// The problem.
        reason: &'static str,
    },
    /// A run's description of its machine is invalid.
    #[error(
        "{}: is not a description of a machine: {reason}: remove the file, which the run writes again when it \
         resumes", path.display()
    )]
    Machine {
        /// The file.
        path: PathBuf,
        /// The problem.
        reason: String,
    },
    /// A line of a `.jsonl` file is invalid.
    #[error("{}:{line}: {reason}", path.display())]
    JsonLine {
        /// The file.
        path: PathBuf,
        /// Line number, from 1.
        line: u64,
        /// The problem.
        reason: String,
    },
    /// A metrics file has fewer steps than its checkpoint.
    #[error(
        "{}: has {found} complete lines, but the checkpoint is of step {expected}: \
         restore the file, or resume from an earlier checkpoint", path.display()
    )]
    MetricsShort {
        /// The file.
        path: PathBuf,
        /// Complete lines in the file.
        found: u64,
        /// The checkpoint's step.
        expected: u64,
    },
    /// The results of a run are invalid.
    #[error("{}: {reason}", path.display())]
    Summary {
        /// The file.
        path: PathBuf,
        /// The problem.
        reason: String,
    },
}
