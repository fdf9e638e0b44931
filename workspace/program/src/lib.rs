//! Parts that every program needs: arguments and the values of common options, exit codes, progress, the processor,
//! tables, numbers with their nouns, and dates.

pub mod arguments;
pub mod exit;
#[cfg(feature = "models")]
pub mod models;
pub mod options;
pub mod processor;
pub mod progress;
pub mod table;
mod utc;

pub use moh_files::units::counted;
pub use utc::utc;
