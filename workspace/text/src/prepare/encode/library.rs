//! The faster library, tokenizers 1.0, a release candidate. It recognises a word of its vocabulary by half of a 64-bit
//! hash, so one in 4 billion unknown words becomes another word's token. Hence ids are used only if they spell their
//! text (`spelling`). The library's panics are caught.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use moh_data::TokenizerJson;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value, json};
use tokenizers_1::pipeline::{
    EncodeOptions, Model, Override, PipelineModelScratch, PipelineToken, PipelineTokenizer,
    Segment, Span, SpecialSegmentIterator, normalize_all,
};
use tokenizers_1::{canonicalize_value, from_json};
use unicode_normalization::UnicodeNormalization;

use super::joints::Joints;
use super::shape::{Shape, Words};
use super::spelling::{Spelling, alphabet};
use crate::panics::quietly;

/// A tokenizer in the faster library, and how its texts are encoded.
pub(super) struct Library {
    pipeline: PipelineTokenizer,
    options: EncodeOptions,
    pub(super) spelling: Spelling,
    /// Whether a text is first normalized to NFC.
    nfc: bool,
    /// Splits texts into words, if the whole text is one word for the tokenizer.
    joints: Option<Joints>,
    lacking: Lacking,
    /// The buffers of each thread that encodes words.
    buffers: Mutex<Vec<Buffers>>,
}

/// A tokenizer as the faster library loads it.
pub(super) struct Pipeline {
    tokenizer: PipelineTokenizer,
    /// The fields that it was loaded from, except the vocabulary and the merges.
    fields: Value,
    lacking: Lacking,
}

/// Ids of bytes without a token in the vocabulary. The library requires a token for every byte. The bytes' ids follow
/// the vocabulary's ids, so added tokens have larger ids there than here. Ids do not spell a text with such a byte.
#[derive(Clone)]
struct Lacking(Range<u32>);

impl Lacking {
    /// Returns the ids, and the vocabulary with their tokens.
    fn of<'a>(json: &'a TokenizerJson, fields: &Value) -> Result<(Self, Cow<'a, str>), String> {
        let vocabulary = json.vocabulary.get();
        let is_missing =
            |token: &String| json.tokens.binary_search_by(|(other, _)| other.cmp(token)).is_err();
        let names: Vec<String> = match &fields["model"] {
            model if model["byte_level"] == true => alphabet().filter(is_missing).collect(),
            model if model["byte_fallback"] == true => {
                (0..=u8::MAX).map(|byte| format!("<0x{byte:02X}>")).filter(is_missing).collect()
            }
            _ => Vec::new(),
        };
        let first = json.tokens.len() as u32;
        if names.is_empty() {
            return Ok((Self(first..first), vocabulary.into()));
        }
        if json.tokens.iter().any(|&(_, id)| id >= first) {
            return Err("its vocabulary lacks bytes and has gaps".to_owned());
        }
        let more: Map<String, Value> =
            names.into_iter().zip(first..).map(|(name, id)| (name, id.into())).collect();
        let lacking = Self(first..first + more.len() as u32);
        let more = Value::Object(more).to_string();
        let known = vocabulary.strip_suffix('}').ok_or("its vocabulary is a list")?;
        let comma = if first == 0 { "" } else { "," };
        Ok((lacking, format!("{known}{comma}{}", &more[1..]).into()))
    }
}

impl Pipeline {
    pub(super) fn load(json: &TokenizerJson) -> Result<Self, String> {
        let fields = canonical_fields(json)?;
        let (lacking, vocabulary) = Lacking::of(json, &fields)?;
        let text = canonical(&fields, json, &vocabulary).map_err(|error| error.to_string())?;
        let load = || from_json(&text).map_err(|error| error.to_string());
        let tokenizer = quietly(load).unwrap_or_else(|| Err("it panics".to_owned()))?;
        Ok(Self { tokenizer, fields, lacking })
    }

    /// Returns whether a tokenizer is the same, except for the vocabulary and the merges.
    pub(super) fn has_fields_of(&self, json: &TokenizerJson) -> bool {
        canonical_fields(json).is_ok_and(|fields| fields == self.fields)
    }
}

/// Returns the fields of a tokenizer in the library's own form, without vocabulary and merges.
fn canonical_fields(json: &TokenizerJson) -> Result<Value, String> {
    let mut fields = json.fields.clone();
    // The encoder adds the ids around a text, and nothing decodes here.
    for part in ["post_processor", "decoder"] {
        fields[part] = Value::Null;
    }
    // The library recognises a BPE model by these fields.
    fields["model"]["vocab"] = json!({});
    fields["model"]["merges"] = json!([]);
    canonicalize_value(&mut fields).map_err(|error| error.to_string())?;
    Ok(fields)
}

