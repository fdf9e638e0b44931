//! `PREFIX.json`: metadata of a token file beyond Megatron's format, above all its tokenizer.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::{DocumentEnd, Error, MaskInfo, Result, TokenFileContent, TokenType, TokenizerContent};

const MAX_JSON_BYTES: u64 = 16 << 20;

/// The contents of `PREFIX.json`. The writer sets the fields that it knows, such as the number of tokens.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TokenFileInfo {
    /// blake3 of the tokenizer.json, in hexadecimal; absent if there was no tokenizer.
    #[serde(default)]
    pub tokenizer_hash: Option<String>,
    /// The content that identifies the tokenizer, whatever the bytes of its file; absent from files of version 0.1.0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer_content: Option<TokenizerContent>,
    /// blake3 of the tokenizer.json of other tokenizers that give the same ids on a sample of the file, as found by
    /// `moh-data accept`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub accepted_tokenizers: Vec<String>,
    /// blake3 of the text of the file's first 1024 tokens, as the tokenizer decodes them, in hexadecimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beginning_blake3: Option<String>,
    /// The tokenizer's number of ids: its largest id + 1.
    pub vocabulary_size: u64,
    /// Documents in the file.
    pub documents: u64,
    /// Tokens in the file.
    pub tokens: u64,
    /// Bytes of the source text.
    #[serde(default)]
    pub text_bytes: u64,
    /// Names of the inputs.
    #[serde(default)]
    pub sources: Vec<String>,
    /// The token that ends each document.
    #[serde(default, skip_serializing_if = "DocumentEnd::is_unknown")]
    pub eos_token: DocumentEnd,
    /// The special tokens that texts named and that were encoded as such, with their number; absent if not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub special_tokens_in_text: Option<BTreeMap<String, u64>>,
    /// Whether special tokens that texts named were encoded as text.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub split_special_tokens: bool,
    /// The mask beside the file; absent if all tokens are trained on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask: Option<MaskInfo>,
    /// The stored type of a token.
    pub dtype: TokenType,
    /// The content of the `.bin` and `.idx` that this file describes; absent from files of version
    /// 0.1.0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<TokenFileContent>,
}

impl TokenFileInfo {
    /// Reads a `PREFIX.json`. Returns `None` if the file does not exist.
    pub(crate) fn read(path: &Path) -> Result<Option<Self>> {
        match std::fs::metadata(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::io(path, "read")(error)),
            Ok(kind) if kind.len() > MAX_JSON_BYTES => {
                return Err(Error::token_file(
                    path,
                    format!("{} bytes are too many for a token file's metadata", kind.len()),
                ));
            }
            Ok(_) => {}
        }
        let bytes = moh_files::read(path).map_err(Error::io(path, "read"))?;
        serde_json::from_slice(&bytes).map(Some).map_err(|fault| {
            Error::token_file(path, format!("not a token file's metadata: {fault}"))
        })
    }

    pub(crate) fn to_json(&self) -> Vec<u8> {
        // A struct of integers, strings, a list and a map with keys of strings always serialises.
        let mut text = serde_json::to_vec_pretty(self).unwrap_or_default();
        text.push(b'\n');
        text
    }
}
