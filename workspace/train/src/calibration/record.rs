//! The result of a calibration, in a file of the run directory. The file has the calibration's identity: a result for
//! other weights, tokens or options is not used.

use std::path::Path;

use moh_calibrate::{Calibration, CalibrationTokens};
use moh_checkpoint::run_directory::RunDirectory;
use moh_checkpoint::run_log::{CalibratedLayer, StageCalibration};
use moh_kernels::Backend;
use moh_model::{Model, ModelConfig, MohConfig, RouterKind, SharedHeadSets};
use moh_step::OptimizerState;
use serde::{Deserialize, Serialize};

use super::layer_log::LayerLog;
use crate::{Error, Result};

const FORMAT: u32 = 2;
const MAX_FILE_BYTES: u64 = 64 << 20;

/// The result of a calibration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct CalibrationRecord {
    format: u32,
    /// BLAKE3 of the measured model, the options and the tokens.
    pub(super) identity: String,
    /// The chosen heads, and the losses.
    pub calibration: StageCalibration,
}

/// Returns the record of a layer's calibration.
pub fn calibrated_layer(layer: &moh_calibrate::LayerCalibration) -> CalibratedLayer {
    CalibratedLayer {
        shared_heads: layer.shared.heads().collect(),
        routed_top_k: layer.top_k,
        error_before: layer.error_before,
        error: layer.error,
        ridge: layer.ridge,
        router_explained: layer.router.as_ref().map(|fit| fit.explained),
    }
}

impl CalibrationRecord {
    /// Returns the record of a calibration of a stage after `step` steps.
    pub(super) fn new(
        identity: String,
        (stage, step): (&str, u64),
        tokens: &CalibrationTokens,
        found: &Calibration,
        refit: bool,
    ) -> Self {
        let calibration = StageCalibration {
            stage: stage.to_owned(),
            step,
            tokens: tokens.ids().len() as u64,
            held_out_tokens: tokens.held_out().len() as u64,
            loss_dense: found.losses.dense,
            loss: found.losses.calibrated,
            refit,
            layers: found.layers.iter().map(calibrated_layer).collect(),
        };
        CalibrationRecord { format: FORMAT, identity, calibration }
    }

    /// Reads the record of a calibration after `step` steps; returns `None` if the file is missing.
    pub(crate) fn read(run: &RunDirectory, step: u64) -> Result<Option<Self>> {
        let path = run.calibration(step);
        let kind = "the result of a calibration";
        let text = moh_files::read_bounded_if_any(&path, MAX_FILE_BYTES, kind)?;
        text.map(|text| Self::parse(&text, &path)).transpose()
    }

    /// Parses a record; errors name its `path`.
    pub(super) fn parse(text: &[u8], path: &Path) -> Result<Self> {
        let refuse = |reason: String| Error::from(moh_files::unusable(path, reason));
        let record: Self = serde_json::from_slice(text).map_err(|error| {
            refuse(format!(
                "not the result of a calibration ({error}): remove it, and the run measures again"
            ))
        })?;
        if record.format != FORMAT {
            return Err(refuse(format!(
                "format {}, but this version reads {FORMAT}: use the version that wrote it, or remove the file",
                record.format
            )));
        }
        Ok(record)
    }

    pub(super) fn text(&self, path: &Path) -> Result<Vec<u8>> {
        Ok(serde_json::to_vec_pretty(self).map_err(|error| moh_files::io(path)(error.into()))?)
    }

    /// Returns the chosen routing, with the stage's router. Fails if the record's heads do not fit the model that
    /// `config` describes.
    pub(crate) fn moh(
        &self,
        router: RouterKind,
        config: &ModelConfig,
    ) -> Result<MohConfig, moh_model::Error> {
        let layers = &self.calibration.layers;
        let ids: Vec<Vec<usize>> = layers.iter().map(|layer| layer.shared_heads.clone()).collect();
        let moh = MohConfig {
            router,
            shared_heads: SharedHeadSets::from_ids(&ids)?,
            routed_top_k: layers.iter().map(|layer| layer.routed_top_k).collect(),
        };
        config.check_moh(&moh)?;
        Ok(moh)
    }

    /// Returns the file with the layers, each with a hash.
    fn layers(&self, run: &RunDirectory) -> Result<LayerLog> {
        LayerLog::read(&run.calibrated_layers(self.calibration.step), self.identity.clone())
    }

