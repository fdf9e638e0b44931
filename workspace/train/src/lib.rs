//! Recipes, optimiser, checkpoints and the training loop.

pub mod checkpoint;
mod error;
mod event;
mod export;
pub mod metrics;
mod open_device;
pub mod optimizer;
mod pipeline_schedule;
pub mod plan;
mod preflight;
pub mod ranks;
pub mod recipe;
mod run;
mod run_data;
pub mod run_directory;
pub mod schedule;
mod source;
pub mod step;
mod summary;
pub mod tensorboard;
mod trainer;

pub use error::{Error, KeyChange};
pub use event::{Event, Outcome};
pub use metrics::{MetricsWriter, StepMetrics, Validation};
pub use open_device::{OpenDevice, connect};
pub use plan::Plan;
pub use preflight::{Preflight, RankSpeed, preflight};
pub use ranks::Ranks;
pub use recipe::{Fault, Recipe, Stage};
pub use run::run;
pub use run_directory::{RunDirectory, RunLock};
pub use schedule::Schedule;
pub use source::ModelSource;
pub use summary::Summary;
pub use tensorboard::TensorBoard;
