//! Llama and Mixture-of-Head models: configuration, weights by name, blocks and generation.

mod activations;
mod block;
pub mod config;
pub mod config_file;
mod error;
pub mod flops;
mod generation;
pub mod initial;
pub mod layout;
mod model;
pub mod model_parallel;
pub mod parameters;
mod passes;
pub mod rope;
pub mod router;
mod sequence;
pub mod slice;
mod step_sums;
pub mod weight_files;

pub use activations::{Activations, PassShape, Recompute, Turn};
pub use config::{Llama3Scaling, ModelConfig, MohConfig, RopeConfig, RouterKind};
pub use config_file::ConfigFile;
pub use error::Error;
pub use flops::tensor_shapes;
pub use generation::{Generator, Sampler};
pub use model::{LossScale, Model};
pub use step_sums::StepSums;
pub use weight_files::{Dtype, TensorBytes, WeightFiles};
