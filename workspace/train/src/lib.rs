//! Recipes, optimiser, checkpoints and the training loop.

mod branch;
mod checkpoint_name;
pub mod comparison;
mod disk_space;
mod error;
mod event;
mod export;
mod export_record;
mod growth;
mod metrics_resume;
pub mod model_card;
#[cfg(test)]
#[path = "../../step/src/on_ranks.rs"]
mod on_ranks;
mod open_device;
mod preflight;
#[cfg(test)]
#[path = "../../step/src/ranks_on_threads.rs"]
mod ranks_on_threads;
mod rates;
mod replay;
pub mod rewinds;
mod run;
mod run_data;
pub mod run_directory;
mod run_inputs;
mod run_lock;
mod set_aside;
mod source;
mod time_limit;
mod trainer;

pub use checkpoint_name::{CheckpointName, local_model_config};
pub use comparison::{Comparison, Variant};
pub use disk_space::{FreeSpace, free_space};
pub use error::{Error, KeyChange};
pub use event::{Event, Outcome};
pub use moh_device::OpenDevice;
pub use open_device::{connect, open_device, share_text};
pub use preflight::{Preflight, RankSpeed, preflight};
pub use replay::{Replay, SampleSource, replay, replay_from};
pub use run::{RunOptions, first_that_keeps_model, run};
pub use run_directory::RunDirectory;
pub use run_lock::RunLock;
pub use source::ModelSource;
pub use time_limit::TimeLimit;
