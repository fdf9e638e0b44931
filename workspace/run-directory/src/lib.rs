//! The directory of a run: its layout, its lock, whose its files are, what a resumed run may change of its recipe, and
//! the records by which it takes the same path again: stages that became longer, and returns to earlier steps.

mod archive;
pub mod branch;
mod checkpoint_name;
mod error;
pub mod growth;
pub mod metrics_resume;
#[cfg(test)]
#[path = "../../step/src/on_ranks.rs"]
mod on_ranks;
#[cfg(test)]
#[path = "../../step/src/ranks_on_threads.rs"]
mod ranks_on_threads;
mod rewinds;
mod run_directory;
mod run_lock;

pub use archive::archive_later;
pub use checkpoint_name::{CheckpointName, config_file, is_step_of, local_model_config};
pub use error::{Error, KeyChange};
pub use rewinds::{MAX_ATTEMPTS, Rewind, Rewinds, leave_path};
pub use run_directory::{RunDirectory, TOKENIZER, changes, join_names, leaves};
pub use run_lock::RunLock;
