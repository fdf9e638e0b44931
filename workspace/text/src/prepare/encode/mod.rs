//! Converts documents to ids, by tokenizers 1.0 where it is known to return the ids of 0.23, and by 0.23 elsewhere. The
//! ids always equal the result of [`TextTokenizer::encode`].

mod ahead;
pub(crate) mod chat;
mod joints;
mod library;
mod probe;
pub(crate) mod shape;
mod spelling;
#[cfg(test)]
mod tests;

use crate::TextTokenizer;
use moh_data::TokenizerJson;
use tokenizers_1::pipeline::PipelineToken;

pub use self::ahead::LoadAhead;
use self::library::{Library, Pipeline};
use self::shape::Shape;
use self::spelling::Spelling;
use crate::prepare::Result;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Encoded {
    /// The ids, including the post-processor's ids before and after a document.
    pub(crate) ids: Vec<u32>,
    /// The ids of special tokens that the text names, in order, without the post-processor's ids.
    pub(crate) special_in_text: Vec<u32>,
}

/// Encodes documents from any number of threads.
pub(crate) struct Encoder<'a> {
    tokenizer: &'a TextTokenizer,
    library: Result<Library, String>,
    special: Special,
    prefix: Vec<u32>,
    /// `None` if the post-processor does more than put ids before and after a text: then 0.23 encodes documents
    /// whole.
    suffix: Option<Vec<u32>>,
}

impl<'a> Encoder<'a> {
    /// Creates an encoder of a tokenizer. `ahead` may have loaded the tokenizer already.
    pub(crate) fn new(
        tokenizer: &'a TextTokenizer,
        json: &TokenizerJson,
        ahead: Option<&LoadAhead>,
    ) -> Result<Self> {
        let prefix = tokenizer.encode_prompt("")?;
        let text = tokenizer.encode_without_special_tokens("a")?;
        let whole = tokenizer.encode("a")?;
        let suffix = whole.strip_prefix(&prefix[..]).and_then(|ids| ids.strip_prefix(&text[..]));
        let suffix = suffix.map(<[u32]>::to_vec);
        let special = Special::new(tokenizer.special_ids());
        let shape =
            match suffix {
                Some(_) => Shape::new(&json.fields),
                None => Err("its post-processor does more than put tokens before and after a text"
                    .to_owned()),
            };
        let library = shape.and_then(|shape| {
            // While `ahead` loads the faster library.
            let spelling = Spelling::new(json, shape);
            let pipeline = ahead.and_then(|ahead| ahead.take(json));
            let pipeline = pipeline.map_or_else(|| Pipeline::load(json), Ok)?;
            let split_special = tokenizer.splits_special_tokens();
            checked(Library::new(json, pipeline, shape, spelling, split_special), tokenizer, json)
        });
        Ok(Self { tokenizer, library, special, prefix, suffix })
    }

    /// Returns why the slower library encodes every document, or `None` if it does not.
    pub(crate) fn fallback(&self) -> Option<&str> {
        self.library.as_ref().err().map(String::as_str)
    }

    pub(crate) fn encode(&self, text: &str) -> Result<Encoded> {
        let Some(suffix) = &self.suffix else {
            let in_text = self.tokenizer.encode_without_special_tokens(text)?;
            let (ids, special_in_text) =
                (self.tokenizer.encode(text)?, self.special.among(&in_text));
            return Ok(Encoded { ids, special_in_text });
        };
        // English has four bytes an id or more.
        let room = self.prefix.len() + text.len() / 4 + suffix.len();
        let mut ids: Vec<PipelineToken> = Vec::with_capacity(room);
        extend(&mut ids, &self.prefix);
        let start = ids.len();
        let encoded = self.library.as_ref().is_ok_and(|library| library.encode(text, &mut ids));
        if !encoded {
            extend(&mut ids, &self.tokenizer.encode_without_special_tokens(text)?);
        }
        let special_in_text = self.special.among(PipelineToken::cast_slice(&ids[start..]));
        extend(&mut ids, suffix);
        // In place: both are 32 bits.
        Ok(Encoded { ids: ids.into_iter().map(u32::from).collect(), special_in_text })
    }
}

fn extend(ids: &mut Vec<PipelineToken>, more: &[u32]) {
    ids.extend(more.iter().copied().map(PipelineToken::from));
}

fn checked(
    library: Library,
    tokenizer: &TextTokenizer,
    json: &TokenizerJson,
) -> Result<Library, String> {
    let mut ids = Vec::new();
    for text in probe::texts(json, &library.spelling) {
        let expected = tokenizer.encode_without_special_tokens(&text);
        let expected = expected.map_err(|error| error.to_string())?;
        ids.clear();
        if !library.append(&text, &mut ids) {
            return Err(format!("the faster library fails for the text {text:?}"));
        }
        let ids = PipelineToken::cast_slice(&ids);
        // The slower library encodes texts with bytes that the vocabulary lacks.
        if !ids.contains(&u32::MAX) && ids != expected {
            return Err(format!("the faster library gives other ids for the text {text:?}"));
        }
    }
    Ok(library)
}

struct Special {
    /// By id minus the first id: whether the id is special.
    is_special: Vec<bool>,
    first: u32,
}

impl Special {
    fn new(ids: impl Iterator<Item = u32>) -> Self {
        let ids: Vec<u32> = ids.collect();
        let first = ids.first().copied().unwrap_or(0);
        let mut is_special = vec![false; ids.last().map_or(0, |last| (last - first) as usize + 1)];
        ids.iter().for_each(|id| is_special[(id - first) as usize] = true);
        Self { is_special, first }
    }

    fn among(&self, ids: &[u32]) -> Vec<u32> {
        // Smaller ids wrap to large numbers.
        let place = |id: &u32| id.wrapping_sub(self.first) as usize;
        // Most texts name no special token. A loop without a branch finds that sooner.
        let near = |id: &u32| usize::from(place(id) < self.is_special.len());
        if ids.iter().map(near).sum::<usize>() == 0 {
            return Vec::new();
        }
        let is_special = |id: &&u32| self.is_special.get(place(id)) == Some(&true);
        ids.iter().filter(is_special).copied().collect()
    }
}
