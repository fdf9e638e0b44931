//! Text to token ids and back, by a Hugging Face `tokenizer.json`. The file determines how text is
//! split, and which ids its post-processor adds to a document. Truncation and padding, which some
//! files keep from their training, are disabled.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::ops::Range;
use std::path::Path;
use std::sync::OnceLock;

use moh_data::{TokenizerContent, TokenizerJson, TokenizerSource};
use tokenizers::models::bpe::BPE;
use tokenizers::{
    DecoderWrapper, ModelWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper,
    Tokenizer, TokenizerImpl,
};

use crate::panics::quietly;
use crate::template::{TOKENIZER_CONFIG, settings};
use crate::{Error, Result, TextStream};

/// A tokenizer.
pub struct TextTokenizer {
    inner: Tokenizer,
    /// Without the bytes of the `tokenizer.json`.
    source: TokenizerSource,
    hash: String,
    /// Computed on first use: it takes a second for the largest vocabularies.
    content: OnceLock<TokenizerContent>,
    /// The added tokens that are special, such as BOS and EOS.
    special: BTreeSet<u32>,
    vocab_size: usize,
    /// The ids that the post-processor puts before a text, usually BOS.
    prefix: Vec<u32>,
    /// The last id that the post-processor puts after a text, usually EOS.
    suffix: Option<u32>,
}

impl TextTokenizer {
    /// Reads `path/tokenizer.json`, or `path` itself if it is a file, and the files beside it.
    pub fn load(path: &Path) -> Result<Self> {
        refuse_other_file(path)?;
        let mut source = TokenizerSource::read(path)?;
        let bytes = &std::mem::take(&mut source.json)[..];
        let fault = |reason: String| {
            moh_files::unusable(&source.path, format!("not a valid tokenizer: {reason}"))
        };
        let mut inner = parse(bytes).map_err(fault)?;
        inner.with_truncation(None).map_err(|error| fault(error.to_string()))?;
        inner.with_padding(None);
        let largest = inner.get_vocab(true).into_values().max();
        let largest = largest.ok_or_else(|| fault("its vocabulary is empty".to_owned()))?;
        let splits = source.settings.get("split_special_tokens") == Some(&true);
        inner.set_encode_special_tokens(splits);
        let encode = || inner.encode_fast("a", true).map_err(|error| error.to_string());
        let encoded = catch_panics(encode).map_err(fault)?;
        let is_added: Vec<_> =
            encoded.get_special_tokens_mask().iter().map(|&mask| mask == 1).collect();
        let text_starts = is_added.iter().take_while(|&&added| added).count();
        let text_ends =
            is_added.iter().rposition(|&added| !added).map_or(text_starts, |last| last + 1);
        let suffix = encoded.get_ids()[text_ends..].last().copied();
        let prefix = encoded.get_ids()[..text_starts].to_vec();
        let hash = blake3::hash(bytes).to_hex().to_string();
        let added = inner.get_added_tokens_decoder();
        let special = added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();
        let puts_space = encoded.get_tokens()[text_starts..]
            .first()
            .is_some_and(|token| token.starts_with(['\u{120}', '\u{2581}']));
        let config = source.path.with_file_name(TOKENIZER_CONFIG);
        for (name, puts, what) in [
            ("add_bos_token", !prefix.is_empty(), "a token before"),
            ("add_eos_token", suffix.is_some(), "a token after"),
            ("add_prefix_space", puts_space, "a space before"),
        ] {
            let Some(set) = source.settings.get(name).filter(|&&set| set != puts) else { continue };
            let what = if puts { what.to_owned() } else { what.replacen('a', "no", 1) };
            source.remarks.push(format!(
                "{}: {name} is {set}, and tokenizer.json, which counts here as for transformers' TokenizersBackend, puts \
                 {what} a text",
                config.display()
            ));
        }
        if let Some(class) = source.class.as_deref()
            && let Some(remark) = remark_of_class(class, &inner, &source.settings)
        {
            source.remarks.push(format!("{}: {remark}", config.display()));
        }
        Ok(Self {
            inner,
            source,
            hash,
            content: OnceLock::new(),
            special,
            vocab_size: largest as usize + 1,
            prefix,
            suffix,
        })
    }

