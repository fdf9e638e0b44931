//! Preparation: text in any of its usual files becomes token files.

#[allow(dead_code)] // The pipeline is to use it.
mod encode;
mod error;

pub use error::{Error, Place, Result};