    /// Returns whether the run has all layers of the record. Called on the first rank.
    pub(super) fn has_layers(&self, run: &RunDirectory) -> bool {
        self.layers(run).is_ok_and(|layers| layers.len() == self.calibration.layers.len())
    }

    /// Writes this rank's slices of the fitted matrices into its part of a model.
    pub(crate) fn apply<B: Backend + Clone>(
        &self,
        run: &RunDirectory,
        model: &mut Model<B>,
        optimizer: &mut OptimizerState<B>,
    ) -> Result<()> {
        let layers = self.layers(run)?;
        let layout = model.layout().clone();
        for (flat, segment) in layout.segments() {
            let Some(whole) = layers.matrix(&segment.name, segment.whole_len())? else { continue };
            let runs = segment.slice.runs(0..segment.slice.len());
            let own = runs.iter().flat_map(|run| &whole[run.whole..run.whole + run.len]).copied();
            optimizer.set_weights(model, (flat, segment), &own.collect::<Vec<f32>>())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use moh_hf::ConfigFile;
    use serde_json::{Value, json};

    use super::*;

    /// Returns the record of two layers with refitted projections.
    fn record() -> Value {
        let layer = |heads: &[usize]| {
            json!({
                "shared_heads": heads, "routed_top_k": 1, "error_before": 0.5, "error": 0.25,
            })
        };
        json!({
            "format": 2,
            "identity": "ab",
            "calibration": {
                "stage": "moh", "step": 5, "tokens": 128, "loss_dense": null, "loss_given": 3.0,
                "loss": 2.0, "refit": true, "layers": [layer(&[0, 3]), layer(&[1, 2])],
            },
        })
    }

    fn parse(record: &Value) -> Result<CalibrationRecord> {
        CalibrationRecord::parse(record.to_string().as_bytes(), Path::new("record.json"))
    }

    fn config(layers: usize) -> ModelConfig {
        let fields = json!({
            "model_type": "llama", "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": layers, "num_attention_heads": 4, "max_position_embeddings": 64,
        });
        ConfigFile::from_value(fields, Path::new("config.json")).unwrap().config
    }

    #[test]
    fn a_record_reads_back_with_its_heads() {
        let found = parse(&record()).unwrap();
        // A record of an earlier version, which held out no tokens and measured the heads that the stage would have
        // had.
        assert!(found.calibration.loss_dense.is_nan() && found.calibration.held_out_tokens == 0);
        let again = found.text(Path::new("record.json")).unwrap();
        let again = CalibrationRecord::parse(&again, Path::new("record.json")).unwrap();
        assert_eq!(again.identity, found.identity);
        let moh = found.moh(RouterKind::QueryNorm, &config(2)).unwrap();
        assert_eq!(moh.shared_heads.ids(), Some(vec![vec![0, 3], vec![1, 2]]));
    }

    #[test]
    fn what_is_no_record_of_the_model_is_refused() {
        let changed = |place: &str, value: Value| {
            let mut record = record();
            *record.pointer_mut(place).unwrap() = value;
            record
        };
        for (record, expected) in [
            (json!({}), "not the result of a calibration (missing field"),
            (changed("/format", json!(3)), "format 3, but this version reads 2"),
            (changed("/calibration/step", json!(-1)), "not the result of a calibration"),
        ] {
            let message = parse(&record).unwrap_err().to_string();
            assert!(
                message.starts_with("record.json: ") && message.contains(expected),
                "{message}"
            );
        }
        let heads = "/calibration/layers/1/shared_heads";
        for (record, layers) in [
            (record(), 3),
            (changed(heads, json!([1, 4])), 2),
            (changed(heads, json!([1, 1])), 2),
            (changed(heads, json!([1, 4000])), 2),
            (changed(heads, json!([0, 1, 2])), 2),
        ] {
            let found = parse(&record).unwrap().moh(RouterKind::QueryNorm, &config(layers));
            assert!(found.is_err(), "{record}");
        }
    }

    #[test]
    fn a_record_is_whole_or_none_in_bytes_of_any_kind() {
        let text = record().to_string().into_bytes();
        for end in 0..text.len() {
            assert!(CalibrationRecord::parse(&text[..end], Path::new("record.json")).is_err());
        }
    }
}
