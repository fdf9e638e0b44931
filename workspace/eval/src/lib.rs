//! Logits of a model, and what its heads do.
//!
//! `heads` is what is measured of heads;
//! [`write_logits`] is for comparison with other implementations.

mod error;
pub mod heads;
mod logits;

pub use error::Error;
pub use logits::{read_ids, write_logits};
