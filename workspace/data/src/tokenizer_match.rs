//! Compares a tokenizer with the tokenizer that a token file records: the same bytes, the same content, or an accepted
//! other tokenizer.

use crate::pending::with_ending;
use crate::{Error, Result, TokenFile, TokenizerContent};

/// Tokens at the beginning of a token file. The hash of their text is recorded.
pub const BEGINNING_TOKENS: usize = 1024;

/// How a tokenizer fits a token file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TokenizerMatch {
    /// The token file records no tokenizer.
    Unrecorded,
    /// The file has the recorded bytes.
    Same,
    /// The file has other bytes than recorded, and the recorded content.
    Rewritten,
    /// The tokenizer is another, or its content is not recorded, and it gives the same ids on a sample.
    SameIds,
}

impl TokenizerMatch {
    /// Returns a remark for the user, as a clause about the tokenizer; `None` for the recorded bytes, or without a
    /// record.
    pub fn remark(self) -> Option<&'static str> {
        match self {
            TokenizerMatch::Unrecorded | TokenizerMatch::Same => None,
            TokenizerMatch::Rewritten => Some(
                "has other bytes than the file that the text was prepared with, and the same content",
            ),
            TokenizerMatch::SameIds => Some(
                "is not the one that the text was prepared with, and gives the same ids on a sample of it",
            ),
        }
    }
}

impl TokenFile {
    /// Compares a tokenizer with this hash and number of ids with the recorded tokenizer. If the hash is neither
    /// recorded nor accepted, calls `content`. The inner error is the difference.
    pub fn compare_tokenizer<E>(
        &self,
        hash: &str,
        vocab_size: usize,
        content: impl FnOnce() -> Result<TokenizerContent, E>,
    ) -> Result<Result<TokenizerMatch, String>, E> {
        let Some(info) = self.info() else { return Ok(Ok(TokenizerMatch::Unrecorded)) };
        let Some(recorded) = &info.tokenizer_hash else {
            return Ok(Ok(TokenizerMatch::Unrecorded));
        };
        if recorded == hash {
            return Ok(Ok(TokenizerMatch::Same));
        }
        if info.accepted_tokenizers.iter().any(|accepted| accepted == hash) {
            return Ok(Ok(TokenizerMatch::SameIds));
        }
        let content = content()?;
        let difference = match &info.tokenizer_content {
            None => {
                "other bytes than recorded, and whether the content is the same is not known, because it is \
                 not recorded"
                    .to_owned()
            }
            Some(recorded) => match content.first_difference(recorded) {
                None => return Ok(Ok(TokenizerMatch::Rewritten)),
                Some("vocabulary") if info.vocabulary_size != vocab_size as u64 => {
                    format!(
                        "the vocabulary differs, {vocab_size} ids, not {}",
                        info.vocabulary_size
                    )
                }
                Some(part) => format!("{part} differs"),
            },
        };
        Ok(Err(difference))
    }

    /// Records in `PREFIX.json` that the tokenizer with this hash gives the file's ids. Without that file, does
    /// nothing.
    pub fn accept_tokenizer(&self, hash: &str) -> Result<()> {
        let Some(mut info) = self.info().cloned() else { return Ok(()) };
        if !info.accepted_tokenizers.iter().any(|accepted| accepted == hash) {
            info.accepted_tokenizers.push(hash.to_owned());
        }
        let path = with_ending(self.prefix(), ".json");
        moh_files::write(&path, &info.to_json()).map_err(Error::io(&path, "write"))
    }
}
