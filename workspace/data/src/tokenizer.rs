//! Text to token ids and back, by a Hugging Face `tokenizer.json`. The file decides everything:
//! which ids frame a document (its post-processor) and how text is split. Truncation and padding,
//! which some files carry from their own training, are switched off.

use std::path::{Path, PathBuf};

use rayon::prelude::*;
use tokenizers::Tokenizer;

use crate::{Error, Result, TextStream};

/// A tokenizer.
pub struct TextTokenizer {
    inner: Tokenizer,
    path: PathBuf,
    hash: String,
    vocab_size: usize,
    /// What the post-processor puts in front of a text, usually BOS.
    prefix: Vec<u32>,
}

impl TextTokenizer {
    /// Reads `dir/tokenizer.json`.
    ///
    /// Fails when it is missing or not a tokenizer.
    pub fn load(dir: &Path) -> Result<Self> {
        let path = dir.join("tokenizer.json");
        let bytes = std::fs::read(&path).map_err(Error::io(&path, "read"))?;
        Self::from_bytes(path, &bytes)
    }

    /// The tokenizer in `bytes`; errors name `path`.
    pub(crate) fn from_bytes(path: PathBuf, bytes: &[u8]) -> Result<Self> {
        let fault = |path: &Path, reason: String| Error::Tokenizer {
            path: path.to_path_buf(),
            reason: format!("not a usable tokenizer: {reason}"),
        };
        let mut inner =
            Tokenizer::from_bytes(bytes).map_err(|error| fault(&path, error.to_string()))?;
        inner.with_truncation(None).map_err(|error| fault(&path, error.to_string()))?;
        inner.with_padding(None);
        let Some(largest) = inner.get_vocab(true).into_values().max() else {
            return Err(fault(&path, "its vocabulary is empty".to_owned()));
        };
        let framed =
            inner.encode_fast("a", true).map_err(|error| fault(&path, error.to_string()))?;
        let special = framed.get_special_tokens_mask().iter().take_while(|&&mask| mask == 1);
        let prefix = framed.get_ids()[..special.count()].to_vec();
        let hash = blake3::hash(bytes).to_hex().to_string();
        Ok(Self { inner, path, hash, vocab_size: largest as usize + 1, prefix })
    }

    /// The `tokenizer.json`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// blake3 of the `tokenizer.json`, in hexadecimal.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// The largest id + 1.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The ids of a document, with BOS and EOS exactly as the tokenizer's post-processor says.
    ///
    /// Fails when the tokenizer does, which a byte-level one never does.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.ids(text, true)
    }

    /// The ids of a text to be continued: what the post-processor puts in front, the text, and
    /// nothing behind it, even where documents end in EOS.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.prefix.clone();
        ids.extend(self.ids(text, false)?);
        Ok(ids)
    }

    /// [`TextTokenizer::encode`] of many documents, in parallel; the order stays.
    pub fn encode_batch<T: AsRef<str> + Sync>(&self, texts: &[T]) -> Result<Vec<Vec<u32>>> {
        texts.par_iter().map(|text| self.encode(text.as_ref())).collect()
    }

    fn ids(&self, text: &str, framed: bool) -> Result<Vec<u32>> {
        let encoding =
            self.inner.encode_fast(text, framed).map_err(|error| self.failure(&*error))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of ids; `skip_special` leaves BOS, EOS and their like out. Ids without a token
    /// (a padded vocabulary has some) give nothing.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        self.inner.decode(ids, skip_special).map_err(|error| self.failure(&*error))
    }

    /// Decodes ids one by one as a continuation of `context`, for text shown while generated.
    pub fn stream(&self, context: &[u32], skip_special: bool) -> TextStream<'_> {
        TextStream::new(self, context, skip_special)
    }

    /// Bytes of UTF-8 that the ids stand for, special tokens left out: what a loss in bits is
    /// divided by to compare models with different vocabularies.
    pub fn decoded_bytes(&self, ids: &[u32]) -> Result<u64> {
        Ok(self.decode(ids, true)?.len() as u64)
    }

    fn failure(&self, error: &(dyn std::error::Error + Send + Sync)) -> Error {
        Error::Tokenizer { path: self.path.clone(), reason: error.to_string() }
    }
}

impl std::fmt::Debug for TextTokenizer {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("TextTokenizer")
            .field("path", &self.path)
            .field("vocab_size", &self.vocab_size)
            .finish_non_exhaustive()
    }
}
