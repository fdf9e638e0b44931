//! Text to token files: documents are read in batches, encoded in parallel and written in order, so
//! the result does not depend on the number of threads.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::documents::{Document, Documents};
use crate::end_of_text::Ending;
use crate::input::{check, is_standard_input};
use crate::pending::with_ending;
use crate::split::SplitPart;
use crate::token_writer::publish;
use crate::tokenizer::EncodedDocument;
use crate::tokenizer_match::{BEGINNING_TOKENS, beginning_blake3};
use crate::{
    AppendEos, Error, Format, Provenance, Result, Split, TextTokenizer, TokenFileInfo,
    TokenFileWriter,
};

/// Bytes of text after which a batch ends: enough for many threads, in little memory.
const BATCH_BYTES: usize = 8 << 20;
/// Documents after which a batch ends.
const BATCH_DOCUMENTS: usize = 16 << 10;

/// Inputs and output of [`prepare`].
#[derive(Clone, Copy, Debug)]
pub struct Prepare<'a> {
    /// Encodes the text. Its post-processor adds BOS.
    pub tokenizer: &'a TextTokenizer,
    /// Files, and `-` for standard input.
    pub inputs: &'a [PathBuf],
    /// The format of all inputs; by default JSON lines for names in `.jsonl` and `.json`, and plain
    /// text for others.
    pub format: Option<Format>,
    /// The field of a JSON line with the text.
    pub field: &'a str,
    /// The end-of-text token of each document.
    pub append_eos: AppendEos<'a>,
    /// Divides the documents between two token files, `PREFIX-train` and `PREFIX-validation`.
    pub split: Option<Split>,
    /// The token file's path without its endings.
    pub prefix: &'a Path,
    /// Whether an existing token file is replaced.
    pub overwrite: bool,
}

impl<'a> Prepare<'a> {
    /// The defaults: the field `text`, the tokenizer's end-of-text token, one token file, and no
    /// replacement.
    pub fn new(tokenizer: &'a TextTokenizer, inputs: &'a [PathBuf], prefix: &'a Path) -> Self {
        Self {
            tokenizer,
            inputs,
            format: None,
            field: "text",
            append_eos: AppendEos::Default,
            split: None,
            prefix,
            overwrite: false,
        }
    }
}

/// A token file that [`prepare`] has written.
#[derive(Clone, Debug, PartialEq)]
pub struct PreparedFile {
    /// Its path without its endings.
    pub prefix: PathBuf,
    /// Its contents.
    pub info: TokenFileInfo,
}

/// Writes the token file of `options`, or with a split those of training and of validation.
/// `progress` receives the bytes of input processed and their total, 0 if it is unknown. Documents
/// without any token are left out.
///
/// # Errors
/// Fails if an input is not text, naming file and line, if no end-of-text token is known, if an
/// output exists, if there is nothing to write, or if a part of a split has no document. A failure
/// leaves no files behind.
pub fn prepare(
    options: Prepare<'_>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<PreparedFile>> {
    let Prepare { tokenizer, inputs, format, field, append_eos, .. } = options;
    let total = check(inputs, format)?;
    let ending = Ending::choose(tokenizer, append_eos)?;
    let mut outputs = Outputs::start(options)?;
    let mut documents = Documents::new(inputs, field, format);
    let mut done = 0;
    progress(0, total);
    loop {
        let batch = next_batch(&mut documents)?;
        if batch.is_empty() {
            break;
        }
        let texts: Vec<&str> = batch.iter().map(|document| document.text.as_str()).collect();
        for (mut encoded, document) in tokenizer.encode_documents(&texts)?.into_iter().zip(&batch) {
            done += document.input_bytes;
            if !encoded.ids.is_empty() {
                encoded.ids.extend(ending.append);
                outputs.push(&encoded, document.text.len())?;
            }
        }
        // An input may have grown since its size was read.
        progress(if total == 0 { done } else { done.min(total) }, total);
    }
    progress(if total == 0 { done } else { total }, total);
    outputs.finish(options, &ending)
}

/// The token files being written.
struct Outputs {
    parts: Vec<Output>,
    split: Option<Split>,
    /// Documents so far.
    documents: u64,
}

/// One token file being written.
struct Output {
    prefix: PathBuf,
    writer: TokenFileWriter,
    text_bytes: u64,
    /// The special tokens that texts named, with their number.
    special: BTreeMap<u32, u64>,
    /// The first tokens, at most [`BEGINNING_TOKENS`].
    beginning: Vec<u32>,
}

