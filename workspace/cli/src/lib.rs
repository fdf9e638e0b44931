//! What the command-line programs share: exit codes and progress.

pub mod exit;
pub mod progress;
