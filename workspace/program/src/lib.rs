//! What every program needs: arguments, exit codes, progress, models by name, the processor, numbers with their nouns, and
//! dates.

pub mod arguments;
mod counted;
pub mod exit;
pub mod models;
pub mod processor;
pub mod progress;
mod utc;

pub use counted::counted;
pub use utc::utc;
