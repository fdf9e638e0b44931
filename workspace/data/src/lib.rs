//! Token files and a deterministic order.
//!
//! [`TokenFileWriter`] writes a token file (Megatron's indexed dataset). [`TokenFile`] reads token files of any writer,
//! and [`Verify`] finds their problems. [`TrainingData`] maps a sample number to its tokens, as a pure function of the
//! seed. [`Windows`] divides a file for evaluation. [`TokenizerFile`] loads the parts of a tokenizer that training
//! needs, without the library that runs it. [`TokenDecoder`] decodes ids.

mod added_tokens;
mod content;
mod document_end;
mod error;
mod json_lines;
mod mapped;
mod mask;
mod mixture;
mod pending;
mod permutation;
mod samples;
mod token_decoder;
mod token_file;
mod token_index;
mod token_info;
mod token_type;
mod token_writer;
mod tokenizer_content;
mod tokenizer_file;
mod tokenizer_match;
mod tokenizer_source;
mod verify;
mod windows;

pub use content::TokenFileContent;
pub use document_end::DocumentEnd;
pub use error::{Error, Result};
pub use json_lines::json_lines;
pub use mask::MaskInfo;
pub use pending::{refuse_existing, with_ending};
pub use permutation::key_of;
pub use samples::{ORDER_VERSION, Order, Source, SourceStart, TrainingData};
pub use token_decoder::{TokenDecoder, byte_of, byte_token, bytes_of_token};
pub use token_file::TokenFile;
pub use token_info::TokenFileInfo;
pub use token_type::TokenType;
pub use token_writer::{
    CompleteTokenFile, TokenFileWriter, Written, publish_remaining, publish_token_files,
};
pub use tokenizer_content::{TokenizerContent, TokenizerJson};
pub use tokenizer_file::TokenizerFile;
pub use tokenizer_match::{BEGINNING_TOKENS, TokenizerMatch};
pub use tokenizer_source::{MAX_TOKENS, TokenizerSource};
pub use verify::{Problem, ProblemKind, Verification, Verify};
pub use windows::Windows;
