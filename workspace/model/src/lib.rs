//! Llama and Mixture-of-Head models: configuration, weights by name, blocks and generation.

pub mod config;
pub mod config_file;
mod error;
pub mod flops;
pub mod weight_files;

pub use config::{Llama3Scaling, ModelConfig, MohConfig, RopeConfig, Router};
pub use config_file::ConfigFile;
pub use error::Error;
pub use flops::tensor_shapes;
pub use weight_files::{Dtype, TensorBytes, WeightFiles};
