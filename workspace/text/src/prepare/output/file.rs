//! One token file of a preparation, until it has its name.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::beginning_blake3;
use moh_data::{
    BEGINNING_TOKENS, CompleteTokenFile, MaskInfo, TokenFile, TokenFileInfo, TokenFileWriter,
    publish_remaining, with_ending,
};

use super::journal::FileState;
use crate::prepare::end_of_text::Ending;
use crate::prepare::preparation::PreparedFile;
use crate::prepare::{Error, Prepare, Result, Split};

pub(super) struct Output {
    pub(super) writer: TokenFileWriter,
    pub(super) text_bytes: u64,
    /// Tokens of conversations that are trained on.
    pub(super) trained: u64,
    special: BTreeMap<u32, u64>,
}

impl Output {
    /// Starts a token file in `directory`, or resumes it after `state`.
    pub(super) fn resume(
        options: &Prepare<'_>,
        prefix: &Path,
        directory: &Path,
        state: FileState,
    ) -> Result<Self> {
        let FileState { written, text_bytes, special, trained } = state;
        let vocab_size = options.tokenizer.vocab_size();
        let writer =
            TokenFileWriter::resume(prefix, vocab_size, options.overwrite, directory, written)?;
        let writer = if options.chat.is_some() { writer.with_mask()? } else { writer };
        Ok(Self { writer, text_bytes, trained, special })
    }

    pub(super) fn count(&mut self, text_bytes: u64, special: &[u32]) {
        self.text_bytes += text_bytes;
        for &id in special {
            *self.special.entry(id).or_default() += 1;
        }
    }

    pub(super) fn state(&self) -> FileState {
        let (text_bytes, special) = (self.text_bytes, self.special.clone());
        FileState { written: self.writer.written(), text_bytes, special, trained: self.trained }
    }

    pub(super) fn complete(
        mut self,
        options: &Prepare<'_>,
        sources: &[PathBuf],
        ending: &Ending,
    ) -> Result<CompleteTokenFile> {
        let tokenizer = options.tokenizer;
        let beginning = self.writer.beginning(BEGINNING_TOKENS)?;
        let template = options.chat.map(|chat| chat.template.template());
        let chat_template_blake3 = template.map(|template| template.blake3().to_owned());
        // An id without a token has no text that names it.
        let named = |(id, count)| Some((tokenizer.token(id)?, count));
        Ok(self.writer.complete(TokenFileInfo {
            tokenizer_hash: Some(tokenizer.hash().to_owned()),
            tokenizer_content: Some(tokenizer.content()?),
            beginning_blake3: Some(beginning_blake3(tokenizer, &beginning)?),
            text_bytes: self.text_bytes,
            sources: sources.iter().map(|path| path.display().to_string()).collect(),
            eos_token: ending.end.clone(),
            special_tokens_in_text: Some(self.special.into_iter().filter_map(named).collect()),
            split_special_tokens: tokenizer.splits_special_tokens(),
            mask: Some(MaskInfo { chat_template_blake3, ..MaskInfo::default() }),
            ..TokenFileInfo::default()
        })?)
    }
}

pub(crate) fn prefixes(options: &Prepare<'_>) -> Vec<PathBuf> {
    match options.split {
        None => vec![options.prefix.to_path_buf()],
        Some(_) => Split::prefixes(options.prefix).to_vec(),
    }
}

/// Publishes the files of a preparation that was interrupted when all of them were complete.
pub(super) fn publish_again(
    options: &Prepare<'_>,
    prefixes: &[PathBuf],
    directory: &Path,
) -> Result<Vec<PreparedFile>> {
    let mut files = Vec::with_capacity(prefixes.len());
    for prefix in prefixes {
        publish_remaining(prefix, directory, options.overwrite, options.chat.is_some())?;
        let info = TokenFile::open(prefix)?.info().cloned();
        let Some(info) = info else {
            let reason = "the interrupted preparation wrote it, and it is gone: begin anew with --begin-anew";
            return Err(Error::unusable(&with_ending(prefix, ".json"), reason));
        };
        files.push(PreparedFile { prefix: prefix.clone(), info });
    }
    moh_files::remove_directory(directory).map_err(moh_files::io(directory))?;
    Ok(files)
}
