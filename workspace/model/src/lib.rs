//! Llama and Qwen3 models, dense or Mixture-of-Head: configuration, weights by name, blocks and
//! generation.

mod activations;
pub mod config;
mod error;
pub mod flops;
mod generation;
mod head_counts;
mod head_request;
pub mod initial;
mod inspection;
pub mod layout;
mod llama;
mod model;
pub mod model_parallel;
pub mod parameters;
mod pass_sizes;
mod passes;
mod qwen3;
pub mod rope;
pub mod router;
mod sampler;
mod sequence;
pub mod slice;
mod step_sums;
pub mod tensors;

pub use activations::{Activations, PassShape, PassSlot, Recompute, Slots};
pub use config::{
    Architecture, LayerHeads, Llama3Scaling, ModelConfig, MohConfig, RopeConfig, RouterKind,
};
pub use error::Error;
pub use generation::Generator;
pub use head_counts::HeadCounts;
pub use head_request::{Active, DEFAULT_ACTIVE_SHARE, HeadRequest};
pub use inspection::{BlockMagnitudes, Magnitude};
pub use model::{LossScale, Model, ModelBuffers};
pub use pass_sizes::PassSizes;
pub use sampler::{Sampler, Sampling};
pub use step_sums::StepSums;
