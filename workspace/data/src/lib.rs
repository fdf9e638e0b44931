//! Token files: preparation, reading and a deterministic order.

mod error;
mod mapped;
mod pending;
mod text_stream;
mod token_file;
mod token_index;
mod token_info;
mod token_type;
mod token_writer;
mod tokenizer;

pub use error::{Error, Result};
pub use text_stream::TextStream;
pub use token_file::TokenFile;
pub use token_info::{Provenance, TokenFileInfo};
pub use token_type::TokenType;
pub use token_writer::TokenFileWriter;
pub use tokenizer::TextTokenizer;