    /// Encodes special tokens that a text names as any other text, if `split` or if the tokenizer's configuration says
    /// so. The post-processor adds special tokens in either case.
    pub fn split_special_tokens(mut self, split: bool) -> Self {
        let is_split = split || self.inner.get_encode_special_tokens();
        self.inner.set_encode_special_tokens(is_split);
        self
    }

    /// Returns whether special tokens that a text names are encoded as text.
    pub fn splits_special_tokens(&self) -> bool {
        self.inner.get_encode_special_tokens()
    }

    /// Returns the last id that the post-processor puts after a text.
    pub fn suffix(&self) -> Option<u32> {
        self.suffix
    }

    /// Returns the id of a token.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Returns the token of an id.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Returns the path of the `tokenizer.json`.
    pub fn path(&self) -> &Path {
        &self.source.path
    }

    /// Returns remarks for the user on files that disagree, one sentence each.
    pub fn remarks(&self) -> &[String] {
        &self.source.remarks
    }

    /// Returns the special tokens by their names, such as `eos_token`.
    pub fn special_tokens(&self) -> &BTreeMap<String, String> {
        &self.source.special
    }

    /// Returns the tokenizer in the library's own form.
    pub fn library(&self) -> &Tokenizer {
        &self.inner
    }

    /// Returns the tokenizer's blake3, in hexadecimal; see [`TokenizerSource::hash`]. Programs that write a tokenizer
    /// again change the hash. Its [content](TextTokenizer::content) stays the same.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Returns the content that identifies the tokenizer, whatever the bytes of its file.
    pub fn content(&self) -> Result<TokenizerContent> {
        match self.content.get() {
            Some(content) => Ok(content.clone()),
            None => Ok(self.content_of(&self.json()?)),
        }
    }

    /// Returns [`TextTokenizer::content`], computed from this tokenizer's [`TextTokenizer::json`].
    pub fn content_of(&self, json: &TokenizerJson) -> TokenizerContent {
        self.content.get_or_init(|| json.content()).clone()
    }

    /// Returns the tokenizer as the library writes it.
    pub fn json(&self) -> Result<TokenizerJson> {
        let text = serde_json::to_string(&self.inner).map_err(|error| self.failure(&error))?;
        let tokens = self.inner.get_vocab(false).into_iter().collect();
        TokenizerJson::written(&text, tokens).map_err(|error| self.failure(&error))
    }

    /// Returns the ids of the special tokens, in increasing order.
    pub fn special_ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.special.iter().copied()
    }

    pub(crate) fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// Returns the largest id + 1.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Returns the ids of a text, with BOS and EOS as the tokenizer's post-processor adds them.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.ids(text, true)
    }

    /// Returns the ids of a text to be continued: the post-processor's prefix and the text, without a
    /// suffix such as EOS.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.prefix.clone();
        ids.extend(self.ids(text, false)?);
        Ok(ids)
    }

    /// Returns the ids of a text without the post-processor's ids. Special tokens that the text names are encoded.
    pub fn encode_without_special_tokens(&self, text: &str) -> Result<Vec<u32>> {
        self.ids(text, false)
    }

    /// Encodes a text as [`TextTokenizer::encode_without_special_tokens`]. Also returns each id's range of bytes in the
    /// text, in increasing order. A range may omit the space before a word.
    pub fn encode_with_ranges(&self, text: &str) -> Result<Vec<(u32, Range<usize>)>> {
        let encoding = self.call(|| self.inner.encode(text, false))?;
        let ranges = encoding.get_offsets().iter().map(|&(start, end)| start..end);
        Ok(encoding.get_ids().iter().copied().zip(ranges).collect())
    }

    fn ids(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        let encoding = self.call(|| self.inner.encode_fast(text, add_special_tokens))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Decodes ids. `skip_special` skips BOS, EOS and other special tokens. Ids without a token, as in a padded
    /// vocabulary, decode to nothing.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        self.call(|| self.inner.decode(ids, skip_special))
    }

    /// Decodes ids one by one as a continuation of `context`, for text shown during generation.
    pub fn stream(&self, context: &[u32], skip_special: bool) -> TextStream<'_> {
        TextStream::new(self, context, skip_special)
    }

    /// Counts the UTF-8 bytes of the decoded ids, without special tokens: the divisor of bits per byte, which compares
    /// models with different vocabularies.
    pub fn decoded_bytes(&self, ids: &[u32]) -> Result<u64> {
        Ok(self.decode(ids, true)?.len() as u64)
    }

    /// Calls the library. Its panics become errors.
    fn call<T>(&self, work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
        catch_panics(|| work().map_err(|error| error.to_string())).map_err(|it| self.failure(&it))
    }

    fn failure(&self, error: &dyn Display) -> Error {
        moh_files::unusable(&self.source.path, error.to_string()).into()
    }
}

