//! Trains a tokenizer like Llama 3's: byte-level BPE, which encodes every text losslessly. BOS
//! begins every encoding. Only [`prepare`](crate::prepare()) appends EOS, because it would also end
//! a prompt. The files load in Hugging Face's AutoTokenizer. The same inputs give the same files.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use moh_data::{Error as DataError, TextTokenizer, refuse_existing, with_ending};
use moh_files::{PendingFile, Publication, Registered};
use serde_json::json;
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::models::{ModelWrapper, TrainerWrapper};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, SplitDelimiterBehavior, Tokenizer};

use crate::fields::Fields;
use crate::names::{Inputs, expand, total_bytes};
use crate::prepare::{Reading, refuse_inputs_as_outputs};
use crate::remote::Downloads;
use crate::texts::Texts;
use crate::{Error, Format, Result};

/// The first token of every encoding; its id is 0.
pub const BEGIN_OF_TEXT: &str = "<|begin_of_text|>";
/// The last token of every document; its id is 1.
pub const END_OF_TEXT: &str = "<|end_of_text|>";
/// Minimum ids of a tokenizer: the bytes and the two special tokens.
const MIN_VOCABULARY: usize = 258;

/// Llama 3's pattern that splits a text into words before BPE.
const WORDS: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|\
                     \x20?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
/// Minimum occurrences of a pair of tokens to become a token.
const MIN_FREQUENCY: u64 = 2;

/// Inputs and output of [`train_tokenizer`].
#[derive(Clone, Copy, Debug)]
pub struct TrainTokenizer<'a> {
    /// Inputs, as for [`crate::prepare()`].
    pub inputs: Inputs<'a>,
    /// Their format, as for [`crate::prepare()`].
    pub format: Option<Format>,
    /// The field of a JSON line with the text.
    pub field: &'a str,
    /// The requested number of ids; a small text may give fewer.
    pub vocab_size: usize,
    /// The directory for `tokenizer.json` and its companions.
    pub dir: &'a Path,
    /// Whether existing files are replaced.
    pub overwrite: bool,
}

/// Trains a tokenizer, writes its files and returns it. `progress` hears how far the inputs are read, while nothing
/// arrives too.
///
/// # Errors
/// Fails if an input is not text, if the vocabulary is too small for the bytes, or if a file
/// exists.
pub fn train_tokenizer(
    options: TrainTokenizer<'_>,
    progress: &mut (dyn FnMut(Reading) + Send),
) -> Result<TextTokenizer> {
    let TrainTokenizer { inputs, format, field, vocab_size, dir, overwrite } = options;
    let inputs = expand(inputs)?;
    let total_bytes = total_bytes(&inputs)?;
    check_vocab_size(vocab_size)?;
    let names = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"];
    let outputs = names.map(|name| dir.join(name));
    refuse_inputs_as_outputs(&inputs, &outputs)?;
    for path in &outputs {
        refuse_existing(path, overwrite)?;
    }
    let fault = |error: tokenizers::Error| {
        moh_files::unusable(&outputs[0], format!("cannot train: {error}"))
    };
    let mut tokenizer = untrained().map_err(fault)?;
    let mut trainer: TrainerWrapper = BpeTrainerBuilder::new()
        .vocab_size(vocab_size)
        .min_frequency(MIN_FREQUENCY)
        .show_progress(false)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .special_tokens(vec![special(BEGIN_OF_TEXT), special(END_OF_TEXT)])
        .build()
        .into();
    let directory = DownloadDirectory::beside(dir);
    let inputs = Downloads::start(inputs, 0, directory.path.clone());
    let (mut done, mut any_text) = (0, false);
    let failed = Mutex::new(None);
    let texts = Texts::new(&inputs, format, Fields::parse(field)?).map_while(|text| match text {
        Ok(text) => {
            let text = text.map(|(text, input_bytes)| {
                done += input_bytes;
                any_text |= !text.is_empty();
                text
            });
            let bytes = if total_bytes == 0 { done } else { done.min(total_bytes) };
            let (downloaded_bytes, download_bytes) = inputs.bytes();
            progress(Reading { bytes, total_bytes, downloaded_bytes, download_bytes });
            Some(text)
        }
        Err(error) => {
            // The lock is not poisoned: only this closure takes it.
            *failed.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(error);
            None
        }
    });
    tokenizer.train(&mut trainer, texts.flatten()).map_err(fault)?;
    if let Some(error) = failed.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()) {
        return Err(error);
    }
    if !any_text {
        return Err(Error::options("the inputs contain no text"));
    }
    tokenizer.with_post_processor(Some(begin().map_err(fault)?));
    let text = tokenizer.to_string(true).map_err(fault)?;
    let [tokenizer_json, config, special_tokens] = &outputs;
    let _publication = Publication::start();
    write_whole(config, &pretty(&tokenizer_config()), overwrite)?;
    write_whole(special_tokens, &pretty(&special_tokens_map()), overwrite)?;
    write_whole(tokenizer_json, text.as_bytes(), overwrite)?;
    Ok(TextTokenizer::from_bytes(tokenizer_json.clone(), text.as_bytes())?)
}

