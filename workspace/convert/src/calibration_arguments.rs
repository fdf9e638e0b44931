//! The arguments of a conversion by measurement.

use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context as _;
use clap::Args;
use clap::error::ErrorKind;
use moh_calibrate::CalibrationOptions;
use moh_convert::{Calibrated, ConversionOptions, beside};
use moh_kernels::open_device::OpenDevice;
use moh_model::{HeadCounts, SharedChoice, SharedHeadSets};
use moh_program::arguments::at_least;
use moh_program::exit;
use moh_program::models::NamedModel;
use moh_program::progress::Bar;

use crate::calibration_text::{self, CalibrationText, Sizes};
use crate::own_text::{self, OwnText};

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Conversion by measurement")]
pub(crate) struct CalibrationArguments {
    /// Text on which heads are measured: a token file, without .bin and .idx, or a file with text, as JSON lines
    /// with `text` if it ends in .jsonl; or self, for text that the model samples. Not what the model is validated on. Given
    /// several times, windows of the texts alternate, with =WEIGHT after one as often as its weight says
    #[arg(long, value_name = "PREFIX|FILE|self[=WEIGHT]")]
    calibration: Vec<CalibrationText>,
    /// Tokens of it, in windows that are spread over a token file [default: 128 for each column of an output
    /// projection, and at least 65536]
    #[arg(long, value_name = "N", value_parser = at_least::<usize>(1), requires = "calibration")]
    calibration_tokens: Option<usize>,
    /// Tokens of these on which sets of shared heads are compared
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = at_least::<usize>(1))]
    #[arg(requires = "calibration")]
    calibration_search_tokens: usize,
    /// Tokens of a window [default: 2048, with self 512, or the largest smaller power of two of which the model's context has one and
    /// the text nine]
    #[arg(long, value_name = "N", value_parser = at_least::<usize>(1), requires = "calibration")]
    calibration_length: Option<usize>,
    /// Which heads are shared: the first ones, those that --calibration finds best, or these of each layer, layers
    /// separated by semicolons: '0,5;1,2', or once for all of them [default: calibrated with --calibration, else first]
    #[arg(long, value_name = "first|calibrated|IDS")]
    pub(crate) shared: Option<SharedArgument>,
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
pub(crate) enum SharedArgument {
    /// The first ones.
    First,
    /// The heads that a calibration chooses.
    Calibrated,
    /// The named heads, for each layer or once for all layers.
    Ids(Vec<Vec<usize>>),
}

impl FromStr for SharedArgument {
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
            "first" => Ok(SharedArgument::First),
            "calibrated" => Ok(SharedArgument::Calibrated),
            "" => Err(expected.to_owned()),
            ids => Ok(SharedArgument::Ids(ids.split(';').map(heads).collect::<Result<_, _>>()?)),
        }
    }
}

impl SharedArgument {
    /// Returns the named heads for a model of `layers` layers, or `None` if no heads are named.
    pub(crate) fn sets(&self, layers: usize) -> anyhow::Result<Option<SharedHeadSets>> {
        let SharedArgument::Ids(ids) = self else { return Ok(None) };
        let each = if ids.len() == 1 { vec![ids[0].clone(); layers] } else { ids.clone() };
        Ok(Some(SharedHeadSets::from_ids(&each).context("--shared")?))
    }
}

impl CalibrationArguments {
    /// Rejects options that need a calibration, and heads that are named although a measurement chooses them.
    pub(crate) fn check(
        &self,
        shared_heads: Option<&HeadCounts>,
    ) -> Result<(), (ErrorKind, &'static str)> {
        if shared_heads.is_some() && matches!(self.shared, Some(SharedArgument::Ids(_))) {
            let message =
                "--shared with the ids of heads gives their numbers too: leave out --shared-heads";
            return Err((ErrorKind::ArgumentConflict, message));
        }
        if self.has_text() {
            return Ok(());
        }
        let missing = |message| Err((ErrorKind::MissingRequiredArgument, message));
        match (&self.shared, self.refit) {
            (Some(SharedArgument::Calibrated), _) => {
                missing("--shared calibrated needs a text to measure heads on: --calibration")
            }
            (_, Some(Switch::On)) => {
                missing("--refit on needs a text to measure heads on: --calibration")
            }
            _ => Ok(()),
        }
    }

    /// Returns whether there is a text for a measurement.
    pub(crate) fn has_text(&self) -> bool {
        !self.calibration.is_empty()
    }

    /// Returns whether an argument requests Mixture-of-Head.
    pub(crate) fn choose_heads(&self) -> bool {
        self.has_text() || self.shared.is_some()
    }

    /// Measures the source of a conversion to Mixture-of-Head, if a text is given. `chooses_number` is whether the
    /// measurement chooses the number of shared heads.
    pub(crate) fn measure(
        &self,
        options: &ConversionOptions,
        model: &NamedModel,
        chooses_number: bool,
        device: OpenDevice,
        stop: &AtomicBool,
    ) -> anyhow::Result<Option<Arc<Calibrated>>> {
        if !self.has_text() {
            return Ok(None);
        }
        let config = options.source_config()?;
        let Some(moh) = options.attention.configure(&config)? else { return Ok(None) };
        let shared = match &self.shared {
            Some(SharedArgument::First | SharedArgument::Ids(_)) => SharedChoice::Given,
            _ if chooses_number => SharedChoice::CalibratedNumber,
            _ => SharedChoice::Calibrated,
        };
        let refit = self.refit != Some(Switch::Off);
        let calibration = CalibrationOptions { moh, shared, refit, stored: None };
        let tokenizer = options.source_tokenizer();
        let tokenizer =
            tokenizer.map_or(Ok(None), |directory| moh_program::models::tokenizer(&directory))?;
        let sizes = Sizes {
            tokens: self.calibration_tokens,
            search_tokens: self.calibration_search_tokens,
            length: self.calibration_length,
        };
        let mut sample_own = |windows, length| {
            let tokenizer = tokenizer.as_ref().context("the model has no tokenizer.json")?;
            let own = OwnText { model, tokenizer, windows, length, stop };
            let sampled = device.clone().run(own)?;
            let kept = beside(&options.out, "-own-text");
            own_text::keep(&kept, &sampled, tokenizer.vocab_size())?;
            exit::stderr_line(format_args!(
                "the model's own text is kept in {0}: --calibration {0} reads it again",
                kept.display()
            ));
            Ok(sampled)
        };
        let tokenizer = tokenizer.as_ref();
        let tokens =
            calibration_text::read(&self.calibration, sizes, &config, tokenizer, &mut sample_own)?;
        let mut bar = Bar::count("measuring layers", 0);
        let mut progress = |done: usize, all: usize| bar.update(done as u64, all as u64);
        let texts = self.calibration.iter().map(|text| text.path.display().to_string()).collect();
        let measured = Calibrated::measure(
            options,
            &calibration,
            &tokens,
            texts,
            device,
            &mut progress,
            stop,
        )?;
        Ok(Some(Arc::new(measured)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_heads_are_named_for_each_layer_or_once() {
        let parse = |text: &str| text.parse::<SharedArgument>();
        assert_eq!(parse("first"), Ok(SharedArgument::First));
        assert_eq!(
            parse("0, 5;1,2;"),
            Ok(SharedArgument::Ids(vec![vec![0, 5], vec![1, 2], vec![]]))
        );
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
