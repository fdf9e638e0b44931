//! Text to token files.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use crate::{RenderThreads, TextTokenizer, TrainedTurns};
use moh_data::{DocumentEnd, TokenFileInfo, TokenFileWriter, key_of};
use serde_json::{Value, json};

use crate::prepare::encode::chat::ChatEncoder;
use crate::prepare::encode::{Encoder, LoadAhead};
use crate::prepare::end_of_text::Ending;
use crate::prepare::fields::Fields;
use crate::prepare::names::{Input, Inputs, expand, is_standard_input, total_bytes};
use crate::prepare::output::{Begun, Counts, Outputs, Request};
use crate::prepare::pipeline::{self, Encoding, Work};
use crate::prepare::reader::{Format, ReadOptions};
use crate::prepare::remote::{Downloads, scheme};
use crate::prepare::{AppendEos, ChatNotes, Error, Result, Split};

/// The version of a preparation's output. Only the same version resumes an interrupted preparation.
const VERSION: u64 = 1;
/// The version of the conversion of conversations.
const CHAT_VERSION: u64 = 2;
/// Interval at which the listing of remote inputs checks whether to stop.
const LISTING_WAIT: Duration = Duration::from_millis(50);

/// Inputs and output of [`prepare`].
#[derive(Clone, Copy, Debug)]
pub struct Prepare<'a> {
    /// Encodes the text. Its post-processor adds BOS.
    pub tokenizer: &'a TextTokenizer,
    /// Loads the same tokenizer into the faster library, for texts.
    pub ahead: Option<&'a LoadAhead>,
    /// The inputs.
    pub inputs: Inputs<'a>,
    /// The format of all inputs; by default found from each input's content and name.
    pub format: Option<Format>,
    /// The source of a document's text: a field, a path of fields such as `a.b`, or a template of fields such as
    /// `{title} {text}`.
    pub field: &'a str,
    /// Set if the field is a list of messages, which the template renders.
    pub chat: Option<Chat<'a>>,
    /// The end-of-text token of each document.
    pub append_eos: AppendEos<'a>,
    /// The documents that are written.
    pub selection: Selection,
    /// The treatment of records that are not documents.
    pub bad_records: BadRecords,
    /// Divides the documents between two token files, `PREFIX-train` and `PREFIX-validation`.
    pub split: Option<Split>,
    /// The token file's path without its endings.
    pub prefix: &'a Path,
    /// Whether an existing token file is replaced.
    pub overwrite: bool,
    /// Whether the work of an interrupted preparation is discarded.
    pub begin_anew: bool,
    /// Bytes of memory for texts, ids and hashes.
    pub memory: u64,
    /// Interval at which complete documents are synced, so that an interrupted preparation resumes after them.
    pub sync_every: Duration,
}

/// Converts conversations to documents with a mask of the tokens that a model is trained on.
#[derive(Clone, Copy, Debug)]
pub struct Chat<'a> {
    /// Writes a conversation as text.
    pub template: &'a RenderThreads,
    /// The assistant's turns that are trained on.
    pub turns: TrainedTurns,
}

/// The documents that are written. Numbers of tokens include the tokens that begin and end a document.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Selection {
    /// Minimum tokens of a document.
    pub min_tokens: Option<u64>,
    /// Maximum tokens of a document.
    pub max_tokens: Option<u64>,
    /// A share of the documents.
    pub sample: Option<Sample>,
    /// Whether a document is skipped if an earlier document has the same text.
    pub exact_dedup: bool,
}

/// A share of the documents, chosen by a hash of their text. Only the text and the seed decide whether a document is in
/// the sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// From 0 to 1.
    pub share: f64,
    /// Another seed chooses other documents.
    pub seed: u64,
}

/// The treatment of records that are not documents: an error, or counted and listed in `PREFIX.bad.jsonl`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum BadRecords {
    /// The first bad record is an error.
    #[default]
    Refuse,
    /// Bad records are skipped.
    Skip {
        /// The maximum share of all records, from 0 to 1. A larger share is an error.
        max_share: f64,
    },
}

/// The progress of a preparation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Stored bytes of the inputs that were read.
    pub bytes: u64,
    /// Stored bytes of the inputs; 0 if unknown.
    pub total_bytes: u64,
    /// Bytes of remote inputs that are on this machine.
    pub downloaded_bytes: u64,
    /// Bytes of remote inputs that are needed on this machine.
    pub download_bytes: u64,
    /// Documents written.
    pub documents: u64,
    /// Tokens written.
    pub tokens: u64,
}

/// The result of [`prepare`].
#[derive(Clone, Debug, PartialEq)]
pub struct Prepared {
    /// The token files.
    pub files: Vec<PreparedFile>,
    /// Counts of the records by outcome.
    pub counts: Counts,
    /// Parts of the records that the chat template did not read.
    pub notes: ChatNotes,
    /// The list of bad records, if there are any.
    pub bad_list: Option<PathBuf>,
}