/// The directory of inputs that are downloaded for this training alone; it goes with the training, however that ends.
struct DownloadDirectory {
    path: PathBuf,
    _on_signals: Registered,
}

impl DownloadDirectory {
    fn beside(dir: &Path) -> Self {
        let path = with_ending(dir, ".downloads");
        Self { _on_signals: Registered::directory(&path), path }
    }
}

impl Drop for DownloadDirectory {
    fn drop(&mut self) {
        // The error that ended the training is the one to report.
        let _ = moh_files::remove_directory(&self.path);
    }
}

/// Writes a small file.
fn write_whole(path: &Path, bytes: &[u8], overwrite: bool) -> Result<()> {
    let write = || {
        moh_files::create_parents(path)?;
        let mut file = PendingFile::create(path)?;
        file.write_all(bytes)?;
        if overwrite { file.replace() } else { file.publish() }
    };
    Ok(write().map_err(moh_files::io(path))?)
}

fn check_vocab_size(vocab_size: usize) -> Result<()> {
    if vocab_size >= MIN_VOCABULARY && u32::try_from(vocab_size).is_ok() {
        return Ok(());
    }
    Err(DataError::Argument {
        name: "vocab-size",
        value: vocab_size as u64,
        reason: format!(
            "must be at least {MIN_VOCABULARY}: 256 bytes, {BEGIN_OF_TEXT} and {END_OF_TEXT}"
        ),
    }
    .into())
}

/// A byte-level BPE without merges.
fn untrained() -> Result<Tokenizer, tokenizers::Error> {
    let words =
        Split::new(SplitPattern::Regex(WORDS.to_owned()), SplitDelimiterBehavior::Isolated, false)?;
    let bytes = ByteLevel::new(false, true, false);
    let mut tokenizer = Tokenizer::new(ModelWrapper::from(BPE::default()));
    tokenizer.with_pre_tokenizer(Some(Sequence::new(vec![
        PreTokenizerWrapper::from(words),
        PreTokenizerWrapper::from(bytes),
    ])));
    tokenizer.with_decoder(Some(bytes));
    Ok(tokenizer)
}

/// BOS, text.
fn begin() -> Result<TemplateProcessing, tokenizers::Error> {
    let mut template = TemplateProcessing::builder();
    template.try_single(format!("{BEGIN_OF_TEXT} $A"))?;
    template.try_pair(format!("{BEGIN_OF_TEXT} $A {BEGIN_OF_TEXT}:1 $B:1"))?;
    template.special_tokens(vec![(BEGIN_OF_TEXT, 0)]);
    Ok(template.build()?)
}

fn special(name: &str) -> AddedToken {
    AddedToken::from(name, true)
}

/// The configuration that AutoTokenizer reads beside `tokenizer.json`.
fn tokenizer_config() -> serde_json::Value {
    let described = |name: &str| {
        json!({
            "content": name, "lstrip": false, "normalized": false, "rstrip": false,
            "single_word": false, "special": true
        })
    };
    json!({
        "added_tokens_decoder": {"0": described(BEGIN_OF_TEXT), "1": described(END_OF_TEXT)},
        "bos_token": BEGIN_OF_TEXT,
        "clean_up_tokenization_spaces": false,
        "eos_token": END_OF_TEXT,
        "model_input_names": ["input_ids", "attention_mask"],
        "tokenizer_class": "PreTrainedTokenizerFast"
    })
}

fn special_tokens_map() -> serde_json::Value {
    json!({"bos_token": BEGIN_OF_TEXT, "eos_token": END_OF_TEXT})
}

fn pretty(value: &serde_json::Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}
