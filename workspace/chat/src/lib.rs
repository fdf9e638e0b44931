//! Conversations as texts: a tokenizer's chat template, the Jinja template by which its model expects messages,
//! rendered as transformers' `apply_chat_template` does.
//!
//! [`ChatTemplate`] is read from a tokenizer's directory, and its [`Renderer`] renders any number of
//! [`Conversation`]s. [`Renderer::training_text`] also finds what a model is trained on: the answers of the
//! assistant.

mod conversation;
mod error;
mod generation;
mod python;
mod renderer;
mod template;

pub use conversation::Conversation;
pub use error::{Error, Result};
pub use renderer::{Renderer, TrainedTurns, TrainingText};
pub use template::ChatTemplate;
