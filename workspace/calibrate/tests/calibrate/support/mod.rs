//! Small random models, and their calibrations.

use std::path::Path;

use moh_calibrate::{
    Calibration, CalibrationOptions, CalibrationTokens, Error, FoundLayer, LayerStore, Watch,
    calibrate,
};
use moh_hf::ConfigFile;
use moh_kernels::Backend;
use moh_model::initial::initialize;
use moh_model::tensors::tensor_shapes;
use moh_model::{HeadCounts, ModelConfig, MohConfig, RouterKind};

/// Tokens of a window.
pub const LENGTH: usize = 24;

/// Returns a model with 8 heads: all sets of its heads are compared.
pub fn config(model_type: &str) -> ModelConfig {
    config_with(model_type, 8, 6)
}

/// Returns a model with 16 heads, in 4 groups: most sets of its heads are not compared.
pub fn with_more_heads() -> ModelConfig {
    config_with("llama", 16, 4)
}

fn config_with(model_type: &str, heads: usize, head_dim: usize) -> ModelConfig {
    let fields = serde_json::json!({
        "model_type": model_type, "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 3, "num_attention_heads": heads, "num_key_value_heads": 4, "head_dim": head_dim,
        "max_position_embeddings": 64, "tie_word_embeddings": false,
    });
    ConfigFile::from_value(fields, Path::new("config.json")).unwrap().config
}

pub fn source(config: &ModelConfig) -> impl FnMut(&str, &mut [f32]) -> Result<(), Error> + use<> {
    let shapes = tensor_shapes(config);
    move |name, values| {
        let (_, shape) = shapes.iter().find(|(known, _)| known == name).unwrap();
        initialize(7, 0.3, name, shape, values);
        Ok(())
    }
}

pub fn moh(shared: usize, top_k: usize) -> MohConfig {
    MohConfig {
        router: RouterKind::QueryNorm,
        shared_heads: shared.into(),
        routed_top_k: HeadCounts::All(top_k),
    }
}

pub fn tokens(config: &ModelConfig) -> CalibrationTokens {
    let ids = (0..40 * LENGTH as u32).map(|i| (i * i * 7 + i * 13) % 60).collect();
    CalibrationTokens::new(ids, LENGTH, 40 * LENGTH, config).unwrap()
}

/// Stores layers in memory.
#[derive(Default)]
pub struct Layers(pub Vec<FoundLayer>);

impl LayerStore<Error> for Layers {
    fn known(&mut self, layer: usize) -> Result<Option<FoundLayer>, Error> {
        Ok(self.0.get(layer).cloned())
    }

    fn keep(&mut self, found: FoundLayer) -> Result<(), Error> {
        self.0.push(found);
        Ok(())
    }
}

/// Returns a calibration on a device, and the output projections that it refitted.
pub fn run_on<B: Backend + Clone>(
    backend: &B,
    config: &ModelConfig,
    options: &CalibrationOptions,
) -> (Calibration, Vec<Vec<f32>>) {
    let mut layers = Layers::default();
    let found = calibrate::<B, Error>(
        backend,
        config,
        options,
        &tokens(config),
        &mut source(config),
        &mut layers,
        Watch { progress: &mut |_, _| (), is_stopped: &|| false },
    );
    let projections = layers.0.into_iter().filter_map(|layer| layer.projection).collect();
    (found.unwrap().unwrap(), projections)
}
