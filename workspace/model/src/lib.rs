//! Llama and Mixture-of-Head models: configuration, weights by name, blocks and generation.

mod activations;
pub mod config;
mod error;
pub mod flops;
mod generation;
pub mod initial;
pub mod layout;
mod llama;
mod model;
pub mod model_parallel;
pub mod parameters;
mod pass_sizes;
mod passes;
pub mod rope;
pub mod router;
mod sampler;
mod sequence;
pub mod slice;
mod step_sums;

pub use activations::{Activations, PassShape, Recompute, Slots, Turn};
pub use config::{Llama3Scaling, ModelConfig, MohConfig, RopeConfig, RouterKind};
pub use error::Error;
pub use generation::Generator;
pub use llama::tensors;
pub use model::{LossScale, Model, ModelBuffers};
pub use pass_sizes::PassSizes;
pub use sampler::Sampler;
pub use step_sums::StepSums;
