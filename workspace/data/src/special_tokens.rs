//! The tokens that begin and end a text, by a tokenizer's configuration.

use std::path::Path;

use serde_json::Value;

use crate::{Result, TokenizerFile};

/// The file that names a tokenizer's special tokens.
const CONFIG_FILE: &str = "tokenizer_config.json";
/// Maximum bytes of that file.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// Special tokens of a tokenizer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// The token that begins a text.
    pub bos: Option<u32>,
    /// The token that ends a text.
    pub eos: Option<u32>,
}

impl SpecialTokens {
    /// The `bos_token` and `eos_token` of `tokenizer_config.json` in `dir`, by their ids in
    /// `tokenizer.json`; none without that file.
    pub fn read(dir: &Path) -> Result<Self> {
        let path = dir.join(CONFIG_FILE);
        let kind = "a tokenizer's configuration";
        let bytes = moh_files::read_bounded_if_any(&path, MAX_FILE_BYTES, kind)?;
        let Some(bytes) = bytes else { return Ok(Self::default()) };
        let config: Value = serde_json::from_slice(&bytes)
            .map_err(|error| moh_files::unusable(&path, format!("not valid JSON: {error}")))?;
        let tokenizer = TokenizerFile::load(dir)?;
        let id = |key: &str| id_of(&tokenizer, config.get(key)?);
        Ok(SpecialTokens { bos: id("bos_token"), eos: id("eos_token") })
    }
}

/// The id of a token that is given as a text or as an object with its `content`.
fn id_of(tokenizer: &TokenizerFile, token: &Value) -> Option<u32> {
    let text = token.as_str().or_else(|| token.get("content")?.as_str())?;
    tokenizer.id(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn tokens_are_texts_or_objects_and_may_be_absent() {
        let tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
            "pre_tokenizer": null, "post_processor": null, "decoder": null,
            "added_tokens": [],
            "model": {"type": "WordLevel", "vocab": {"<s>": 0, "</s>": 1}, "unk_token": "<s>"},
        });
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, value: &Value| {
            std::fs::write(dir.path().join(name), value.to_string()).unwrap();
        };
        write("tokenizer.json", &tokenizer);
        let read = || SpecialTokens::read(dir.path()).unwrap();
        assert_eq!(read(), SpecialTokens::default());
        for (config, expected) in [
            (json!({"bos_token": "<s>", "eos_token": {"content": "</s>"}}), (Some(0), Some(1))),
            (json!({"bos_token": null, "eos_token": "</none>"}), (None, None)),
        ] {
            write("tokenizer_config.json", &config);
            let SpecialTokens { bos, eos } = read();
            assert_eq!((bos, eos), expected);
        }
        std::fs::write(dir.path().join("tokenizer_config.json"), "{").unwrap();
        assert!(SpecialTokens::read(dir.path()).is_err());
    }
}
