//! Grows a model's vocabulary to a larger tokenizer's.
//!
//! Tokens of the old tokenizer must keep their ids, and their rows are copied bit for bit. The row
//! of a new token is the mean of the rows of the old tokens that spell it. A row without an old
//! token (padding) is overwritten if a new token has its id, and unchanged otherwise. Rows added
//! for padding, and rows of tokens that cannot be spelled, are the mean of all rows of old tokens. A
//! vocabulary never shrinks.

use std::cell::OnceCell;
use std::collections::HashMap;
use std::path::Path;

use moh_data::MAX_TOKENS;
use moh_hf::model_directory::TOKENIZER_FILE;
use moh_text::TextTokenizer;
use tokenizers::Tokenizer;

use crate::Error;
use crate::spelling::Speller;

/// Rows of a model that adopts another tokenizer's vocabulary are a multiple of this by default.
pub(crate) const DEFAULT_MULTIPLE: usize = 128;

/// The source of each row of a grown vocabulary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Expansion {
    /// For each row from `kept` on, the old rows that it averages. Empty for the mean of all.
    sources: Vec<Vec<u32>>,
    /// Number of leading rows that are unchanged.
    kept: usize,
    /// Old rows with a token, in ascending order.
    owned: Vec<u32>,
    /// Sentences for the user about the tokenizers' files.
    pub remarks: Vec<String>,
}

impl Expansion {
    /// Plans the expansion of a model with `old_rows` rows from the tokenizer in `old_dir` to the
    /// tokenizer in `new_dir`, to a multiple of `pad_to` rows if given.
    ///
    /// # Errors
    /// Fails if a tokenizer cannot be read, or if an old token has a different id in
    /// the new tokenizer.
    pub fn plan(
        old_dir: &Path,
        new_dir: &Path,
        old_rows: usize,
        pad_to: Option<usize>,
    ) -> Result<Self, Error> {
        let old = TextTokenizer::load(old_dir)?;
        let new = TextTokenizer::load(new_dir)?;
        let mut expansion = Self::between(old.library(), new.library(), new_dir, old_rows, pad_to)?;
        expansion.remarks = [old.remarks(), new.remarks()].concat();
        Ok(expansion)
    }

    /// Plans the expansion as [`Expansion::plan`] does, with loaded tokenizers. Messages name `new_dir`.
    fn between(
        old: &Tokenizer,
        new: &Tokenizer,
        new_dir: &Path,
        old_rows: usize,
        pad_to: Option<usize>,
    ) -> Result<Self, Error> {
        let (old_vocabulary, new_vocabulary) = (old.get_vocab(true), new.get_vocab(true));
        let old_tokens = by_id(&old_vocabulary);
        for (id, token) in &old_tokens {
            let found = new.token_to_id(token);
            if found != Some(*id) {
                let now = match found {
                    Some(other) => format!("has id {other} in the new one"),
                    None => "is not in the new one".to_string(),
                };
                let token = token.escape_debug();
                let reason = format!(
                    "token \"{token}\" has id {id} in the model's tokenizer and {now}: tokens that \
                     the model knows must keep their ids"
                );
                return Err(Error::file(&new_dir.join(TOKENIZER_FILE), reason));
            }
        }
        let new_tokens = by_id(&new_vocabulary);
        let new_vocab = new_tokens.last().map_or(0, |(id, _)| *id as usize + 1);
        if new_vocab > MAX_TOKENS {
            let reason = format!("its largest id is {}, beyond {MAX_TOKENS}", new_vocab - 1);
            return Err(Error::file(&new_dir.join(TOKENIZER_FILE), reason));
        }
        // An old token beyond the model's rows never had a row: it is new to the model.
        let owned: Vec<u32> =
            old_tokens.iter().map(|(id, _)| *id).filter(|id| (*id as usize) < old_rows).collect();
        let is_owned = |id: &u32| owned.binary_search(id).is_ok();
        let rows = pad(old_rows.max(new_vocab), pad_to)?;
        let speller = Speller::new(old);
        let added = new.get_added_tokens_decoder();
        let mut sources: Vec<Vec<u32>> = (0..rows)
            .map(|row| if row < old_rows { vec![row as u32] } else { Vec::new() })
            .collect();
        for (id, token) in &new_tokens {
            if is_owned(id) {
                continue;
            }
            let mut spelled = match added.get(id) {
                Some(added) => speller.spell_text(&added.content),
                None => speller.spell_token(token),
            };
            spelled.retain(is_owned);
            sources[*id as usize] = spelled;
        }
        let kept = (0..old_rows).find(|&row| sources[row] != [row as u32]).unwrap_or(old_rows);
        sources.drain(..kept);
        Ok(Expansion { sources, kept, owned, remarks: Vec::new() })
    }

