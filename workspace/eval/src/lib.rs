//! Losses, logits and reports of a model.

mod error;
mod logits;
mod loss;
mod plot;

pub use error::Error;
pub use logits::{LogitsOf, logits};
pub use loss::{Evaluator, Loss, Sums};
pub use plot::{Curve, Mark, Plot};