impl Outputs {
    fn start(options: Prepare<'_>) -> Result<Self> {
        let Prepare { tokenizer, inputs, split, prefix, overwrite, .. } = options;
        let prefixes = match split {
            None => vec![prefix.to_path_buf()],
            // In the order of `SplitPart`.
            Some(_) => vec![with_ending(prefix, "-train"), with_ending(prefix, "-validation")],
        };
        let mut parts = Vec::with_capacity(prefixes.len());
        for prefix in prefixes {
            refuse_inputs_as_outputs(inputs, &TokenFileWriter::outputs(&prefix))?;
            let start = if overwrite { TokenFileWriter::replace } else { TokenFileWriter::create };
            let writer = start(&prefix, tokenizer.vocab_size())?;
            let (special, beginning) = (BTreeMap::new(), Vec::new());
            parts.push(Output { prefix, writer, text_bytes: 0, special, beginning });
        }
        Ok(Self { parts, split, documents: 0 })
    }

    /// Appends a document to its part.
    fn push(&mut self, encoded: &EncodedDocument, text_bytes: usize) -> Result<()> {
        let part = match self.split.map(|split| split.part(self.documents)) {
            None | Some(SplitPart::Training) => 0,
            Some(SplitPart::Validation) => 1,
        };
        self.documents += 1;
        let output = &mut self.parts[part];
        output.text_bytes += text_bytes as u64;
        for &id in &encoded.special_in_text {
            *output.special.entry(id).or_default() += 1;
        }
        let missing = BEGINNING_TOKENS - output.beginning.len();
        output.beginning.extend(encoded.ids.iter().take(missing));
        output.writer.push_document(&encoded.ids)
    }

    fn finish(self, options: Prepare<'_>, ending: &Ending) -> Result<Vec<PreparedFile>> {
        if self.parts.iter().all(|part| part.text_bytes == 0) {
            return Err(Error::Empty { reason: "the inputs contain no text".to_owned() });
        }
        if let Some(part) = self.parts.iter().find(|part| part.writer.documents() == 0) {
            let (name, documents) = (part.prefix.display(), self.documents);
            // No share divides a single document, as a book is.
            let remedy = match documents {
                1 if options.format != Some(Format::Paragraphs) => {
                    "--format paragraphs makes each paragraph of a text a document"
                }
                _ => "add documents, or give it a larger share in --split",
            };
            let reason = format!("{name}: would have no document, of {documents} in all: {remedy}");
            return Err(Error::Empty { reason });
        }
        let sources: Vec<_> =
            options.inputs.iter().map(|input| input.display().to_string()).collect();
        let (mut files, mut prefixes) = (Vec::new(), Vec::new());
        let tokenizer = options.tokenizer;
        // An id without a token has no text that names it.
        let named = |(id, count)| Some((tokenizer.token(id)?, count));
        for Output { prefix, writer, text_bytes, special, beginning } in self.parts {
            files.push(writer.complete(Provenance {
                tokenizer_hash: Some(tokenizer.hash().to_owned()),
                tokenizer_content: Some(tokenizer.content()?),
                beginning_blake3: Some(beginning_blake3(tokenizer, &beginning)?),
                text_bytes,
                sources: sources.clone(),
                eos_token: ending.end.clone(),
                special_tokens_in_text: Some(special.into_iter().filter_map(named).collect()),
                split_special_tokens: tokenizer.splits_special_tokens(),
            })?);
            prefixes.push(prefix);
        }
        let infos = publish(files, options.overwrite)?;
        let prepared = prefixes.into_iter().zip(infos);
        Ok(prepared.map(|(prefix, info)| PreparedFile { prefix, info }).collect())
    }
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

/// Checks that no output is one of the inputs, which `--force` would replace: the prefix's `.json`
/// may be one.
///
/// # Errors
/// [`Error::OverwritesInput`] if one is; [`Error::Io`] if an input cannot be read.
pub(crate) fn refuse_inputs_as_outputs(inputs: &[PathBuf], outputs: &[PathBuf]) -> Result<()> {
    // Only a file can be an output, and a pipe has no canonical path.
    for input in inputs.iter().filter(|input| !is_standard_input(input) && !is_pipe(input)) {
        let input = input.canonicalize().map_err(Error::io(input, "read"))?;
        for output in outputs {
            if output.canonicalize().is_ok_and(|output| output == input) {
                return Err(Error::OverwritesInput { path: output.clone() });
            }
        }
    }
    Ok(())
}

fn is_pipe(path: &Path) -> bool {
    path.metadata().is_ok_and(|kind| !kind.is_file())
}
