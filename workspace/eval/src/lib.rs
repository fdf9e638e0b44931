//! Losses and logits of a model, and its scores in benchmark tasks.

mod error;
mod logits;
mod loss;
pub mod tasks;

pub use error::Error;
pub use logits::{LogitsOf, logits};
pub use loss::{EvaluationText, Evaluator, GoOn, Loss, Sums};
