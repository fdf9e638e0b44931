//! Preparation: converts text in common file formats to token files.
//!
//! [`prepare`] reads files of Parquet, Arrow, JSON and plain text, compressed or not. It writes token files (Megatron's
//! indexed dataset), which [`moh_data::TokenFile`] reads. Token files of conversations get a mask of the assistant's
//! tokens. Reading, decoding, encoding and writing overlap on all cores. The result does not depend on the number of
//! cores. Files of datasets on the hub are downloaded ahead of their use. The same call resumes an interrupted
//! preparation.

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
