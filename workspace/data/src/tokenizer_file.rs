//! A `tokenizer.json` without the library that runs it: what tells it from others, its ids, and their bytes.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use crate::{Error, Result, TokenDecoder, TokenizerContent, TokenizerJson};

/// Reads `path/tokenizer.json`, or `path` itself if it is a file; returns its path too.
pub fn read_tokenizer(path: &Path) -> Result<(PathBuf, Vec<u8>)> {
    let path = if path.is_file() { path.to_path_buf() } else { path.join("tokenizer.json") };
    let bytes = std::fs::read(&path).map_err(Error::io(&path, "read"))?;
    Ok((path, bytes))
}

/// A tokenizer's file.
#[derive(Debug)]
pub struct TokenizerFile {
    path: PathBuf,
    hash: String,
    json: TokenizerJson,
}

impl TokenizerFile {
    /// Reads `path/tokenizer.json`, or `path` itself if it is a file.
    pub fn load(path: &Path) -> Result<Self> {
        let (path, bytes) = read_tokenizer(path)?;
        let json = TokenizerJson::of_file(&bytes).map_err(|error| {
            moh_files::unusable(&path, format!("not a valid tokenizer: {error}"))
        })?;
        Ok(Self { path, hash: blake3::hash(&bytes).to_hex().to_string(), json })
    }

    /// The `tokenizer.json`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// blake3 of the file, in hexadecimal.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// What identifies the tokenizer, whatever the bytes of its file.
    pub fn content(&self) -> TokenizerContent {
        self.json.content()
    }

    /// The first place where the content is not another tokenizer's, with both values; `None` if the contents
    /// are the same.
    pub fn first_difference(&self, other: &Self) -> Option<String> {
        self.json.first_difference(&other.json)
    }

    /// The id of a token.
    pub fn id(&self, token: &str) -> Option<u32> {
        let added = self.json.added_tokens().into_iter().find(|added| added.content == token);
        added.map(|added| added.id).or_else(|| self.json.id(token))
    }

    /// The largest id + 1.
    pub fn vocab_size(&self) -> usize {
        self.ids().into_values().max().map_or(0, |largest| largest as usize + 1)
    }

    /// Whether every token of `other` has the same id here.
    pub fn has_tokens_of(&self, other: &Self) -> bool {
        let ids = self.ids();
        other.ids().iter().all(|(token, id)| ids.get(token) == Some(id))
    }

    /// The leading rows of a model with the tokenizer `old` and so many rows that are the same tokens here: none of them
    /// is a token that the model did not have.
    pub fn kept_rows(&self, old: &Self, rows: usize) -> usize {
        let old: HashSet<u32> = old.ids().into_values().collect();
        let new = self.ids().into_values().filter(|id| !old.contains(id));
        new.min().map_or(rows, |first| rows.min(first as usize))
    }

    fn ids(&self) -> HashMap<String, u32> {
        let added = self.json.added_tokens().into_iter().map(|added| (added.content, added.id));
        self.json.tokens.iter().cloned().chain(added).collect()
    }

    /// What tells the bytes of ids; `None` if the tokenizer decodes as none of the known.
    pub fn decoder(&self) -> Option<TokenDecoder> {
        TokenDecoder::new(&self.json)
    }
}
