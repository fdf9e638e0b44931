//! The choice of the token that ends each document of a token file. Without such a token a model does not learn where a
//! text ends.

use crate::TextTokenizer;
use moh_data::DocumentEnd;

use crate::prepare::{Error, Result};

/// The end-of-text token that preparation appends to each document.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AppendEos<'a> {
    /// `eos_token` of the files beside the `tokenizer.json`, unless the post-processor already
    /// ends each document.
    #[default]
    Default,
    /// This token, unless the post-processor already appends it.
    Token(&'a str),
    /// No token.
    Never,
}

pub(crate) struct Ending {
    pub(crate) append: Option<u32>,
    pub(crate) end: DocumentEnd,
}

impl Ending {
    pub(crate) fn choose(tokenizer: &TextTokenizer, choice: AppendEos<'_>) -> Result<Self> {
        let suffix = tokenizer.suffix();
        let by_suffix = || suffix.and_then(|id| tokenizer.token(id)).into();
        let named = match choice {
            AppendEos::Never => return Ok(Self { append: None, end: by_suffix() }),
            AppendEos::Token(token) => Some(token),
            AppendEos::Default => tokenizer.special_tokens().get("eos_token").map(String::as_str),
        };
        let Some(token) = named else {
            return match suffix {
                Some(_) => Ok(Self { append: None, end: by_suffix() }),
                None => Err(Error::unusable(
                    tokenizer.path(),
                    "no end-of-text token: the post-processor adds none, and neither tokenizer_config.json nor \
                     special_tokens_map.json beside it has an eos_token: name a token with --eos-token, or write \
                     documents without one with --no-append-eos",
                )),
            };
        };
        let Some(id) = tokenizer.id(token) else {
            let reason = format!(
                "has no token {token:?}, which --eos-token names: name one of its tokens with --eos-token"
            );
            return Err(Error::unusable(tokenizer.path(), reason));
        };
        let append = (suffix != Some(id)).then_some(id);
        Ok(Self { append, end: DocumentEnd::Token(token.to_owned()) })
    }
}