    /// Plans an expansion that only pads the rows to a multiple of `multiple`.
    pub fn padding(old_rows: usize, multiple: usize) -> Result<Self, Error> {
        let rows = pad(old_rows, Some(multiple))?;
        Ok(Expansion {
            sources: vec![Vec::new(); rows - old_rows],
            kept: old_rows,
            owned: (0..old_rows as u32).collect(),
            remarks: Vec::new(),
        })
    }

    /// Returns the number of rows after the expansion.
    pub fn num_rows(&self) -> usize {
        self.kept + self.sources.len()
    }

    /// Returns the number of leading rows that are copied bit for bit.
    pub fn num_kept(&self) -> usize {
        self.kept
    }

    /// Returns whether the expansion changes nothing.
    pub fn is_identity(&self) -> bool {
        self.sources.is_empty()
    }

    /// Returns the old rows that the new row `row` averages. Returns the row itself if it is unchanged, and no rows
    /// for the mean of all.
    pub fn spelling(&self, row: usize) -> Vec<u32> {
        match row.checked_sub(self.kept) {
            None => vec![row as u32],
            Some(index) => self.sources.get(index).cloned().unwrap_or_default(),
        }
    }

    /// Returns the new rows of a tensor with `width` elements per row. `old` reads a row of the old tensor.
    pub fn rows<'a>(&'a self, width: usize, old: &'a dyn Fn(u32, &mut [f32])) -> Rows<'a> {
        Rows { expansion: self, width, old, mean: OnceCell::new() }
    }
}

/// The rows of a tensor with a grown vocabulary. See [`Expansion::rows`].
pub(crate) struct Rows<'a> {
    expansion: &'a Expansion,
    width: usize,
    old: &'a dyn Fn(u32, &mut [f32]),
    /// The mean of all rows with a token, computed on first use.
    mean: OnceCell<Vec<f32>>,
}

impl Rows<'_> {
    /// Reads the new row `row` into `out`, which has the tensor's width. Means are accumulated in
    /// f64 in the order of the ids, so they are the same on every machine.
    pub fn read(&self, row: usize, out: &mut [f32]) {
        match self.expansion.spelling(row).as_slice() {
            [] => {
                out.copy_from_slice(self.mean.get_or_init(|| self.mean_of(&self.expansion.owned)))
            }
            [one] => (self.old)(*one, out),
            several => out.copy_from_slice(&self.mean_of(several)),
        }
    }

    fn mean_of(&self, ids: &[u32]) -> Vec<f32> {
        let mut sum = vec![0.0f64; self.width];
        let mut row = vec![0.0f32; self.width];
        for id in ids {
            (self.old)(*id, &mut row);
            for (sum, value) in sum.iter_mut().zip(&row) {
                *sum += f64::from(*value);
            }
        }
        let count = ids.len().max(1) as f64;
        sum.into_iter().map(|sum| (sum / count) as f32).collect()
    }
}

fn pad(rows: usize, multiple: Option<usize>) -> Result<usize, Error> {
    match rows.checked_next_multiple_of(multiple.unwrap_or(1)) {
        Some(rows) if rows <= MAX_TOKENS => Ok(rows),
        _ => Err(Error::Option(format!(
            "a vocabulary of {rows} rows cannot be padded to a multiple of {}: expected 1 to {MAX_TOKENS}",
            multiple.unwrap_or(1)
        ))),
    }
}

fn by_id(vocabulary: &HashMap<String, u32>) -> Vec<(u32, &str)> {
    let mut tokens: Vec<_> = vocabulary.iter().map(|(token, id)| (*id, token.as_str())).collect();
    tokens.sort_unstable();
    tokens
}

#[cfg(test)]
mod tests;
