//! Preparation: text in any of its usual files becomes token files.
//!
//! [`prepare`] reads files of Parquet, Arrow, JSON and plain text, compressed or not, and writes token files
//! (Megatron's indexed dataset), which [`moh_data::TokenFile`] reads, of conversations with a mask of the assistant's
//! tokens. Reading, decoding, encoding and writing overlap on all cores; the result does not depend on their number.
//! Files of datasets on the hub are downloaded ahead of their use. An interrupted preparation continues
//! with the same call.

mod decode;
mod encode;
mod end_of_text;
mod fields;
mod names;
mod output;
mod pipeline;
mod preparation;
mod reader;
mod remote;
mod split;

pub use crate::{ChatNotes, Error, Result};
pub use encode::LoadAhead;
pub use end_of_text::AppendEos;
pub use names::{Inputs, can_continue};
pub use output::Counts;
pub use preparation::{
    BadRecords, Chat, Observer, Prepare, Prepared, PreparedFile, Progress, Sample, Selection,
    prepare,
};
pub use reader::Format;
#[doc(hidden)]
pub use reader::read_documents;
pub use split::Split;
