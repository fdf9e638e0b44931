//! Losses and logits of a model.

mod error;
mod logits;
mod loss;

pub use error::Error;
pub use logits::{LogitsOf, logits};
pub use loss::{EvaluationText, Evaluator, Loss, Sums};
