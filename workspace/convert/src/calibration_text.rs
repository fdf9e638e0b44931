//! The windows of text that a conversion by measurement reads.

use std::fs;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context as _, bail};
use moh_calibrate::CalibrationTokens;
use moh_data::{TokenFile, Windows, json_lines, with_ending};
use moh_model::ModelConfig;
use moh_text::TextTokenizer;

/// Maximum tokens of a window if its length is not given. The maximum for the model's own text has more windows start.
const MOST_LENGTH: usize = 2048;
const MOST_OWN_LENGTH: usize = 512;
/// Minimum number of windows if their length is not given: a window for each of nine passes.
const LEAST_WINDOWS: usize = 9;
/// Tokens if their number is not given: a number for each column of an output projection, and a minimum.
const LEAST_TOKENS: usize = 1 << 16;
const TOKENS_OF_COLUMN: usize = 128;
const MAX_LINE_BYTES: u64 = 64 << 20;

/// A text, and the weight of its windows among other texts' windows.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CalibrationText {
    pub path: PathBuf,
    pub weight: f64,
}

impl FromStr for CalibrationText {
    type Err = String;

    /// Parses `PATH` or `PATH=WEIGHT`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (path, weight) = match text.rsplit_once('=') {
            Some((path, weight)) if !Path::new(text).exists() => {
                let weight =
                    weight.parse().ok().filter(|weight: &f64| *weight > 0.0 && weight.is_finite());
                (path, weight.ok_or("expected a weight above 0 after the last =")?)
            }
            _ => (text, 1.0),
        };
        Ok(CalibrationText { path: path.into(), weight })
    }
}

/// Sizes of the calibration tokens.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    /// Tokens of all texts. `None` for the number that a fit of the model's output projections needs.
    pub tokens: Option<usize>,
    /// Tokens among them on which sets of heads are compared.
    pub search_tokens: usize,
    /// Tokens of a window. `None` for a power of two.
    pub length: Option<usize>,
}

/// Samples windows of the model's own text: the arguments are their number and their length in tokens.
pub(crate) type SampleOwn<'a> = &'a mut dyn FnMut(usize, usize) -> anyhow::Result<Vec<Vec<u32>>>;

/// The name of the model's own text, in place of a path.
const OWN: &str = "self";

/// The tokens of a text from which windows are read.
enum Source {
    /// Text that the model samples.
    Own,
    /// The first tokens of a text.
    Ids(Vec<u32>),
    File(Box<TokenFile>),
}

/// Reads windows of at least one text, in proportion to the texts' weights. If a text has too few windows, the windows
/// of all texts end there.
pub(crate) fn read(
    texts: &[CalibrationText],
    sizes: Sizes,
    config: &ModelConfig,
    tokenizer: Option<&TextTokenizer>,
    sample_own: SampleOwn<'_>,
) -> anyhow::Result<CalibrationTokens> {
    let tokens = sizes
        .tokens
        .unwrap_or_else(|| config.query_width().saturating_mul(TOKENS_OF_COLUMN).max(LEAST_TOKENS));
    let sum: f64 = texts.iter().map(|text| text.weight).sum();
    let mut sources = Vec::new();
    let mut fewest = tokens;
    for text in texts {
        let share = text.weight / sum;
        // A text may have a window more than its share.
        let most = tokens.min((tokens as f64 * share) as usize + MOST_LENGTH);
        let source = match text.is_own() {
            true => Ok(Source::Own),
            false => Source::open(&text.path, most, config, tokenizer),
        };
        let source = source.with_context(|| text.option())?;
        fewest = fewest.min((source.tokens() as f64 / share) as usize);
        sources.push(source);
    }
    let most =
        if texts.iter().any(CalibrationText::is_own) { MOST_OWN_LENGTH } else { MOST_LENGTH };
    let length = sizes.length.unwrap_or_else(|| default_length(config, most, fewest));
    let order = order(texts, fewest / length.max(1));
    let mut windows = Vec::new();
    for (number, (source, text)) in sources.into_iter().zip(texts).enumerate() {
        let count = order.iter().filter(|&&of| of == number).count();
        let read = match source {
            Source::Own => sample_own(count, length),
            Source::Ids(ids) => {
                Ok(ids.chunks_exact(length).take(count).map(<[u32]>::to_vec).collect())
            }
            Source::File(file) => spread(*file, count, length),
        };
        let read = read.with_context(|| text.option())?;
        windows.push(read.into_iter());
    }
    let (mut ids, mut of_windows) = (Vec::new(), Vec::new());
    for text in order {
        let Some(window) = windows[text].next() else { break };
        ids.extend(window);
        of_windows.push(text);
    }
    let option = || texts.iter().map(CalibrationText::option).collect::<Vec<_>>().join(" ");
    let tokens = CalibrationTokens::new(ids, length, sizes.search_tokens, config);
    let tokens = tokens.with_context(option)?;
    of_windows.truncate(tokens.ids().len() / length);
    Ok(if texts.len() > 1 { tokens.of_texts(of_windows) } else { tokens })
}

/// Returns the length of windows of `tokens` tokens in total, at most `most`.
fn default_length(config: &ModelConfig, most: usize, tokens: usize) -> usize {
    let most = config.max_position_embeddings.min(most).min(tokens / LEAST_WINDOWS);
    // A window has at least two tokens. A text that is too short for such windows is reported elsewhere.
    most.checked_ilog2().map_or(2, |log| 1 << log).max(2)
}

