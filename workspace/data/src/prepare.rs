//! Text to a token file: documents are read in batches, encoded in parallel and written in order,
//! so the result does not depend on the number of threads.

use std::path::{Path, PathBuf};

use crate::documents::{Document, Documents, input_bytes};
use crate::{Error, Provenance, Result, TextTokenizer, TokenFileInfo, TokenFileWriter};

/// Bytes of text after which a batch ends: enough for many threads, in little memory.
const BATCH_BYTES: usize = 8 << 20;
/// Documents after which a batch ends.
const BATCH_DOCUMENTS: usize = 16 << 10;

/// Inputs and output of [`prepare`].
#[derive(Clone, Copy, Debug)]
pub struct Prepare<'a> {
    /// Encodes the text. Its post-processor adds BOS and EOS.
    pub tokenizer: &'a TextTokenizer,
    /// JSON lines (`.jsonl`, `.json`) or plain text (any other extension, one document per file).
    pub inputs: &'a [PathBuf],
    /// The field of a JSON line with the text.
    pub field: &'a str,
    /// The token file's path without its endings.
    pub prefix: &'a Path,
    /// Whether an existing token file is replaced.
    pub overwrite: bool,
}

/// Writes the token file of `options`. `progress` receives the bytes of input processed and their
/// total. Documents without any token are left out.
///
/// Fails if an input is not text, naming file and line, if an output exists, or if there is nothing
/// to write. A failure leaves no files behind.
pub fn prepare(options: Prepare<'_>, progress: &mut dyn FnMut(u64, u64)) -> Result<TokenFileInfo> {
    let Prepare { tokenizer, inputs, field, prefix, overwrite } = options;
    if inputs.is_empty() {
        return Err(Error::Empty { reason: "no input: name at least one file".to_owned() });
    }
    let total = input_bytes(inputs)?;
    refuse_inputs_as_outputs(inputs, &TokenFileWriter::outputs(prefix))?;
    let vocab_size = tokenizer.vocab_size();
    let mut writer = if overwrite {
        TokenFileWriter::replace(prefix, vocab_size)?
    } else {
        TokenFileWriter::create(prefix, vocab_size)?
    };
    let mut documents = Documents::new(inputs, field);
    let (mut text_bytes, mut done) = (0, 0);
    progress(0, total);
    loop {
        let batch = next_batch(&mut documents)?;
        if batch.is_empty() {
            break;
        }
        let texts: Vec<&str> = batch.iter().map(|document| document.text.as_str()).collect();
        for tokens in tokenizer.encode_batch(&texts)? {
            if !tokens.is_empty() {
                writer.push_document(&tokens)?;
            }
        }
        for document in &batch {
            text_bytes += document.text.len() as u64;
            done += document.input_bytes;
        }
        // An input may have grown since its size was read.
        progress(done.min(total), total);
    }
    if text_bytes == 0 {
        return Err(Error::Empty { reason: "the inputs contain no text".to_owned() });
    }
    progress(total, total);
    writer.finish(Provenance {
        tokenizer_hash: Some(tokenizer.hash().to_owned()),
        text_bytes,
        sources: inputs.iter().map(|input| input.display().to_string()).collect(),
    })
}

fn next_batch(documents: &mut Documents<'_>) -> Result<Vec<Document>> {
    let mut batch = Vec::new();
    let mut bytes = 0;
    while bytes < BATCH_BYTES && batch.len() < BATCH_DOCUMENTS {
        let Some(document) = documents.next().transpose()? else {
            break;
        };
        bytes += document.text.len();
        batch.push(document);
    }
    Ok(batch)
}

/// Protects an input against `--force`: the prefix's `.json` may be one.
pub(crate) fn refuse_inputs_as_outputs(inputs: &[PathBuf], outputs: &[PathBuf]) -> Result<()> {
    for input in inputs {
        let input = input.canonicalize().map_err(Error::io(input, "read"))?;
        for output in outputs {
            if output.canonicalize().is_ok_and(|output| output == input) {
                return Err(Error::OverwritesInput { path: output.clone() });
            }
        }
    }
    Ok(())
}
