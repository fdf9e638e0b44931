//! A `tokenizer.json` without the library that runs it: what tells it from others, its ids, and their bytes.

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

    /// Returns the `tokenizer.json`.
    pub fn path(&self) -> &Path {
        &self.source.path
    }

    /// blake3 of the tokenizer, in hexadecimal; see [`TokenizerSource::hash`].
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// What a user should know of files that disagree, in a sentence each.
    pub fn remarks(&self) -> &[String] {
        &self.source.remarks
    }

    /// Returns the id of the special token with a name, such as `eos_token`.
    pub fn special(&self, name: &str) -> Option<u32> {
        self.id(self.source.special.get(name)?)
    }

    /// What identifies the tokenizer, whatever the bytes of its file.
    pub fn content(&self) -> TokenizerContent {
        self.json.content()
    }

    /// Returns the first place where the content is not another tokenizer's, with both values; `None` if the contents
    /// are the same.
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

    /// Returns the leading rows of a model with the tokenizer `old` and so many rows that are the same tokens here:
    /// none of them is a token that the model did not have.
    pub fn kept_rows(&self, old: &Self, rows: usize) -> usize {
        let old: HashSet<u32> = old.ids().into_values().collect();
        let new = self.ids().into_values().filter(|id| !old.contains(id));
        new.min().map_or(rows, |first| rows.min(first as usize))
    }

    fn ids(&self) -> HashMap<String, u32> {
        let added = self.source.added.iter().map(|(id, added)| (added.content.clone(), *id));
        self.json.tokens.iter().cloned().chain(added).collect()
    }

    /// What tells the bytes of ids; `None` if the tokenizer decodes as none of the known.
    pub fn decoder(&self) -> Option<TokenDecoder> {
        TokenDecoder::new(&self.json, &self.source.added)
    }
}
