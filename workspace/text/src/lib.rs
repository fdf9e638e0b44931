//! Text and token ids, by Hugging Face's library of tokenizers.
//!
//! [`TextTokenizer`] converts between text and ids, and checks whether it is the tokenizer of a token file.
//! [`TextStream`] decodes ids one by one.
//!
//! A tokenizer's chat template, a Jinja template, converts conversations to the text that its model expects, as
//! transformers' `apply_chat_template` does. [`ChatTemplate`] is read from a tokenizer's directory. Its [`Renderer`]
//! renders any number of [`Conversation`]s. [`Renderer::training_text`] also finds the text that a model is trained on:
//! the answers of the assistant. [`RenderThreads`] abandon a template that does not end.

mod bounds;
mod conversation;
mod error;
mod generation;
mod numbers;
mod panics;
#[cfg(feature = "prepare")]
pub mod prepare;
mod python;
mod reads;
mod render_threads;
mod renderer;
mod strings;
mod template;
mod text_stream;
mod tokenizer;
mod tokenizer_match;

pub use conversation::Conversation;
pub use error::{Error, Result};
pub use moh_data::bytes_of_token;
pub use numbers::beyond_json;
pub use render_threads::RenderThreads;
pub use renderer::{ChatNotes, MESSAGES_OF_LEAST_WORK, Renderer, TrainedTurns, TrainingText};
pub use template::ChatTemplate;
pub use text_stream::TextStream;
pub use tokenizer::TextTokenizer;
pub use tokenizer_match::beginning_blake3;