/// Returns the JSON of the tokenizer with these fields, this vocabulary, and the merges as the slower library writes
/// them.
fn canonical(fields: &Value, json: &TokenizerJson, vocabulary: &str) -> serde_json::Result<String> {
    let [model, others] = [&fields["model"], fields].map(Value::to_string);
    let mut model: BTreeMap<&str, &RawValue> = serde_json::from_str(&model)?;
    model.insert("vocab", serde_json::from_str(vocabulary)?);
    model.insert("merges", &json.merges);
    let model = to_raw_value(&model)?;
    let mut all: BTreeMap<&str, &RawValue> = serde_json::from_str(&others)?;
    all.insert("model", &model);
    serde_json::to_string(&all)
}

/// Data that the model caches between texts, above all the ids of frequent words.
struct Buffers {
    model: PipelineModelScratch,
    words: Vec<Span>,
}

impl Library {
    /// Creates the loaded tokenizer of `json`, with the spelling of its ids.
    pub(super) fn new(
        json: &TokenizerJson,
        pipeline: Pipeline,
        shape: Shape,
        spelling: Spelling,
        split_special: bool,
    ) -> Self {
        let joints = if shape.words == Words::None { Joints::new(json) } else { None };
        let options = EncodeOptions {
            add_special_tokens: false,
            encode_special_tokens: split_special,
            padding: Override::Off,
            truncation: Override::Off,
        };
        let (nfc, buffers) = (shape.nfc, Mutex::default());
        let Pipeline { tokenizer: pipeline, lacking, .. } = pipeline;
        Self { pipeline, options, spelling, nfc, joints, lacking, buffers }
    }

    /// Appends the ids of a text. If the ids do not spell the text, appends nothing and returns `false`.
    pub(super) fn encode(&self, text: &str, ids: &mut Vec<PipelineToken>) -> bool {
        let before = ids.len();
        let spelt = self.append(text, ids) && {
            let ids = PipelineToken::cast_slice(&ids[before..]);
            let is_of = |text: &str| self.spelling.is_of(text, ids);
            is_of(text) || self.nfc && is_of(&text.nfc().collect::<String>())
        };
        if !spelt {
            ids.truncate(before);
        }
        spelt
    }

    /// Appends ids without checking their spelling, [`u32::MAX`] for each byte without a token in the vocabulary.
    /// Returns `false` if the library fails.
    pub(super) fn append(&self, text: &str, ids: &mut Vec<PipelineToken>) -> bool {
        let (before, Range { start, end }) = (ids.len(), self.lacking.0.clone());
        let append = || match &self.joints {
            Some(joints) => self.append_words(text, joints, ids),
            None => self.pipeline.encode_into(text, &self.options, ids),
        };
        // After a panic, the library's buffers are cleared before their next use, ours are lost, and the caller drops
        // the ids that were appended.
        let is_done = quietly(append).is_some_and(|done| done.is_ok());
        if start < end {
            for token in &mut ids[before..] {
                *token = match u32::from(*token) {
                    id if id < start => continue,
                    id if id < end => u32::MAX.into(),
                    id => (id - (end - start)).into(),
                };
            }
        }
        is_done
    }

    /// Appends ids as the library does, but word by word. The library looks a word up before it merges characters, and
    /// merging takes seven times as long.
    fn append_words(
        &self,
        text: &str,
        joints: &Joints,
        ids: &mut Vec<PipelineToken>,
    ) -> tokenizers_1::Result<()> {
        let (pipeline, split_special) = (&self.pipeline, self.options.encode_special_tokens);
        let added = pipeline.get_added_vocabulary();
        let lock = || self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || Buffers { model: pipeline.get_model().init_scratch(), words: Vec::new() };
        let mut buffers = lock().pop().unwrap_or_else(new);
        for segment in SpecialSegmentIterator::new(text, added, false, split_special) {
            let (text, offset) = match segment {
                Segment::Text { text, input_offset } => (text, input_offset),
                Segment::SpecialToken(id) => {
                    ids.push(id.into());
                    continue;
                }
            };
            let text = normalize_all(pipeline.get_normalizers(), text, offset)?;
            if u32::try_from(text.len()).is_err() {
                return Err("a text of 4 GiB".into());
            }
            for segment in SpecialSegmentIterator::new(&text, added, true, split_special) {
                match segment {
                    Segment::Text { text, .. } => {
                        let Buffers { model, words } = &mut buffers;
                        joints.words(text, words);
                        pipeline.get_model().tokenize_spans(text, words, model, ids)?;
                    }
                    Segment::SpecialToken(id) => ids.push(id.into()),
                }
            }
        }
        lock().push(buffers);
        Ok(())
    }
}