impl std::fmt::Debug for TextTokenizer {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("TextTokenizer")
            .field("path", &self.source.path)
            .field("vocab_size", &self.vocab_size)
            .finish_non_exhaustive()
    }
}

/// Rejects a `tokenizer.json` that transformers replaces by a file for its own version.
fn refuse_other_file(path: &Path) -> Result<()> {
    let directory = if path.is_dir() { path } else { moh_files::parent(path) };
    let is_chosen = !path.is_dir() && !path.ends_with("tokenizer.json");
    let settings = if is_chosen { serde_json::Value::Null } else { settings(directory)? };
    let mut names = settings["fast_tokenizer_files"].as_array().into_iter().flatten();
    let version = |name: &str| Some(name.split_once("tokenizer.")?.1.contains(".json"));
    let Some(name) = names.find(|name| name.as_str().and_then(version) == Some(true)) else {
        return Ok(());
    };
    let reason = format!(
        "fast_tokenizer_files: transformers reads {name} instead of tokenizer.json: rename it to tokenizer.json, and take the key out"
    );
    Err(moh_files::unusable(&directory.join(TOKENIZER_CONFIG), reason).into())
}

/// A tokenizer with a BPE model. The library makes three copies of a model of unknown kind.
type BpeTokenizer = TokenizerImpl<
    BPE,
    NormalizerWrapper,
    PreTokenizerWrapper,
    PostProcessorWrapper,
    DecoderWrapper,
>;

fn parse(bytes: &[u8]) -> Result<Tokenizer, String> {
    catch_panics(|| match BpeTokenizer::from_bytes(bytes) {
        Ok(tokenizer) => Ok(tokenizer.into()),
        Err(_) => Tokenizer::from_bytes(bytes).map_err(|error| error.to_string()),
    })
}

/// Calls the library. It panics for some contents that its types do not allow, such as a template with an undefined
/// token.
fn catch_panics<R>(work: impl FnOnce() -> Result<R, String>) -> Result<R, String> {
    // After a panic the tokenizer is dropped, so nothing sees its state.
    quietly(work).unwrap_or_else(|| Err("its content contradicts itself".to_owned()))
}

/// The pattern of Qwen2's class.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Further classes that build their parts in transformers 5.
const BUILDERS: &str = "Albert Barthez Bert BigBird Blenderbot Camembert CLIP CodeGen Deberta DebertaV2 Funnel Herbert \
    LayoutLMv3 Luke MBart MBart50 MPNet Nllb OpenAIGPT Pegasus Qwen3_5 Reformer RemBert Roberta Splinter T5 Whisper XGLM \
    XLMRoberta XLNet";
