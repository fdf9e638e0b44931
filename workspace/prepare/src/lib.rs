//! Preparation: text in any of its usual files becomes token files.

mod error;

pub use error::{Error, Place, Result};