/// A token file that [`prepare`] has written.
#[derive(Clone, Debug, PartialEq)]
pub struct PreparedFile {
    /// The token file's path without its endings.
    pub prefix: PathBuf,
    /// The contents of its `.json`.
    pub info: TokenFileInfo,
}

/// Receives messages of [`prepare`] while it works.
pub trait Observer: Send {
    /// Receives a remark for the user, one sentence.
    fn note(&mut self, sentence: &str);
    /// Receives the progress.
    fn progress(&mut self, progress: Progress);
}

/// Ignores all messages.
impl Observer for () {
    fn note(&mut self, _: &str) {}
    fn progress(&mut self, _: Progress) {}
}

impl<'a> Prepare<'a> {
    /// Returns the defaults: the field `text`, the tokenizer's end-of-text token, all documents, one token file, and no
    /// replacement.
    pub fn new(tokenizer: &'a TextTokenizer, inputs: &'a [PathBuf], prefix: &'a Path) -> Self {
        Self {
            tokenizer,
            ahead: None,
            inputs: Inputs { names: inputs, keep: true },
            format: None,
            field: "text",
            chat: None,
            append_eos: AppendEos::Default,
            selection: Selection::default(),
            bad_records: BadRecords::Refuse,
            split: None,
            prefix,
            overwrite: false,
            begin_anew: false,
            memory: 2_000_000_000,
            sync_every: Duration::from_secs(5),
        }
    }