/// The settings of parts that change ids.
const OF_PARTS: [&str; 5] =
    ["prepend_scheme", "split", "individual_digits", "add_prefix_space", "use_regex"];

/// Returns a remark for the user if transformers 5 builds other parts by a tokenizer's class than `tokenizer.json` has
/// (`models/*/tokenization_*.py`, and `AutoTokenizer` for Llama with bytes).
fn remark_of_class(
    class: &str,
    tokenizer: &Tokenizer,
    settings: &BTreeMap<String, bool>,
) -> Option<String> {
    let set = |name: &str| settings.get(name).copied();
    let scheme = match (set("add_prefix_space"), set("legacy")) {
        (Some(false), _) => "never",
        (_, Some(true)) if class.starts_with("Llama") => "always",
        _ => "first",
    };
    let space = set("add_prefix_space").unwrap_or(false);
    let bytes = format!("ByteLevel(add_prefix_space={space},use_regex=true)");
    let metaspace = format!("Metaspace(prepend_scheme={scheme},split=false)");
    let qwen2 = format!("Split({QWEN2})");
    let fallback = "BPE(byte_fallback=true)";
    let name = class.strip_suffix("Fast").unwrap_or(class).strip_suffix("Tokenizer")?;
    let without_regex = bytes.replace("true)", "false)");
    let built = match name {
        "GPT2" => vec!["BPE", &bytes],
        "GPTNeoX" => vec!["BPE", "NFC", &bytes],
        "Cohere" => vec!["BPE", "NFC", "Digits(individual_digits=true)", &bytes],
        "Qwen2" => vec!["BPE", "NFC", &qwen2, &without_regex],
        "Llama" | "CodeLlama" => vec![fallback, &metaspace],
        "Gemma" => vec![fallback, "Replace( )", "Split( )"],
        _ if BUILDERS.split(' ').any(|builder| builder == name) => Vec::new(),
        _ => return None,
    };
    let mut found = vec![match tokenizer.get_model() {
        ModelWrapper::BPE(model) if model.byte_fallback => fallback.to_owned(),
        ModelWrapper::BPE(_) => "BPE".to_owned(),
        _ => "another model".to_owned(),
    }];
    found.extend(parts_of(&serde_json::to_value(tokenizer.get_normalizer()).ok()?));
    found.extend(parts_of(&serde_json::to_value(tokenizer.get_pre_tokenizer()).ok()?));
    let follows_file = name == "Llama" && found.iter().any(|part| part.starts_with("ByteLevel"));
    let differ = match built[..] {
        [] => "what it splits text by".to_owned(),
        _ if follows_file || found == built => return None,
        _ => format!("{}, and tokenizer.json has {}", built.join(", "), found.join(", ")),
    };
    Some(format!(
        "by its tokenizer_class {class}, transformers 5 builds {differ}; here, as in transformers 4, tokenizer.json counts: \
         compare the ids, or set tokenizer_class to \"PreTrainedTokenizerFast\" if they are to be those of tokenizer.json"
    ))
}

/// Returns the parts of a normalizer or pre-tokenizer in order, each with the settings that change ids.
fn parts_of(component: &serde_json::Value) -> Vec<String> {
    let parts =
        ["normalizers", "pretokenizers"].into_iter().find_map(|name| component[name].as_array());
    if let Some(parts) = parts {
        return parts.iter().flat_map(parts_of).collect();
    }
    let Some(kind) = component["type"].as_str() else { return Vec::new() };
    let pattern = &component["pattern"];
    let pattern = pattern["Regex"].as_str().or(pattern["String"].as_str()).map(str::to_owned);
    let set = OF_PARTS.iter().filter_map(|&name| match &component[name] {
        serde_json::Value::Null => None,
        value => Some(format!("{name}={value}").replace('"', "")),
    });
    let set: Vec<_> = pattern.into_iter().chain(set).collect();
    vec![if set.is_empty() { kind.to_owned() } else { format!("{kind}({})", set.join(",")) }]
}
