//! One optimisation step: the passes of its micro-batches, the exchange between data ranks, the gradient norm, and
//! AdamW's update if the step is applied. Also the loss of a model on held-out text ([`Evaluator`]). Other crates
//! define the steps of a recipe and the source of their tokens. `examples/train_tiny.rs` trains a model with this
//! crate.

mod block_norms;
mod data_parallel;
mod error;
pub mod guard;
mod loss;
mod optimizer;
pub mod pipeline_schedule;
pub mod ranks;
mod samples;
mod step_buffers;
mod step_config;
mod stepper;

pub use block_norms::{BlockNorms, Norms, finite_or_nan};
pub use error::{Error, Result};
pub use loss::{DecodedBytes, EvaluationText, Evaluator, GoOn, Loss, LossSums};
pub use optimizer::{GroupFactors, Hyperparameters, OptimizerState, TensorKind};
pub use ranks::Ranks;
pub use samples::ReadSample;
pub use step_buffers::{StepBuffers, StepSizes};
pub use step_config::{StepConfig, StepGroups, Update};
pub use stepper::{Observer, StepResult, Stepper, TensorGradient};