/// Returns the text of each window. The order follows multiples of the golden ratio, which have no period, so that
/// every pass has windows of each text.
fn order(texts: &[CalibrationText], windows: usize) -> Vec<usize> {
    let sum: f64 = texts.iter().map(|text| text.weight).sum();
    let text = |window: usize| {
        let mut rest = (window as f64 * 0.618_033_988_749_894_9).fract() * sum;
        let before = |text: &&CalibrationText| {
            rest -= text.weight;
            rest >= 0.0
        };
        texts.iter().take_while(before).count().min(texts.len() - 1)
    };
    (0..windows).map(text).collect()
}

impl CalibrationText {
    /// Returns whether the text is sampled by the model.
    pub fn is_own(&self) -> bool {
        self.path == Path::new(OWN) && !self.path.exists()
    }

    fn option(&self) -> String {
        format!("--calibration {}", self.path.display())
    }
}

impl Source {
    /// Opens a token file, or reads the first tokens of a text, at most `most`.
    fn open(
        path: &Path,
        most: usize,
        config: &ModelConfig,
        tokenizer: Option<&TextTokenizer>,
    ) -> anyhow::Result<Self> {
        if !with_ending(path, ".bin").is_file() {
            return Ok(Source::Ids(encoded(path, most, config, tokenizer)?));
        }
        let mut file = TokenFile::open(path)?;
        file.limit_vocabulary(config.vocab_size);
        if let Some(tokenizer) = tokenizer {
            tokenizer.check_file(&file, false)?;
        }
        Ok(Source::File(file.into()))
    }

    fn tokens(&self) -> usize {
        match self {
            Source::Own => usize::MAX,
            Source::Ids(ids) => ids.len(),
            Source::File(file) => usize::try_from(file.num_tokens()).unwrap_or(usize::MAX),
        }
    }
}

/// Returns at most `count` windows, spread over a token file.
fn spread(file: TokenFile, count: usize, length: usize) -> anyhow::Result<Vec<Vec<u32>>> {
    let windows = Windows::new(file, length)?.spread(count as u64);
    let read = |number| {
        let mut window = vec![0; length];
        windows.read(number, &mut window)?;
        Ok(window)
    };
    (0..windows.len()).map(read).collect()
}

/// Returns the first `tokens` ids of a text. Each document is encoded by the tokenizer and followed by the end of text.
fn encoded(
    text: &Path,
    tokens: usize,
    config: &ModelConfig,
    tokenizer: Option<&TextTokenizer>,
) -> anyhow::Result<Vec<u32>> {
    if text.extension().is_some_and(|ending| ending == "bin" || ending == "idx") {
        bail!("if it is a token file, name it without .bin and .idx");
    }
    let Some(tokenizer) = tokenizer else {
        bail!("the model has no tokenizer.json: give a token file");
    };
    let end = config.eos_token_ids.first();
    let mut ids = Vec::new();
    let mut add = |document: &str| {
        ids.extend(tokenizer.encode(document)?);
        ids.extend(end);
        anyhow::Ok(ids.len() < tokens)
    };
    if text.extension().is_some_and(|ending| ending == "jsonl") {
        let file = fs::File::open(text)?;
        for line in json_lines(text, BufReader::new(file), MAX_LINE_BYTES) {
            let (number, fields) = line?;
            let Some(document) = fields.get("text").and_then(|text| text.as_str()) else {
                bail!("line {number}: `text` is missing or not a string");
            };
            if !add(document)? {
                break;
            }
        }
    } else {
        add(&fs::read_to_string(text)?)?;
    }
    ids.truncate(tokens);
    if let Some(id) = ids.iter().find(|&&id| id as usize >= config.vocab_size) {
        bail!("the tokenizer gives id {id}, and the model's vocabulary has {}", config.vocab_size);
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> CalibrationText {
        text.parse().unwrap()
    }

    #[test]
    fn a_text_has_a_weight() {
        assert_eq!(text("a/b"), CalibrationText { path: "a/b".into(), weight: 1.0 });
        assert_eq!(text("a=b=0.5"), CalibrationText { path: "a=b".into(), weight: 0.5 });
        for bad in ["a=0", "a=-1", "a=b", "a=inf", "a="] {
            assert!(bad.parse::<CalibrationText>().is_err(), "{bad}");
        }
        // A file of this name.
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a=b");
        fs::write(&path, "text").unwrap();
        assert_eq!(text(path.to_str().unwrap()).path, path);
    }

    #[test]
    fn texts_come_as_their_weights_say_and_in_every_place_of_a_cycle() {
        let order = order(&[text("a=3"), text("b=2"), text("c=1")], 540);
        for (number, expected) in [270, 180, 90].into_iter().enumerate() {
            let count = order.iter().filter(|&&of| of == number).count();
            assert!(count.abs_diff(expected) <= 3, "{number}: {count}");
            for place in 0..9 {
                let of_place = order.iter().skip(place).step_by(9);
                let count = of_place.filter(|&&of| of == number).count();
                assert!(count.abs_diff(expected / 9) <= 4, "{number}, {place}: {count}");
            }
        }
        assert_eq!(self::order(&[text("a")], 3), [0, 0, 0]);
    }

    #[test]
    fn windows_are_powers_of_two_of_which_a_text_has_nine() {
        let fields = serde_json::json!({
            "model_type": "llama", "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 1000,
        });
        let config =
            moh_hf::ConfigFile::from_value(fields, Path::new("config.json")).unwrap().config;
        for (tokens, expected) in [(1 << 20, 512), (4608, 512), (4607, 256), (18, 2), (0, 2)] {
            assert_eq!(default_length(&config, 2048, tokens), expected, "{tokens}");
        }
    }
}
