//! The directory of a run: its layout, its lock, its ownership, the changes to its recipe that a resumed run may make,
//! and the stages that became longer.

pub mod branch;
mod checkpoint_name;
pub mod growth;
mod layout;
pub mod metrics_resume;
mod run_lock;

pub use checkpoint_name::{
    CheckpointName, RunCheckpoint, config_file, is_step_of, local_model_config, not_a_model,
};
pub use layout::{KeyChange, RunDirectory, TOKENIZER, changes, join_names, leaves};
pub use run_lock::RunLock;
