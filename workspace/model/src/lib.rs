//! Llama and Mixture-of-Head models: configuration, weights by name, blocks and generation.

pub mod config;
mod error;

pub use config::{Llama3Scaling, ModelConfig, MohConfig, RopeConfig, Router};
pub use error::Error;
