//! What every program needs: arguments, exit codes, progress, models by name, the processor, tables, numbers with their nouns,
//! and dates.

pub mod arguments;
pub mod exit;
pub mod models;
pub mod processor;
pub mod progress;
pub mod table;
mod utc;

pub use moh_files::units::counted;
pub use utc::utc;
