//! Token files of texts.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use moh_text::TextTokenizer;
use moh_text::prepare::{AppendEos, Prepare, prepare};

/// Writes the token file `prefix` of a text, by the tokenizer of a directory, without end-of-text tokens.
pub fn prepare_text(tokenizer: &Path, text: &Path, prefix: &Path) {
    let tokenizer = TextTokenizer::load(tokenizer).unwrap();
    let (inputs, append_eos) = ([text.to_owned()], AppendEos::Never);
    let options = Prepare { append_eos, ..Prepare::new(&tokenizer, &inputs, prefix) };
    prepare(options, &AtomicBool::new(false), &mut ()).unwrap();
}
