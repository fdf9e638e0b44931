//! A `tokenizer.json` without the library that runs it: its identity, its ids, and their bytes.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use crate::{Result, TokenDecoder, TokenizerContent, TokenizerJson, TokenizerSource};

/// A tokenizer's file.
#[derive(Debug)]
pub struct TokenizerFile {
    source: TokenizerSource,
    hash: String,
    json: TokenizerJson,
}

impl TokenizerFile {
    /// Reads `path/tokenizer.json`, or `path` itself if it is a file, and the files beside it.
    pub fn load(path: &Path) -> Result<Self> {
        let source = TokenizerSource::read(path)?;
        let json = TokenizerJson::of_file(&source.json).map_err(|error| {
            moh_files::unusable(&source.path, format!("not a valid tokenizer: {error}"))
        })?;
        Ok(Self { hash: source.hash(), source, json })
    }

    /// Returns the path of the `tokenizer.json`.
    pub fn path(&self) -> &Path {
        &self.source.path
    }

    /// Returns the tokenizer's blake3, in hexadecimal; see [`TokenizerSource::hash`].
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Returns remarks for the user on files that disagree, one sentence each.
    pub fn remarks(&self) -> &[String] {
        &self.source.remarks
    }

    /// Returns the id of the special token with a name, such as `eos_token`.
    pub fn special(&self, name: &str) -> Option<u32> {
        self.id(self.source.special.get(name)?)
    }

    /// Returns the content that identifies the tokenizer, whatever the bytes of its file.
    pub fn content(&self) -> TokenizerContent {
        self.json.content()
    }

    /// Returns the first difference from the content of `other`, with both values. Returns `None` if the contents are
    /// the same.
    pub fn first_difference(&self, other: &Self) -> Option<String> {
        self.json.first_difference(&other.json)
    }

    /// Returns the id of a token.
    pub fn id(&self, token: &str) -> Option<u32> {
        let added = self.source.added.iter().find(|(_, added)| added.content == token);
        added.map(|(id, _)| *id).or_else(|| self.json.id(token))
    }

    /// Returns the largest id + 1.
    pub fn vocab_size(&self) -> usize {
        self.ids().into_values().max().map_or(0, |largest| largest as usize + 1)
    }

    /// Returns whether every token of `other` has the same id here.
    pub fn has_tokens_of(&self, other: &Self) -> bool {
        let ids = self.ids();
        other.ids().iter().all(|(token, id)| ids.get(token) == Some(id))
    }

    /// Counts the leading rows that stay the same tokens in a model of `rows` rows with the tokenizer `old`. Counting
    /// stops at the first id that `old` does not have.
    pub fn kept_rows(&self, old: &Self, rows: usize) -> usize {
        let old: HashSet<u32> = old.ids().into_values().collect();
        let new = self.ids().into_values().filter(|id| !old.contains(id));
        new.min().map_or(rows, |first| rows.min(first as usize))
    }

    fn ids(&self) -> HashMap<String, u32> {
        let added = self.source.added.iter().map(|(id, added)| (added.content.clone(), *id));
        self.json.tokens.iter().cloned().chain(added).collect()
    }

    /// Returns the decoder of ids, or `None` if the tokenizer's decoder is not supported.
    pub fn decoder(&self) -> Option<TokenDecoder> {
        TokenDecoder::new(&self.json, &self.source.added)
    }
}
