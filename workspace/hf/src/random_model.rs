//! A freshly initialised model on disk, for tests and examples; its weights are those with which
//! training from scratch starts.

use std::path::Path;

use moh_kernels::DType;
use moh_model::initial::initialize;
use moh_model::tensors::tensor_shapes;

use crate::Error;
use crate::config_file::ConfigFile;
use crate::model_directory::{Contents, TensorSpec, Written, write_model};

/// Writes a random model with this configuration to `out`; see [`write_model`].
pub fn write_random_model(
    out: &Path,
    file: &ConfigFile,
    dtype: DType,
    max_shard_bytes: u64,
    seed: u64,
) -> Result<Written, Error> {
    let fields = file.to_json(&file.config, Some(dtype));
    let tensors: Vec<TensorSpec> = tensor_shapes(&file.config)
        .into_iter()
        .map(|(name, shape)| TensorSpec { name, shape, dtype })
        .collect();
    let model = Contents::new(&fields, &tensors, max_shard_bytes);
    let deviation = file.config.initializer_range;
    write_model(out, false, &model, &mut |spec, sink| {
        let mut values = vec![0f32; spec.shape.iter().product()];
        initialize(seed, deviation, &spec.name, &spec.shape, &mut values);
        let mut bytes = vec![0; values.len() * dtype.bytes()];
        dtype.write(&values, &mut bytes);
        sink(&bytes)
    })
}
