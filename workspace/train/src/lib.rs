//! Recipes, optimiser, checkpoints and the training loop.

mod error;
pub mod recipe;
pub mod schedule;

pub use error::{Error, KeyChange};
pub use recipe::{Fault, Recipe, Stage};
pub use schedule::Schedule;
