//! Preparation: text in any of its usual files becomes token files.

mod encode;
mod error;

pub use error::{Error, Place, Result};
