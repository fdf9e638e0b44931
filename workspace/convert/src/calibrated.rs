//! A conversion by measurement: the output gets the shared heads and the output projections that crate
//! `moh-calibrate` chooses.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use moh_calibrate::{Calibration, CalibrationOptions, CalibrationTokens, Watch, calibrate};
use moh_checkpoint::run_log::CalibratedLayer;
use moh_kernels::open_device::{OnDevice, OpenDevice};
use moh_kernels::{Backend, DType};
use moh_model::tensors::{
    OUTPUT_PROJECTION, ROUTER, in_layer, layer_and_name, layer_of_output_projection,
};
use moh_model::{ModelConfig, MohConfig};
use moh_train::{LayerLog, calibrated_layer, calibration_identity};
use serde::Serialize;

use crate::Error;
use crate::convert::ConversionOptions;
use crate::source::Source;

/// A measured conversion of a model.
#[derive(Debug)]
pub struct Calibrated {
    calibration: Calibration,
    /// The sources of the calibration tokens.
    texts: Vec<String>,
    tokens: usize,
    held_out_tokens: usize,
    /// Whether the output projections in the log are refitted.
    refit: bool,
    log: LayerLog,
}

/// The choices of a calibration, in a receipt.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CalibrationReceipt {
    /// The token files or texts.
    pub texts: Vec<TextReceipt>,
    /// Calibration tokens.
    pub tokens: usize,
    /// Calibration tokens that no fit used.
    pub held_out_tokens: usize,
    /// Mean cross-entropy of the dense model over the held-out tokens, in nats.
    pub loss_dense: f64,
    /// The same of the output.
    pub loss: f64,
    /// Whether the output projections are refitted.
    pub refit: bool,
    /// Each layer, in order.
    pub layers: Vec<CalibratedLayer>,
}

/// A text of a calibration, in a receipt.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TextReceipt {
    /// The token file or the text.
    pub text: String,
    /// Mean cross-entropy of the dense model over the text's held-out tokens, in nats, if there are several
    /// texts and this text has such tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_dense: Option<f64>,
    /// The same of the output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
}

impl Calibrated {
    /// Measures the source of a conversion on a device, with its weights in the output's element type. Fitted values
    /// are stored in the same type, unless `calibration` names another. A receipt names the tokens' texts by `texts`.
    /// `progress` is called with the number of layers that are done and the number of all layers.
    pub fn measure(
        options: &ConversionOptions,
        calibration: &CalibrationOptions,
        tokens: &CalibrationTokens,
        texts: Vec<String>,
        device: OpenDevice,
        progress: &mut (dyn FnMut(usize, usize) + Send),
        stop: &AtomicBool,
    ) -> Result<Self, Error> {
        // Checked before a measurement that may take hours.
        options.check_destination()?;
        let source = Source::open(&options.source, options.checkpoint.as_ref())?;
        if source.file.config.moh.is_some() {
            let reason = "is a Mixture-of-Head model: calibrate the dense model that it came from";
            return Err(Error::file(&options.source, reason));
        }
        let stored = match options.dtype {
            Some(dtype) => dtype,
            None => source.weights.dtype(&in_layer(0, OUTPUT_PROJECTION))?,
        };
        let calibration = CalibrationOptions {
            stored: calibration.stored.or(Some(stored)),
            ..calibration.clone()
        };
        let dtype = options.dtype;
        let weights = format!("{} as {dtype:?}", source.weights.identity());
        let identity = calibration_identity(&weights, &source.file.config, &calibration, tokens);
        let log = LayerLog::open(&beside(&options.out, ".calibration"), identity)?;
        let measurement =
            Measurement { source, dtype, calibration, tokens, texts, log, progress, stop };
        device.run(measurement)
    }

    /// Returns the routing of the output.
    pub(crate) fn moh(&self) -> &MohConfig {
        &self.calibration.moh
    }

    pub(crate) fn is_refitted(&self) -> bool {
        self.refit
    }

