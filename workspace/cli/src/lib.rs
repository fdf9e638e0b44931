//! Shared by the command-line programs: arguments, exit codes, signals, progress, models, chat templates, time limits, the
//! processor, commands to paste, the view of a run, charts of it, and its page.

pub mod arguments;
pub mod chart;
pub mod chat;
pub mod command_line;
mod counted;
pub mod exit;
pub mod loss_chart;
pub mod model_location;
pub mod models;
pub mod processor;
pub mod progress;
pub mod replay_table;
pub mod report;
pub mod run_log;
pub mod run_view;
pub mod signals;
pub mod summary_table;
pub mod time_limit;
mod utc;

pub use counted::counted;
pub use utc::utc;
