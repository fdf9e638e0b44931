//! Llama and Qwen3 models, dense or Mixture-of-Head: configuration, weights by name, blocks and
//! generation.
//!
//! A [`Model`] is built from a [`ModelConfig`] and a function that fills each tensor by name; crate `moh-hf` builds
//! models from files. [`Model::run`] computes whole sequences, a [`Generator`] one token after another:
//!
//! ```
//! use moh_kernels::{Cpu, ElementType};
//! use moh_model::{
//!     Architecture, Error, Generator, HeadCounts, Model, ModelConfig, MohConfig, RopeConfig,
//!     RouterKind, initial,
//! };
//!
//! # fn main() -> Result<(), Error> {
//! let config = ModelConfig {
//!     architecture: Architecture::Llama,
//!     vocab_size: 100,
//!     hidden_size: 32,
//!     intermediate_size: 64,
//!     num_hidden_layers: 2,
//!     num_attention_heads: 4,
//!     num_key_value_heads: 2,
//!     head_dim: 8,
//!     max_position_embeddings: 128,
//!     rms_norm_eps: 1e-5,
//!     rope: RopeConfig { theta: 1e4, scaling: None },
//!     tie_word_embeddings: true,
//!     initializer_range: 0.02,
//!     bos_token_id: None,
//!     eos_token_ids: Vec::new(),
//!     moh: Some(MohConfig {
//!         router: RouterKind::QueryNorm,
//!         shared_heads: 1.into(),
//!         routed_top_k: HeadCounts::All(1),
//!     }),
//! };
//! let mut model = Model::new::<Error>(Cpu, ElementType::F32, config, 16, |tensor, values| {
//!     initial::initialize(1, 0.02, &tensor.name, &tensor.shape(), values);
//!     Ok(())
//! })?;
//!
//! let output = model.run(&[vec![5, 17, 42]])?;
//! assert_eq!(output.active_heads(0, 0, 2).len(), 2);
//!
//! let logits = Generator::new(&model, 16)?.extend(&[5, 17, 42])?;
//! assert_eq!(logits.len(), output.vocab_size);
//! # Ok(())
//! # }
//! ```

mod activations;
mod architecture;
mod auxiliary_loss;
mod block_pass;
pub mod config;
mod error;
pub mod flops;
mod generation;
mod head_counts;
mod head_request;
pub mod initial;
mod inspection;
#[cfg(all(debug_assertions, not(test)))]
mod instances;
mod layers;
pub mod layout;
mod model;
pub mod model_parallel;
mod output;
pub mod parameters;
mod pass_sizes;
mod passes;
pub mod rope;
pub mod router;
mod sampler;
mod shared_heads;
pub mod slice;
mod step_sums;
mod teacher;
pub mod tensors;

pub use activations::{Activations, PassShape, PassSlot, Recompute, Slots};
pub use architecture::Architecture;
pub use auxiliary_loss::{AuxiliaryLoss, AuxiliaryLosses};
pub use block_pass::{
    BlockOutput, BlockPass, EndsPass, block_alone, ends_alone, most_windows, pass_alone,
    windows_of_pass,
};
pub use config::{
    LayerHeads, Llama3Scaling, ModelConfig, MohConfig, RopeConfig, RopeScaling, YarnScaling,
};
pub use error::{Error, Result};
pub use generation::{BatchGenerator, BatchOptions, Chunk, Generator, PassHeads, SequenceId};
pub use head_counts::HeadCounts;
pub use head_request::{Active, DEFAULT_ACTIVE_SHARE, HeadRequest};
pub use inspection::{BlockMagnitudes, Magnitude};
pub use layout::{ModelLayout, Segment};
pub use model::{LossConfig, Model, ModelBuffers};
pub use model_parallel::ModelParallel;
pub use moh_kernels::sampling::LogProbabilities;
pub use output::ModelOutput;
pub use parameters::{FlatBuffers, Shard};
pub use pass_sizes::{PassRole, PassSizes};
pub use router::RouterKind;
pub use sampler::{Sampler, Sampling};
pub use shared_heads::{SharedChoice, SharedHeadSets};
pub use step_sums::{StepSums, Sums};
pub use teacher::{Distillation, Teacher};