    /// Returns whether a tensor of the output is refitted, or is the fitted matrix of a router.
    pub(crate) fn has_refitted(&self, tensor: &str) -> bool {
        let is_projection = layer_of_output_projection(tensor).is_some();
        (self.refit && is_projection) || self.router(tensor).is_some()
    }

    /// Returns the fitted matrix of a layer's router, by the tensor's name.
    pub(crate) fn router(&self, tensor: &str) -> Option<&[f32]> {
        let (layer, _) = layer_and_name(tensor).filter(|(_, name)| *name == ROUTER)?;
        let fit = self.calibration.layers.get(layer)?.router.as_ref()?;
        Some(&fit.rows)
    }

    /// Returns the refitted values of a tensor, or `None` if it keeps the source's values.
    pub(crate) fn refitted(&self, tensor: &str) -> Result<Option<Vec<f32>>, Error> {
        match layer_of_output_projection(tensor) {
            Some(layer) => Ok(self.log.projection(layer)?),
            None => Ok(None),
        }
    }

    /// Removes the log from which the same calibration would resume. Called when the result is written.
    pub(crate) fn remove_log(&self) -> Result<(), Error> {
        Ok(self.log.remove()?)
    }

    /// Returns the calibration's part of the receipt.
    pub fn receipt(&self) -> CalibrationReceipt {
        let losses = &self.calibration.losses;
        let by_text = &self.calibration.losses_of_texts;
        let of_text = |(number, text): (usize, &String)| {
            let losses = by_text.get(number).filter(|losses| !losses.dense.is_nan());
            let (loss_dense, loss) = losses.map(|it| (it.dense, it.calibrated)).unzip();
            TextReceipt { text: text.clone(), loss_dense, loss }
        };
        CalibrationReceipt {
            texts: self.texts.iter().enumerate().map(of_text).collect(),
            tokens: self.tokens,
            held_out_tokens: self.held_out_tokens,
            loss_dense: losses.dense,
            loss: losses.calibrated,
            refit: self.refit,
            layers: self.calibration.layers.iter().map(calibrated_layer).collect(),
        }
    }
}

struct Measurement<'a> {
    source: Source,
    /// The output's element type, if it differs from the source's.
    dtype: Option<DType>,
    calibration: CalibrationOptions,
    tokens: &'a CalibrationTokens,
    texts: Vec<String>,
    log: LayerLog,
    progress: &'a mut (dyn FnMut(usize, usize) + Send),
    stop: &'a AtomicBool,
}

impl OnDevice for Measurement<'_> {
    type Output = Result<Calibrated, Error>;

    fn run<B: Backend + Clone>(mut self, backend: B) -> Self::Output {
        let Source { file, weights, .. } = &self.source;
        let dense = ModelConfig { moh: None, ..file.config.clone() };
        let found = calibrate::<B, Error>(
            &backend,
            &dense,
            &self.calibration,
            self.tokens,
            &mut |name, values| {
                weights.read_f32(name, values)?;
                if let Some(dtype) = self.dtype {
                    dtype.round(values);
                }
                Ok(())
            },
            &mut self.log,
            Watch {
                progress: &mut *self.progress,
                is_stopped: &|| self.stop.load(Ordering::Relaxed),
            },
        )?;
        let Some(calibration) = found else {
            return Err(match self.log.is_empty() {
                true => Error::Interrupted,
                false => Error::Kept(self.log.len(), self.log.path().to_owned()),
            });
        };
        Ok(Calibrated {
            calibration,
            texts: self.texts,
            tokens: self.tokens.ids().len(),
            held_out_tokens: self.tokens.held_out().len(),
            refit: self.calibration.refit,
            log: self.log,
        })
    }
}

/// Returns a path next to the output `out`, with its name and an ending.
pub fn beside(out: &Path, ending: &str) -> PathBuf {
    let mut name = out.file_name().unwrap_or_default().to_owned();
    name.push(ending);
    out.with_file_name(name)
}
