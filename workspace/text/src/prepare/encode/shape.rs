//! The form of a tokenizer around its model, if GPT-2, Llama, Mistral, Qwen or Gemma has this form. Only for these
//! forms both libraries are known, and tested, to return the same ids. Paired with `joints`, `spelling` and `library`.

use serde_json::{Map, Value};

pub(super) const SPACE_MARK: &str = "\u{2581}";

/// The patterns that split a text into words before BPE, with the models that use them. A match is a run of letters
/// with at most one character before it and at most a contraction after it, or numbers, or punctuation with a space
/// before it, or white space. There is no look-behind, and look-ahead only past white space.
pub(crate) const PATTERNS: [&str; 6] = [
    GPT_2,
    // Llama 3
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|\
     \x20?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
    // Qwen 2 and 3
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}|\
     \x20?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
    // Mistral's tekken
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+|\
     [^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*|\\p{N}|\
     \x20?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
    // Llama 4
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+\
     (?i:'s|'t|'re|'ve|'m|'ll|'d)?|\
     [^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*\
     (?i:'s|'t|'re|'ve|'m|'ll|'d)?|\\p{N}{1,3}|\
     \x20?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
    // Qwen 3.5, with combining marks in words
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}|\
     \x20?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
];
/// The pattern of the pre-tokenizer `ByteLevel` itself.
const GPT_2: &str =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) words: Words,
    pub(super) prepends: Prepends,
    /// Whether a text is first normalized to NFC, as Qwen's.
    pub(super) nfc: bool,
}

/// How a text is split into words, which the model encodes separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Words {
    /// By one of the patterns, to the bytes of a byte-level vocabulary.
    Pattern,
    /// Before each space. A space is [`SPACE_MARK`].
    Spaces,
    /// Not at all: a text is one word. A space is [`SPACE_MARK`].
    None,
}

/// Whether a space is put before a text, and before the text after each added token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Prepends {
    Never,
    Always,
    /// Unless the text starts with a space.
    UnlessSpace,
    /// Unless the text starts with a space, and not after added tokens.
    FirstUnlessSpace,
}

impl Shape {
    /// Returns the form of a tokenizer with every default filled in.
    pub(super) fn new(json: &Value) -> Result<Self, String> {
        let model = &json["model"];
        let given = |name: &str| !matches!(&model[name], Value::Null) && model[name] != "";
        if model["type"] != "BPE" {
            return Err("its model is not BPE".to_owned());
        }
        let odd = ["dropout", "continuing_subword_prefix", "end_of_word_suffix"];
        if let Some(odd) = odd.into_iter().find(|name| given(name)) {
            return Err(format!("its model has a {odd}"));
        }
        let added = json["added_tokens"].as_array().map_or(&[][..], Vec::as_slice);
        if added.iter().any(|token| token["single_word"] == true) {
            return Err("it has an added token that matches whole words only".to_owned());
        }
        let normalizer = normalizer(&json["normalizer"]);
        let normalizer = normalizer.ok_or("its normalizer is none of Llama's and their kin")?;
        let splitter = splitter(&json["pre_tokenizer"]);
        let splitter = splitter.ok_or("its pre-tokenizer is none of Llama's and their kin")?;
        let (words, prepends) = match (normalizer, splitter) {
            (Normalizer::None | Normalizer::Nfc, Splitter::Pattern) => {
                (Words::Pattern, Prepends::Never)
            }
            (Normalizer::Spaces, Splitter::None) => (Words::None, Prepends::Never),
            (Normalizer::PrependAndSpaces, Splitter::None) => (Words::None, Prepends::Always),
            (Normalizer::None, Splitter::Metaspace { prepends, splits }) => {
                (if splits { Words::Spaces } else { Words::None }, prepends)
            }
            _ => return Err("its normalizer and pre-tokenizer do not go together".to_owned()),
        };
        Ok(Self { words, prepends, nfc: normalizer == Normalizer::Nfc })
    }

