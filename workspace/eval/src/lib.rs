//! Losses and logits of a model, and what its heads do.
//!
//! The mean loss over the first two windows of a token file:
//!
//! ```
//! use moh_data::{TokenFile, Windows};
//! use moh_eval::{EvaluationText, Evaluator};
//! use moh_hf::StoredModel;
//! use moh_kernels::Cpu;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # std::env::set_current_dir("../..")?;
//! let stored = StoredModel::open("recipes/quickstart".as_ref())?;
//! let mut model = stored.load::<Cpu, f32>(Cpu, 64)?;
//! let file = TokenFile::open("recipes/quickstart/voyage-valid".as_ref())?;
//! let windows = Windows::new(file, 64)?;
//!
//! let text = EvaluationText { windows: &windows, count: 2, tokenizer: None };
//! let mut evaluator = Evaluator::new(&model, 2, windows.length())?;
//! let loss = evaluator.evaluate(&mut model, text, None, &mut |_, _| {})?;
//! assert!(loss.tokens == 2 * 63 && loss.loss > 0.0);
//! # Ok(())
//! # }
//! ```
//!
//! `Evaluator` has the buffers of such evaluations, `heads` what is measured of heads;
//! [`write_logits`] is for comparison with other implementations.

mod error;
pub mod heads;
mod logits;
mod loss;

pub use error::Error;
pub use logits::{read_ids, write_logits};
pub use loss::{EvaluationText, Evaluator, GoOn, Loss, LossSums};
