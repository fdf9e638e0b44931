//! Benchmark tasks: multiple choice, and cloze as in LAMBADA. What is computed is what
//! lm-evaluation-harness computes for its output types `multiple_choice` and `loglikelihood` with a
//! causal model: [`TaskFile`] reads examples, [`Encoder`] makes token sequences of them,
//! [`log_likelihoods`] runs the model, and [`Scores`] are the metrics.

mod encoder;
mod example;
mod log_likelihood;
mod queue;
mod scores;

pub use encoder::{Encoder, Request};
pub use example::{Example, TaskFile, TaskKind};
pub use log_likelihood::{LogLikelihood, log_likelihoods};
pub use scores::{Estimate, ExampleOutcome, Scores};
