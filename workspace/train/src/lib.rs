//! Recipes, optimiser, checkpoints and the training loop.

mod error;
pub mod metrics;
pub mod plan;
pub mod recipe;
pub mod run_directory;
pub mod schedule;
pub mod tensorboard;

pub use error::{Error, KeyChange};
pub use metrics::{MetricsWriter, StepMetrics, Validation};
pub use plan::Plan;
pub use recipe::{Fault, Recipe, Stage};
pub use run_directory::{RunDirectory, RunLock};
pub use schedule::Schedule;
pub use tensorboard::TensorBoard;
