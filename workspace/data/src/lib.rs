//! Token files: preparation, reading and a deterministic order.
//!
//! [`prepare`] converts text to a token file (Megatron's indexed dataset), and [`TokenFile`] reads
//! one, from any writer. [`TrainingData`] maps a sample number to its tokens, as a pure function of
//! the seed; [`Windows`] divides a file for evaluation. [`TextTokenizer`] converts between text and
//! ids, [`train_tokenizer`] trains a new tokenizer.

mod content;
mod documents;
mod end_of_text;
mod error;
mod input;
mod json_lines;
mod mapped;
mod mixture;
mod pending;
mod permutation;
mod prepare;
mod samples;
mod split;
mod text_stream;
mod token_file;
mod token_index;
mod token_info;
mod token_type;
mod token_writer;
mod tokenizer;
mod tokenizer_content;
mod tokenizer_match;
mod tokenizer_training;
mod windows;

pub use content::TokenFileContent;
pub use end_of_text::{AppendEos, DocumentEnd};
pub use error::{Error, Result};
pub use input::Format;
pub use json_lines::{JsonLine, JsonLines};
pub use prepare::{Prepare, PreparedFile, prepare};
pub use samples::{ORDER_VERSION, Order, Source, SourceStart, TrainingData};
pub use split::Split;
pub use text_stream::TextStream;
pub use token_file::TokenFile;
pub use token_info::{Provenance, TokenFileInfo};
pub use token_type::TokenType;
pub use token_writer::TokenFileWriter;
pub use tokenizer::TextTokenizer;
pub use tokenizer_content::TokenizerContent;
pub use tokenizer_match::TokenizerMatch;
pub use tokenizer_training::{BEGIN_OF_TEXT, END_OF_TEXT, TrainTokenizer, train_tokenizer};
pub use windows::Windows;
