//! A conversion by measurement: the shared heads and the output projections that crate `moh-calibrate`
//! chooses, on their way into the output.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
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
use serde::Serialize;

use crate::Error;
use crate::convert::ConversionOptions;
use crate::source::Source;

/// A measured conversion of a model.
#[derive(Debug)]
pub struct Calibrated {
    calibration: Calibration,
    /// Where the calibration tokens come from.
    texts: Vec<String>,
    tokens: usize,
    held_out_tokens: usize,
    /// The output projections, in f32, layer after layer; `None` if they stay the source's.
    projections: Option<Projections>,
}

/// The refitted output projections, in a file without a name: a large model's exceed the memory that a
/// conversion takes otherwise.
#[derive(Debug)]
struct Projections {
    file: File,
    /// The directory that it is in, for messages.
    directory: PathBuf,
    bytes: usize,
}

/// What a calibration chose, in a receipt.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CalibrationReceipt {
    /// The token files or texts.
    pub texts: Vec<TextReceipt>,
    /// Calibration tokens.
    pub tokens: usize,
    /// Those of them that nothing was fitted to.
    pub held_out_tokens: usize,
    /// Mean cross-entropy over these, in nats: of the dense model,
    pub loss_dense: f64,
    /// and of the output.
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
    /// Mean cross-entropy over its held-out tokens, in nats, if there are several texts: of the dense model,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_dense: Option<f64>,
    /// and of the output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
}

impl Calibrated {
    /// Measures the source of a conversion on a device, with its weights in the output's element type. What is fitted is
    /// stored in this type too, unless `calibration` says otherwise. `texts` is what a receipt calls those of the tokens; `progress`
    /// is told the layers that are done.
    pub fn measure(
        options: &ConversionOptions,
        calibration: &CalibrationOptions,
        tokens: &CalibrationTokens,
        texts: Vec<String>,
        device: OpenDevice,
        progress: &mut (dyn FnMut(usize, usize) + Send),
        stop: &AtomicBool,
    ) -> Result<Self, Error> {
        // Before what may take hours.
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
        let projections = match calibration.refit {
            true => Some(Projections::create(&options.out, &source.file.config)?),
            false => None,
        };
        let dtype = options.dtype;
        let measurement =
            Measurement { source, dtype, calibration, tokens, texts, projections, progress, stop };
        device.run(measurement)
    }

    /// The routing of the output.
    pub(crate) fn moh(&self) -> &MohConfig {
        &self.calibration.moh
    }

    pub(crate) fn is_refitted(&self) -> bool {
        self.projections.is_some()
    }

    /// Whether a tensor of the output is refitted, or the matrix of a router that was fitted.
    pub(crate) fn has_refitted(&self, tensor: &str) -> bool {
        let is_projection = layer_of_output_projection(tensor).is_some();
        (self.projections.is_some() && is_projection) || self.router(tensor).is_some()
    }

    /// The matrix of a layer's router that was fitted, by the tensor's name.
    pub(crate) fn router(&self, tensor: &str) -> Option<&[f32]> {
        let (layer, _) = layer_and_name(tensor).filter(|(_, name)| *name == ROUTER)?;
        let fit = self.calibration.layers.get(layer)?.router.as_ref()?;
        Some(&fit.rows)
    }

    /// The refitted values of a tensor; `None` if it stays the source's.
    pub(crate) fn refitted(&self, tensor: &str) -> Result<Option<Vec<f32>>, Error> {
        match (&self.projections, layer_of_output_projection(tensor)) {
            (Some(projections), Some(layer)) => projections.read(layer).map(Some),
            _ => Ok(None),
        }
    }

    /// What the receipt says of it.
    pub fn receipt(&self) -> CalibrationReceipt {
        let losses = &self.calibration.losses;
        let by_text = &self.calibration.losses_of_texts;
        let of_text = |(number, text): (usize, &String)| TextReceipt {
            text: text.clone(),
            loss_dense: by_text.get(number).map(|losses| losses.dense),
            loss: by_text.get(number).map(|losses| losses.calibrated),
        };
        CalibrationReceipt {
            texts: self.texts.iter().enumerate().map(of_text).collect(),
            tokens: self.tokens,
            held_out_tokens: self.held_out_tokens,
            loss_dense: losses.dense,
            loss: losses.calibrated,
            refit: self.projections.is_some(),
            layers: moh_train::calibrated_layers(&self.calibration),
        }
    }
}

struct Measurement<'a> {
    source: Source,
    /// The output's element type, if it is not the source's.
    dtype: Option<DType>,
    calibration: CalibrationOptions,
    tokens: &'a CalibrationTokens,
    texts: Vec<String>,
    projections: Option<Projections>,
    progress: &'a mut (dyn FnMut(usize, usize) + Send),
    stop: &'a AtomicBool,
}

impl OnDevice for Measurement<'_> {
    type Output = Result<Calibrated, Error>;

    fn run<B: Backend + Clone>(mut self, backend: B) -> Self::Output {
        let Source { file, weights, .. } = &self.source;
        let dense = ModelConfig { moh: None, ..file.config.clone() };
        let mut projections = self.projections.take();
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
            &mut |layer, values| match &mut projections {
                Some(projections) => projections.write(layer, values),
                None => Ok(()),
            },
            Watch {
                progress: &mut *self.progress,
                is_stopped: &|| self.stop.load(Ordering::Relaxed),
            },
        )?;
        let calibration = found.ok_or(Error::Interrupted)?;
        Ok(Calibrated {
            calibration,
            texts: self.texts,
            tokens: self.tokens.ids().len(),
            held_out_tokens: self.tokens.held_out().len(),
            projections,
        })
    }
}

impl Projections {
    /// An empty file beside the output.
    fn create(out: &Path, config: &ModelConfig) -> Result<Self, Error> {
        let parents = moh_files::parent(out).ancestors();
        let directory = parents.into_iter().find(|place| place.is_dir()).unwrap_or(Path::new("."));
        let file = tempfile::tempfile_in(directory)
            .map_err(|error| Error::from(moh_files::io(directory)(error)))?;
        let bytes = config.hidden_size * config.query_width() * DType::F32.bytes();
        Ok(Projections { file, directory: directory.to_path_buf(), bytes })
    }

    fn write(&mut self, layer: usize, values: &[f32]) -> Result<(), Error> {
        let mut bytes = vec![0; self.bytes];
        DType::F32.write(values, &mut bytes);
        let start = SeekFrom::Start((layer * self.bytes) as u64);
        let written = self.file.seek(start).and_then(|_| self.file.write_all(&bytes));
        written.map_err(|error| moh_files::io(&self.directory)(error).into())
    }

    fn read(&self, layer: usize) -> Result<Vec<f32>, Error> {
        let (mut bytes, mut file) = (vec![0; self.bytes], &self.file);
        let start = SeekFrom::Start((layer * self.bytes) as u64);
        let read = file.seek(start).and_then(|_| file.read_exact(&mut bytes));
        read.map_err(|error| Error::from(moh_files::io(&self.directory)(error)))?;
        let mut values = vec![0f32; self.bytes / DType::F32.bytes()];
        DType::F32.read(&bytes, &mut values);
        Ok(values)
    }
}