    /// Returns the values that identify the result.
    fn request(&self, paths: &[PathBuf], ending: &Ending) -> Request {
        let Selection { min_tokens, max_tokens, sample, exact_dedup } = self.selection;
        let text = |path: &PathBuf| Value::from(path.display().to_string());
        let end = match &ending.end {
            DocumentEnd::Token(token) => token.as_str().into(),
            _ => Value::Null,
        };
        let fields = [
            ("version", VERSION.into()),
            ("inputs", paths.iter().map(text).collect()),
            ("tokenizer", self.tokenizer.hash().into()),
            ("split_special_tokens", self.tokenizer.splits_special_tokens().into()),
            ("format", self.format.map_or(Value::Null, |format| format.name().into())),
            ("field", self.field.into()),
            ("end of text", json!([end, ending.append])),
            ("min_tokens", json!(min_tokens)),
            ("max_tokens", json!(max_tokens)),
            ("sample", json!(sample.map(|sample| (sample.share, sample.seed)))),
            ("exact_dedup", exact_dedup.into()),
            ("split", self.split.map_or(Value::Null, |split| split.to_string().into())),
        ];
        let chat = self.chat.map(|Chat { template, turns }| {
            let turns = if turns == TrainedTurns::Last { "last" } else { "all" };
            ("chat", json!([template.template().blake3(), turns, CHAT_VERSION]))
        });
        // Without conversations the request is as earlier versions recorded it.
        let fields = fields.into_iter().chain(chat);
        fields.map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

impl Selection {
    /// Returns whether the sample has the document with this hash.
    pub(crate) fn wants(&self, hash: &blake3::Hash) -> bool {
        let Some(Sample { share, seed }) = self.sample else { return true };
        let (words, _) = hash.as_bytes().as_chunks::<8>();
        // Not the first bytes, which identify texts: the last bytes are independent of them.
        let number = key_of(&[seed, u64::from_le_bytes(words[3])]);
        (number as f64) < share * 2f64.powi(64)
    }
}

/// Writes the token file of `options`, or with a split the token files of training and of validation. Documents without
/// tokens are skipped. The result does not depend on the number of threads. Returns `None` if `stop` was set before the
/// end. The same call then resumes after the synced documents, as it does after a failure or a kill.
///
/// # Errors
/// Fails if an input is not text, naming file and line, or if no end-of-text token is known. Also fails if an output
/// exists, if there is nothing to write, or if a part of a split has no document. A failure leaves no files, unless the
/// preparation can be resumed.
pub fn prepare(
    options: Prepare<'_>,
    stop: &AtomicBool,
    observer: &mut dyn Observer,
) -> Result<Option<Prepared>> {
    let Some(inputs) = expand_until(stop, options.inputs)? else { return Ok(None) };
    let paths: Vec<_> = inputs.iter().map(|input| input.name().to_path_buf()).collect();
    refuse_inputs_as_outputs(&inputs, &options)?;
    let total_bytes = total_bytes(&inputs)?;
    let (ending, fields) = match options.chat {
        None => {
            (Ending::choose(options.tokenizer, options.append_eos)?, Fields::parse(options.field)?)
        }
        // The template ends turns and conversations.
        Some(_) => {
            (Ending { append: None, end: DocumentEnd::Unknown }, Fields::of_chat(options.field))
        }
    };
    let encoding = match options.chat {
        Some(chat) => Encoding::Conversations(ChatEncoder::new(options.tokenizer, chat)?),
        None => {
            let json = options.tokenizer.json()?;
            // The content is recorded at the end, and half of its work is done here.
            options.tokenizer.content_of(&json);
            Encoding::Texts(Box::new(Encoder::new(options.tokenizer, &json, options.ahead)?))
        }
    };
    let request = options.request(&paths, &ending);
    let (mut outputs, start) = match Outputs::begin(&options, &paths, &request)? {
        Begun::Outputs(outputs, start) => (outputs, start),
        Begun::Complete(prepared) => return Ok(Some(prepared)),
    };
    if let Encoding::Texts(encoder) = &encoding
        && let Some(reason) = encoder.fallback()
    {
        observer.note(&format!("the slower tokenizer encodes, because {reason}"));
    }
    if outputs.has_checkpoint {
        let (documents, _) = outputs.written();
        observer
            .note(&format!("continues after document {documents} of an interrupted preparation"));
    }
    let inputs = Downloads::start(inputs, start.input, outputs.downloads());
    let work = Work {
        inputs: &inputs,
        format: options.format,
        encoding: &encoding,
        read: Arc::new(ReadOptions::new(Arc::new(fields), options.memory)),
        end: ending.append,
        hashes: options.selection.sample.is_some() || options.selection.exact_dedup,
        wants: &|hash| options.selection.wants(hash),
        memory: options.memory / 2,
    };
    let mut is_stopped = false;
    let progress = |outputs: &Outputs<'_>, bytes| {
        let (documents, tokens) = outputs.written();
        let (downloaded_bytes, download_bytes) = inputs.bytes();
        Progress { bytes, total_bytes, downloaded_bytes, download_bytes, documents, tokens }
    };
    let done = pipeline::run(&work, start, &mut |event| {
        outputs.receive(event)?;
        let bytes = match total_bytes {
            0 => outputs.input_bytes(),
            // An input may have grown since its size was read.
            total => outputs.input_bytes().min(total),
        };
        observer.progress(progress(&outputs, bytes));
        if stop.load(Ordering::Relaxed) {
            is_stopped = true;
            outputs.checkpoint()?;
            return Err(Error::Interrupted);
        }
        Ok(())
    });
    match done.and_then(|()| outputs.check()) {
        Ok(()) => {
            // Bytes after the last record, such as the index of a table, are read elsewhere.
            let bytes = if total_bytes == 0 { outputs.input_bytes() } else { total_bytes };
            observer.progress(progress(&outputs, bytes));
        }
        Err(Error::Interrupted) if is_stopped => return Ok(None),
        Err(error) => {
            if error.is_passing() && (outputs.written().0 > 0 || outputs.has_downloads()) {
                // The next call uses the downloads and the encoded documents. This error is reported.
                let _ = outputs.checkpoint();
            }
            outputs.abandon();
            return Err(error);
        }
    }
    outputs.finish(&ending).map(Some)
}

/// Returns the files that `inputs` stand for, or `None` if `stop` was set before they are known. Then does not wait for
/// the hub's answer.
fn expand_until(stop: &AtomicBool, inputs: Inputs<'_>) -> Result<Option<Vec<Input>>> {
    if !inputs.names.iter().any(|name| scheme(name).is_some()) {
        return expand(inputs).map(Some);
    }
    let names = inputs.names.to_vec();
    let (sender, receiver) = sync_channel(1);
    std::thread::spawn(move || {
        let inputs = Inputs { names: &names, keep: inputs.keep };
        // Without a receiver nobody waits for the files.
        let _ = sender.send(expand(inputs));
    });
    while !stop.load(Ordering::Relaxed) {
        match receiver.recv_timeout(LISTING_WAIT) {
            Ok(expanded) => return expanded.map(Some),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    Ok(None)
}

/// Checks that no output is an input, such as the prefix's `.json`: `--force` would replace it.
fn refuse_inputs_as_outputs(inputs: &[Input], options: &Prepare<'_>) -> Result<()> {
    let prefixes = crate::prepare::output::prefixes(options);
    let outputs = || prefixes.iter().flat_map(|prefix| TokenFileWriter::outputs(prefix));
    for input in inputs {
        // Only a file can be an output, and a pipe has no canonical path.
        let Input::Local(input) = input else { continue };
        if is_standard_input(input) || is_pipe(input) {
            continue;
        }
        let input = input.canonicalize().map_err(moh_files::io(input))?;
        let is_input = |path: &PathBuf| path.canonicalize().is_ok_and(|path| path == input);
        if let Some(output) = outputs().find(is_input) {
            let reason = "is both an input and an output: choose another output";
            return Err(Error::unusable(&output, reason));
        }
    }
    Ok(())
}

fn is_pipe(path: &Path) -> bool {
    path.metadata().is_ok_and(|kind| !kind.is_file())
}