    /// Returns whether ids of a vocabulary spell bytes in GPT-2's alphabet.
    pub(super) fn is_byte_level(self) -> bool {
        self.words == Words::Pattern
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Normalizer {
    None,
    Nfc,
    /// Spaces to [`SPACE_MARK`].
    Spaces,
    PrependAndSpaces,
}

fn normalizer(json: &Value) -> Option<Normalizer> {
    let kinds: Vec<&Value> = match json {
        Value::Null => Vec::new(),
        _ if json["type"] == "Sequence" => json["normalizers"].as_array()?.iter().collect(),
        _ => vec![json],
    };
    let spaces = |json: &Value| {
        json["type"] == "Replace"
            && json["pattern"]["String"] == " "
            && json["content"] == SPACE_MARK
    };
    let prepends = |json: &Value| json["type"] == "Prepend" && json["prepend"] == SPACE_MARK;
    match kinds[..] {
        [] => Some(Normalizer::None),
        [only] if only["type"] == "NFC" => Some(Normalizer::Nfc),
        [only] if spaces(only) => Some(Normalizer::Spaces),
        [first, second] if prepends(first) && spaces(second) => Some(Normalizer::PrependAndSpaces),
        _ => None,
    }
}

#[derive(Clone, Copy)]
enum Splitter {
    None,
    Pattern,
    Metaspace { prepends: Prepends, splits: bool },
}

fn splitter(json: &Value) -> Option<Splitter> {
    let Some(fields) = json.as_object() else { return Some(Splitter::None) };
    match fields.get("type")?.as_str()? {
        "ByteLevel" if is_byte_level(fields, true) => Some(Splitter::Pattern),
        "Sequence" => match &fields.get("pretokenizers")?.as_array()?[..] {
            [Value::Object(split), Value::Object(bytes)]
                if is_pattern(split) && is_byte_level(bytes, false)
                    || is_digits(split) && is_byte_level(bytes, true) =>
            {
                Some(Splitter::Pattern)
            }
            _ => None,
        },
        // Gemma's pre-tokenizer splits at spaces, but its normalizer has replaced all spaces.
        "Split" if fields.get("pattern")?["String"] == " " => {
            (fields.get("behavior")? == "MergedWithPrevious" && fields.get("invert")? == false)
                .then_some(Splitter::None)
        }
        "Metaspace" if fields.get("replacement")? == SPACE_MARK => {
            let prepends = match fields.get("prepend_scheme")?.as_str()? {
                "always" => Prepends::UnlessSpace,
                "first" => Prepends::FirstUnlessSpace,
                "never" => Prepends::Never,
                _ => return None,
            };
            Some(Splitter::Metaspace { prepends, splits: fields.get("split")?.as_bool()? })
        }
        _ => None,
    }
}

fn is_byte_level(fields: &Map<String, Value>, splits: bool) -> bool {
    let is = |name: &str, value: bool| fields.get(name) == Some(&Value::Bool(value));
    fields.get("type").is_some_and(|kind| kind == "ByteLevel")
        && is("add_prefix_space", false)
        && is("use_regex", splits)
}

/// Returns whether each digit is a word, as for SmolLM and StarCoder.
fn is_digits(fields: &Map<String, Value>) -> bool {
    fields.get("type").is_some_and(|kind| kind == "Digits")
        && fields.get("individual_digits") == Some(&Value::Bool(true))
}

fn is_pattern(fields: &Map<String, Value>) -> bool {
    let is = |name: &str, value: &str| fields.get(name).is_some_and(|field| field == value);
    let inverted = fields.get("invert") == Some(&Value::Bool(true));
    // Both ways make each match a word: if a text has no gaps between matches, the removed gaps of an inverted pattern
    // are its matches.
    is("type", "Split")
        && is("behavior", if inverted { "Removed" } else { "Isolated" })
        && fields
            .get("pattern")
            .and_then(|pattern| pattern["Regex"].as_str())
            .is_some_and(|pattern| PATTERNS.contains(&pattern))
}
