//! The faster library, tokenizers 1.0. It is a release candidate that recognises a word of its vocabulary by half
//! of a 64-bit hash, so that one in 4 billion unknown words becomes another word's token. Hence no ids leave here
//! that do not spell their text (`spelling`), and its panics are caught.

use std::panic::{AssertUnwindSafe, catch_unwind};

use serde_json::Value;
use tokenizers_1::pipeline::{EncodeOptions, Override, PipelineToken, PipelineTokenizer};
use tokenizers_1::{canonicalize_value, from_json};

use super::shape::Shape;
use super::spelling::Spelling;

/// A tokenizer in the faster library.
pub(super) struct Library {
    pipeline: PipelineTokenizer,
    options: EncodeOptions,
    spelling: Spelling,
}

impl Library {
    /// Loads a tokenizer.
    ///
    /// # Errors
    /// Fails with the library's reason.
    pub(super) fn new(mut json: Value, shape: Shape, split_special: bool) -> Result<Self, String> {
        let spelling = Spelling::new(&json, shape);
        // The ids around a text are added by the encoder, and nothing decodes here.
        for part in ["post_processor", "decoder"] {
            json[part] = Value::Null;
        }
        let load = || {
            canonicalize_value(&mut json).map_err(|error| error.to_string())?;
            from_json(&json.to_string()).map_err(|error| error.to_string())
        };
        let pipeline =
            catch_unwind(AssertUnwindSafe(load)).unwrap_or_else(|_| Err("it panics".to_owned()))?;
        let options = EncodeOptions {
            add_special_tokens: false,
            encode_special_tokens: split_special,
            padding: Override::Off,
            truncation: Override::Off,
        };
        Ok(Self { pipeline, options, spelling })
    }

    /// Appends the ids of a text; appends nothing and returns `false` if they do not spell it. `first` says whether
    /// a document begins with the text.
    pub(super) fn encode(&self, text: &str, first: bool, ids: &mut Vec<PipelineToken>) -> bool {
        let before = ids.len();
        let spelt = self.append(text, ids)
            && self.spelling.is_of(text, first, PipelineToken::cast_slice(&ids[before..]));
        if !spelt {
            ids.truncate(before);
        }
        spelt
    }

    /// Appends ids whose spelling is not checked; `false` if the library fails.
    pub(super) fn append(&self, text: &str, ids: &mut Vec<PipelineToken>) -> bool {
        // The library's buffers are cleared before each use, and ids that a panic leaves are dropped by the caller.
        let append = || self.pipeline.encode_into(text, &self.options, ids).is_ok();
        catch_unwind(AssertUnwindSafe(append)).unwrap_or(false)
    }
}
