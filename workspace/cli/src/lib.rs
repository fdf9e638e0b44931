//! Shared by the command-line programs: exit codes, signals, progress, models, chat templates, time limits
//! and the view of a run.

pub mod chat;
mod counted;
pub mod exit;
pub mod model_location;
pub mod models;
pub mod plot;
pub mod progress;
pub mod replay_table;
pub mod run_view;
pub mod signals;
pub mod summary_table;
pub mod time_limit;

pub use counted::counted;
