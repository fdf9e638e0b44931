//! One optimisation step: the passes of its micro-batches, the exchange between data ranks, the gradient norm, and
//! AdamW's update if the step is applied. Also the loss of a model on held-out text ([`Evaluator`]). The crates above decide what a recipe's step is and where its tokens come
//! from. `examples/train_tiny.rs` trains a model with this crate.

mod block_norms;
mod data_parallel;
mod error;
pub mod guard;
mod loss;
mod not_finite;
#[cfg(test)]
mod on_ranks;
mod optimizer;
pub mod pipeline_schedule;
pub mod ranks;
#[cfg(test)]
mod ranks_on_threads;
mod samples;
mod step_buffers;
mod step_config;
mod stepper;
mod tensor_kind;
#[cfg(test)]
mod tiny_model;

pub use block_norms::{BlockNorms, Norms};
pub use error::Error;
pub use loss::{DecodedBytes, EvaluationText, Evaluator, GoOn, Loss, LossSums};
pub use not_finite::finite_or_nan;
pub use optimizer::{GroupFactors, Hyperparameters, OptimizerState};
pub use ranks::Ranks;
pub use samples::ReadSample;
pub use step_buffers::{StepBuffers, StepSizes};
pub use step_config::{StepConfig, StepGroups, Update};
pub use stepper::{Observer, StepResult, Stepper, TensorGradient};
pub use tensor_kind::TensorKind;

// The ranks of unit tests are in a file that other crates compile too.
#[cfg(test)]
extern crate self as moh_step;
