//! Documents copied from token files to another one, byte for byte: what merging and dividing have in common.

use std::path::{Path, PathBuf};

use crate::pending::with_ending;
use crate::token_file::StoredDocument;
use crate::{Error, Result, TokenFile, TokenFileWriter};

/// Bytes between two reports of progress.
const REPORT_BYTES: u64 = 16 << 20;

/// Opens a token file to copy from, and checks that its `.json` describes it.
pub(crate) fn open(prefix: &Path) -> Result<TokenFile> {
    let file = TokenFile::open(prefix)?;
    file.ids_below(&file.content())?;
    Ok(file)
}

/// The recorded size of the vocabulary or, without a record, the one that the ids need.
pub(crate) fn vocabulary(file: &TokenFile) -> Result<u64> {
    match file.info() {
        Some(info) => Ok(info.vocabulary_size),
        None => Ok(u64::from(file.largest_id(0..file.num_tokens())?) + 1),
    }
}

/// Starts a token file with the stored type of another one, and with a mask if that has one.
pub(crate) fn start(
    prefix: &Path,
    like: &TokenFile,
    vocabulary: u64,
    overwrite: bool,
) -> Result<TokenFileWriter> {
    // A larger one has no ids to be checked.
    let vocabulary = usize::try_from(vocabulary).unwrap_or(usize::MAX);
    let writer = TokenFileWriter::start_stored(prefix, vocabulary, like.token_type(), overwrite)?;
    if like.has_mask() { writer.with_mask() } else { Ok(writer) }
}

/// Checks that no output replaces an input while it is read.
pub(crate) fn refuse_inputs_as_outputs(inputs: &[TokenFile], outputs: &[&Path]) -> Result<()> {
    let bin = |prefix: &Path| with_ending(prefix, ".bin").canonicalize().ok();
    let inputs: Vec<Option<PathBuf>> = inputs.iter().map(|input| bin(input.prefix())).collect();
    for output in outputs {
        let found = bin(output);
        if found.is_some() && inputs.contains(&found) {
            return Err(Error::Invalid(format!(
                "{}: is both an input and an output: choose another output",
                output.display()
            )));
        }
    }
    Ok(())
}

/// Copies documents, and reports the bytes of the tokens, of all of them.
pub(crate) struct Copier<'a> {
    progress: &'a mut dyn FnMut(u64, u64),
    done: u64,
    reported: u64,
    total: u64,
}

impl<'a> Copier<'a> {
    pub(crate) fn new(inputs: &[TokenFile], progress: &'a mut dyn FnMut(u64, u64)) -> Self {
        let bytes = |file: &TokenFile| file.num_tokens() * file.token_type().bytes() as u64;
        let total = inputs.iter().map(bytes).fold(0, u64::saturating_add);
        Self { progress, done: 0, reported: 0, total }
    }

    /// Appends a document.
    pub(crate) fn copy(
        &mut self,
        from: &TokenFile,
        document: &StoredDocument,
        to: &mut TokenFileWriter,
    ) -> Result<()> {
        for bytes in from.stored(document) {
            to.push_stored(bytes)?;
            self.done += bytes.len() as u64;
        }
        if let Some(mask) = from.mask() {
            // The positions of a document, which are tokens of the file. Counting validates the bytes.
            let (start, end) = (document.start, document.start + document.tokens);
            from.count_trained(start..end)?;
            to.push_stored_mask(&mask.bytes()[start as usize..end as usize])?;
        }
        to.end_document()?;
        if self.done - self.reported >= REPORT_BYTES || self.done == self.total {
            self.reported = self.done;
            (self.progress)(self.done, self.total);
        }
        Ok(())
    }
}
