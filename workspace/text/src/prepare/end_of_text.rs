//! The choice of the token that ends each document of a token file. Without one a model does not learn
//! where a text ends.

use std::io::{ErrorKind, Read};
use std::path::Path;

use crate::TextTokenizer;
use moh_data::DocumentEnd;
use serde_json::Value;

use crate::prepare::{Error, Result};

/// The files beside a `tokenizer.json` that name special tokens; the first that names one counts.
const NAMING_FILES: [&str; 2] = ["tokenizer_config.json", "special_tokens_map.json"];
/// Maximum bytes of such a file.
const MAX_JSON_BYTES: u64 = 64 << 20;

/// The end-of-text token that preparation appends to each document.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AppendEos<'a> {
    /// `eos_token` of the files beside the `tokenizer.json`, unless the post-processor already
    /// ends each document.
    #[default]
    Default,
    /// This token, unless the post-processor already appends it.
    Token(&'a str),
    /// None.
    Never,
}

/// How documents are ended.
pub(crate) struct Ending {
    /// The id to append.
    pub(crate) append: Option<u32>,
    pub(crate) end: DocumentEnd,
}

impl Ending {
    pub(crate) fn choose(tokenizer: &TextTokenizer, choice: AppendEos<'_>) -> Result<Self> {
        let suffix = tokenizer.suffix();
        let by_suffix = || suffix.and_then(|id| tokenizer.token(id)).into();
        let named = match choice {
            AppendEos::Never => return Ok(Self { append: None, end: by_suffix() }),
            AppendEos::Token(token) => Some((token.to_owned(), None)),
            AppendEos::Default => named_eos(tokenizer.path())?,
        };
        let Some((token, file)) = named else {
            return match suffix {
                Some(_) => Ok(Self { append: None, end: by_suffix() }),
                None => Err(Error::unusable(
                    tokenizer.path(),
                    format!(
                        "no end-of-text token: the post-processor adds none, and neither {} nor \
                         {} beside it has an eos_token: name a token with --eos-token, or write \
                         documents without one with --no-append-eos",
                        NAMING_FILES[0], NAMING_FILES[1]
                    ),
                )),
            };
        };
        let Some(id) = tokenizer.id(&token) else {
            let by = file.map_or("--eos-token".to_owned(), |file| format!("eos_token of {file}"));
            return Err(Error::unusable(
                tokenizer.path(),
                format!(
                    "has no token {token:?}, which {by} names: name one of its tokens with \
                     --eos-token"
                ),
            ));
        };
        let append = (suffix != Some(id)).then_some(id);
        Ok(Self { append, end: DocumentEnd::Token(token) })
    }
}

/// The `eos_token` of the files beside a `tokenizer.json`, and the file that names it.
fn named_eos(tokenizer: &Path) -> Result<Option<(String, Option<&'static str>)>> {
    for name in NAMING_FILES {
        let path = tokenizer.with_file_name(name);
        let Some(fields) = read_json(&path)? else { continue };
        let content = match &fields["eos_token"] {
            // Tokens with properties are objects.
            Value::Object(token) => token.get("content").unwrap_or(&Value::Null),
            Value::Null => continue,
            token => token,
        };
        let Value::String(token) = content else {
            return Err(Error::unusable(
                &path,
                "eos_token: expected a string, or an object with the string content: correct it, or name \
                 a token with --eos-token",
            ));
        };
        return Ok(Some((token.clone(), Some(name))));
    }
    Ok(None)
}

/// A JSON file; `None` if it does not exist.
fn read_json(path: &Path) -> Result<Option<Value>> {
    let file = match std::fs::File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(moh_files::io(path))?,
    };
    let fault = |reason: String| {
        Error::unusable(
            path,
            format!("{reason}: correct it, or name the end-of-text token with --eos-token"),
        )
    };
    let mut bytes = Vec::new();
    file.take(MAX_JSON_BYTES + 1).read_to_end(&mut bytes).map_err(moh_files::io(path))?;
    if bytes.len() as u64 > MAX_JSON_BYTES {
        return Err(fault(format!("longer than {MAX_JSON_BYTES} bytes")));
    }
    serde_json::from_slice(&bytes).map(Some).map_err(|error| fault(format!("not JSON: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `named_eos` with these contents of the two files.
    fn named(config: &str, map: &str) -> Result<Option<String>> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in NAMING_FILES.into_iter().zip([config, map]) {
            if !text.is_empty() {
                std::fs::write(dir.path().join(name), text).unwrap();
            }
        }
        Ok(named_eos(&dir.path().join("tokenizer.json"))?.map(|(token, _)| token))
    }

    #[test]
    fn the_first_file_that_names_a_token_counts() {
        let found = |config, map| named(config, map).unwrap();
        assert_eq!(found("", ""), None);
        assert_eq!(found(r#"{"eos_token": "a"}"#, r#"{"eos_token": "b"}"#).as_deref(), Some("a"));
        let object = r#"{"eos_token": {"content": "b", "lstrip": false}}"#;
        assert_eq!(found(r#"{"eos_token": null}"#, object).as_deref(), Some("b"));
        assert_eq!(found("", object).as_deref(), Some("b"));
        assert_eq!(found("{}", "[]"), None);
    }

    #[test]
    fn broken_files_are_errors_that_name_them() {
        for broken in ["{\"eos_token\": \"</", "{\"eos_token\": 2}", "{\"eos_token\": {}}", "\u{1}"]
        {
            let error = named(broken, "").unwrap_err().to_string();
            assert!(error.contains("tokenizer_config.json: "), "{error}");
            assert!(error.contains("--eos-token"), "{error}");
            let error = named("{}", broken).unwrap_err().to_string();
            assert!(error.contains("special_tokens_map.json: "), "{error}");
        }
    }
}
