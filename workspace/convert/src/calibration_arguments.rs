//! The arguments of a conversion by measurement, and the text that it reads.

use std::fs;
use std::io::BufReader;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, bail};
use clap::Args;
use clap::error::ErrorKind;
use moh_calibrate::{CalibrationOptions, CalibrationTokens, Shared};
use moh_convert::{Calibrated, ConversionOptions};
use moh_data::{TokenFile, Windows, json_lines, with_ending};
use moh_kernels::open_device::OpenDevice;
use moh_model::{Active, HeadCounts, ModelConfig, SharedHeadSets};
use moh_program::arguments::at_least;
use moh_program::progress::Bar;
use moh_text::TextTokenizer;

/// Tokens of a window if the option is omitted, unless the model's context is shorter.
const DEFAULT_LENGTH: usize = 2048;
const MAX_LINE_BYTES: u64 = 64 << 20;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Conversion by measurement")]
pub(crate) struct CalibrationArguments {
    /// Text on which heads are measured: a token file, without .bin and .idx, or a file with text, as JSON lines
    /// with `text` if it ends in .jsonl. Not what the model is validated on
    #[arg(long, value_name = "PREFIX|FILE")]
    calibration: Option<PathBuf>,
    /// Tokens of it, in windows that are spread over a token file
    #[arg(long, value_name = "N", default_value_t = 65536, value_parser = at_least::<usize>(1))]
    #[arg(requires = "calibration")]
    calibration_tokens: usize,
    /// Tokens of a window [default: 2048, or the model's context length or the text's if that is less]
    #[arg(long, value_name = "N", value_parser = at_least::<usize>(1), requires = "calibration")]
    calibration_length: Option<usize>,
    /// Which heads are shared: the first ones, those that --calibration finds best, or these of each layer, layers
    /// separated by semicolons: 0,5;1,2, or once for all of them [default: calibrated with --calibration, else first]
    #[arg(long, value_name = "first|calibrated|IDS")]
    pub(crate) shared: Option<SharedChoice>,
    /// Whether the output projections are refitted to the heads that tokens compute [default: on with
    /// --calibration, else off]
    #[arg(long, value_name = "on|off", value_enum)]
    refit: Option<Switch>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Switch {
    /// They are
    On,
    /// They stay the source's
    Off,
}

/// The heads that are shared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SharedChoice {
    /// The first ones.
    First,
    /// Those that a calibration chooses.
    Calibrated,
    /// These, of each layer, or once for all layers.
    Ids(Vec<Vec<usize>>),
}

impl FromStr for SharedChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = "expected first, calibrated, or heads such as 0,5;1,2";
        let heads = |layer: &str| match layer.trim() {
            "" => Ok(Vec::new()),
            heads => {
                heads.split(',').map(|head| head.trim().parse().map_err(|_| expected)).collect()
            }
        };
        match text {
            "first" => Ok(SharedChoice::First),
            "calibrated" => Ok(SharedChoice::Calibrated),
            "" => Err(expected.to_owned()),
            ids => Ok(SharedChoice::Ids(ids.split(';').map(heads).collect::<Result<_, _>>()?)),
        }
    }
}

impl SharedChoice {
    /// The named heads, for a model of `layers` layers; `None` if none are named.
    pub(crate) fn sets(&self, layers: usize) -> anyhow::Result<Option<SharedHeadSets>> {
        let SharedChoice::Ids(ids) = self else { return Ok(None) };
        let each = if ids.len() == 1 { vec![ids[0].clone(); layers] } else { ids.clone() };
        Ok(Some(SharedHeadSets::from_ids(&each).context("--shared")?))
    }
}

impl CalibrationArguments {
    /// Refuses options that need a calibration, and heads that are given where a measurement chooses them.
    pub(crate) fn check(
        &self,
        active: Option<&Active>,
        shared_heads: Option<&HeadCounts>,
    ) -> Result<(), (ErrorKind, &'static str)> {
        let chooses = matches!(active, Some(Active::Average(_)));
        let gives = shared_heads.is_some()
            || matches!(self.shared, Some(SharedChoice::First | SharedChoice::Ids(_)));
        if chooses && gives {
            let message = "--active auto:R chooses the heads of each layer: leave out --shared-heads, and --shared \
                           but for calibrated";
            return Err((ErrorKind::ArgumentConflict, message));
        }
        if shared_heads.is_some() && matches!(self.shared, Some(SharedChoice::Ids(_))) {
            let message =
                "--shared with the ids of heads gives their numbers too: leave out --shared-heads";
            return Err((ErrorKind::ArgumentConflict, message));
        }
        if self.calibration.is_some() {
            return Ok(());
        }
        let missing = |message| Err((ErrorKind::MissingRequiredArgument, message));
        match (&self.shared, self.refit) {
            _ if chooses => {
                missing("--active auto:R needs a text to measure heads on: --calibration")
            }
            (Some(SharedChoice::Calibrated), _) => {
                missing("--shared calibrated needs a text to measure heads on: --calibration")
            }
            (_, Some(Switch::On)) => {
                missing("--refit on needs a text to measure heads on: --calibration")
            }
            _ => Ok(()),
        }
    }

