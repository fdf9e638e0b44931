//! Small tokenizers, and token files of texts.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use moh_text::TextTokenizer;
use moh_text::prepare::{AppendEos, Prepare, prepare};

use crate::small_tokenizer::write_tokenizer;

/// Writes the small tokenizer with these words to `tok` in a directory.
pub fn small_tokenizer(dir: &Path, words: &[&str]) -> TextTokenizer {
    write_tokenizer(&dir.join("tok"), words);
    TextTokenizer::load(&dir.join("tok")).unwrap()
}

/// Writes the token file `prefix` of a text, with the tokenizer of a directory.
pub fn prepare_text(tokenizer: &Path, text: &Path, prefix: &Path, append_eos: AppendEos<'_>) {
    let (tokenizer, inputs) = (TextTokenizer::load(tokenizer).unwrap(), [text.to_owned()]);
    let options = Prepare { append_eos, ..Prepare::new(&tokenizer, &inputs, prefix) };
    prepare(options, &AtomicBool::new(false), &mut ()).unwrap();
}
