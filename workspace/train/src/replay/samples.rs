//! Where the samples of a step come from.

use std::ops::Range;
use std::path::PathBuf;

use moh_data::TrainingData;

use crate::Error;

/// The place of a sample's text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampleSource {
    /// The sample's number.
    pub number: u64,
    /// The token file, without its endings.
    pub path: PathBuf,
    /// Positions of its tokens in the file; the last one is only a target.
    pub tokens: Range<u64>,
    /// The documents of the file that these tokens are of.
    pub documents: Range<u64>,
}

/// The places of samples.
pub(super) fn sources(
    data: &TrainingData,
    samples: Range<u64>,
) -> Result<Vec<SampleSource>, Error> {
    let source = |number| {
        let (source, start) = data.locate(number);
        let file = &data.files()[source];
        let tokens = start..start + data.sequence_length() as u64 + 1;
        let documents = file.documents_of(tokens.clone())?;
        Ok(SampleSource { number, path: file.prefix().to_owned(), tokens, documents })
    };
    samples.map(source).collect()
}
