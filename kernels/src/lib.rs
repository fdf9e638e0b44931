//! The operators of a Mixture-of-Head Llama, forward and backward.
mod error;
pub use error::Error;
