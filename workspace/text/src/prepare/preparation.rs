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

/// The version of what a preparation writes: one that was interrupted is continued by the same version alone.
const VERSION: u64 = 1;
/// The version of what becomes of conversations.
const CHAT_VERSION: u64 = 2;
/// Time after which the listing of remote inputs notices that it is to stop.
const LISTING_WAIT: Duration = Duration::from_millis(50);

/// Inputs and output of [`prepare`].
#[derive(Clone, Copy, Debug)]
pub struct Prepare<'a> {
    /// Encodes the text. Its post-processor adds BOS.
    pub tokenizer: &'a TextTokenizer,
    /// The same tokenizer, which is being loaded for texts.
    pub ahead: Option<&'a LoadAhead>,
    /// What is read.
    pub inputs: Inputs<'a>,
    /// The format of all inputs; by default that of each input's content and name.
    pub format: Option<Format>,
    /// What a document's text is: a field, a path of fields such as `a.b`, or a template of fields such as
    /// `{title} {text}`.
    pub field: &'a str,
    /// Set if the field is a list of messages, which the template renders.
    pub chat: Option<Chat<'a>>,
    /// The end-of-text token of each document.
    pub append_eos: AppendEos<'a>,
    /// Which documents are written.
    pub selection: Selection,
    /// What a record that is no document is.
    pub bad_records: BadRecords,
    /// Divides the documents between two token files, `PREFIX-train` and `PREFIX-validation`.
    pub split: Option<Split>,
    /// The token file's path without its endings.
    pub prefix: &'a Path,
    /// Whether an existing token file is replaced.
    pub overwrite: bool,
    /// Whether what an interrupted preparation has done is thrown away.
    pub begin_anew: bool,
    /// Bytes of memory for texts, ids and hashes.
    pub memory: u64,
    /// Time after which what is complete is synced, so that an interrupted preparation continues after it.
    pub sync_every: Duration,
}

/// How conversations become documents, with a mask of what a model is trained on.
#[derive(Clone, Copy, Debug)]
pub struct Chat<'a> {
    /// Writes a conversation as text.
    pub template: &'a RenderThreads,
    /// The assistant's turns that are trained on.
    pub turns: TrainedTurns,
}

/// Which documents are written. Their tokens are counted with those that begin and end a document.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Selection {
    /// The fewest tokens of a document.
    pub min_tokens: Option<u64>,
    /// The most tokens of a document.
    pub max_tokens: Option<u64>,
    /// A share of the documents.
    pub sample: Option<Sample>,
    /// Whether a document is left out if an earlier one has the same text.
    pub exact_dedup: bool,
}

/// A share of the documents, chosen by a hash of their text: wherever a document lies, it is in the sample of
/// a seed or it is not.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// From 0 to 1.
    pub share: f64,
    /// Another seed chooses others.
    pub seed: u64,
}

/// What a record that is no document is: an error, or counted and listed in `PREFIX.bad.jsonl`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum BadRecords {
    /// The first one is an error.
    #[default]
    Refuse,
    /// They are skipped.
    Skip {
        /// The largest share of all records, from 0 to 1; more are an error.
        max_share: f64,
    },
}

/// How far a preparation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of the inputs that were read, as they are stored.
    pub bytes: u64,
    /// Bytes of the inputs; 0 if that is unknown.
    pub total_bytes: u64,
    /// Bytes of remote inputs that are on this machine.
    pub downloaded_bytes: u64,
    /// Bytes of remote inputs that have to be.
    pub download_bytes: u64,
    /// Documents written.
    pub documents: u64,
    /// Tokens written.
    pub tokens: u64,
}

/// What [`prepare`] has done.
#[derive(Clone, Debug, PartialEq)]
pub struct Prepared {
    /// The token files.
    pub files: Vec<PreparedFile>,
    /// What became of the records.
    pub counts: Counts,
    /// What the chat template did not read of them.
    pub notes: ChatNotes,
    /// The list of bad records, if there are any.
    pub bad_list: Option<PathBuf>,
}

/// A token file that [`prepare`] has written.
#[derive(Clone, Debug, PartialEq)]
pub struct PreparedFile {
    /// Its path without its endings.
    pub prefix: PathBuf,
    /// Its contents.
    pub info: TokenFileInfo,
}

/// What [`prepare`] tells its caller while it works.
pub trait Observer: Send {
    /// Something that a user should know, as one sentence.
    fn note(&mut self, sentence: &str);
    /// How far it is.
    fn progress(&mut self, progress: Progress);
}

/// For callers that are told nothing.
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

    /// What identifies the result.
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
        // Without conversations it is the request that earlier versions recorded.
        let fields = fields.into_iter().chain(chat);
        fields.map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

impl Selection {
    /// Returns whether the sample has a document.
    pub(crate) fn wants(&self, hash: &blake3::Hash) -> bool {
        let Some(Sample { share, seed }) = self.sample else { return true };
        let (words, _) = hash.as_bytes().as_chunks::<8>();
        // Not those that tell texts apart: these are random also among texts that differ there.
        let number = key_of(&[seed, u64::from_le_bytes(words[3])]);
        (number as f64) < share * 2f64.powi(64)
    }
}

/// Writes the token file of `options`, or with a split those of training and of validation. Documents without
/// any token are left out. The result does not depend on the number of threads. `None` if `stop` was set
/// before the end: the same call continues then, and so it does after a failure or a kill, after what was
/// synced.
///
/// # Errors
/// Fails if an input is not text, naming file and line, if no end-of-text token is known, if an
/// output exists, if there is nothing to write, or if a part of a split has no document. A failure
/// leaves no files behind, unless there is something to continue from.
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
            // Recorded at the end, and half of its work is done.
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
            // What follows the last record, such as the index of a table, is read elsewhere.
            let bytes = if total_bytes == 0 { outputs.input_bytes() } else { total_bytes };
            observer.progress(progress(&outputs, bytes));
        }
        Err(Error::Interrupted) if is_stopped => return Ok(None),
        Err(error) => {
            if error.is_passing() && (outputs.written().0 > 0 || outputs.has_downloads()) {
                // What was downloaded and encoded serves the next call; this error is the one to report.
                let _ = outputs.checkpoint();
            }
            outputs.abandon();
            return Err(error);
        }
    }
    outputs.finish(&ending).map(Some)
}

/// Returns the files that `inputs` stand for; `None` if `stop` was set before they are known. A hub that does not
/// answer is left alone then.
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

/// Checks that no output is one of the inputs, which `--force` would replace: the prefix's `.json`
/// may be one.
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