    /// Whether an argument asks for Mixture-of-Head.
    pub(crate) fn choose_heads(&self) -> bool {
        self.calibration.is_some() || self.shared.is_some()
    }

    /// Measures the source of a conversion to Mixture-of-Head, if a text is given. `chooses_number` is whether the
    /// number of shared heads is left to the measurement.
    pub(crate) fn measure(
        &self,
        options: &ConversionOptions,
        chooses_number: bool,
        device: OpenDevice,
        stop: &AtomicBool,
    ) -> anyhow::Result<Option<Arc<Calibrated>>> {
        let Some(text) = &self.calibration else { return Ok(None) };
        let config = options.source_config()?;
        let total = options.attention.total(&config)?;
        let Some(moh) = options.attention.configure(&config)? else { return Ok(None) };
        let shared = match (&self.shared, total) {
            (_, Some(total)) => Shared::CalibratedTotal(total),
            (Some(SharedChoice::First | SharedChoice::Ids(_)), _) => Shared::Given,
            _ if chooses_number => Shared::CalibratedNumber,
            _ => Shared::Calibrated,
        };
        let refit = self.refit != Some(Switch::Off);
        let calibration = CalibrationOptions { moh, shared, refit, stored: None };
        let tokenizer = options.source_tokenizer();
        let tokenizer =
            tokenizer.map_or(Ok(None), |directory| moh_program::models::tokenizer(&directory))?;
        let option = || format!("--calibration {}", text.display());
        let tokens = self.tokens(text, &config, tokenizer.as_ref()).with_context(option)?;
        let mut bar = Bar::count("measuring layers", 0);
        let mut progress = |done: usize, all: usize| {
            bar.update(done as u64, all as u64);
            match stop.load(Ordering::Relaxed) {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        };
        let name = text.display().to_string();
        let measured =
            Calibrated::measure(options, &calibration, &tokens, name, device, &mut progress)?;
        Ok(Some(Arc::new(measured)))
    }

    fn tokens(
        &self,
        text: &Path,
        config: &ModelConfig,
        tokenizer: Option<&TextTokenizer>,
    ) -> anyhow::Result<CalibrationTokens> {
        if !with_ending(text, ".bin").is_file() {
            let ids = self.encoded(text, config, tokenizer)?;
            let length = self.length(config, ids.len());
            return Ok(CalibrationTokens::new(ids, length, config)?);
        }
        let mut file = TokenFile::open(text)?;
        file.limit_vocabulary(config.vocab_size);
        if let Some(tokenizer) = tokenizer {
            tokenizer.check_file(&file, false)?;
        }
        let length = self.length(config, usize::try_from(file.num_tokens()).unwrap_or(usize::MAX));
        let windows = Windows::new(file, length)?;
        let windows = windows.spread((self.calibration_tokens / length) as u64);
        let mut ids = vec![0; length * windows.len() as usize];
        for (number, window) in ids.chunks_exact_mut(length).enumerate() {
            windows.read(number as u64, window)?;
        }
        Ok(CalibrationTokens::new(ids, length, config)?)
    }

    /// Tokens of a window: at most those of the text, `tokens`, and those that are measured.
    fn length(&self, config: &ModelConfig, tokens: usize) -> usize {
        let default = config.max_position_embeddings.min(DEFAULT_LENGTH);
        // A window has two tokens or more; that the text has too few of them is an error of its own.
        let most = tokens.min(self.calibration_tokens).max(2);
        self.calibration_length.unwrap_or(default).min(most)
    }

    /// The first ids of a text, each document as the tokenizer encodes it and followed by the end of text.
    fn encoded(
        &self,
        text: &Path,
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
            anyhow::Ok(ids.len() < self.calibration_tokens)
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
        ids.truncate(self.calibration_tokens);
        if let Some(id) = ids.iter().find(|&&id| id as usize >= config.vocab_size) {
            bail!(
                "the tokenizer gives id {id}, and the model's vocabulary has {}",
                config.vocab_size
            );
        }
        Ok(ids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_heads_are_named_for_each_layer_or_once() {
        let parse = |text: &str| text.parse::<SharedChoice>();
        assert_eq!(parse("first"), Ok(SharedChoice::First));
        assert_eq!(parse("0, 5;1,2;"), Ok(SharedChoice::Ids(vec![vec![0, 5], vec![1, 2], vec![]])));
        let once = parse("3,1").unwrap().sets(2).unwrap().unwrap();
        assert_eq!(once.ids(), Some(vec![vec![1, 3], vec![1, 3]]));
        assert_eq!(parse("calibrated").unwrap().sets(2).unwrap(), None);
        for bad in ["", "best", "1,-2", "1;x", "1,"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        let twice = parse("1,1").unwrap().sets(2).unwrap_err();
        assert!(format!("{twice:#}").contains("layer 0 has head 1 twice"), "{twice:#}");
    }
}
