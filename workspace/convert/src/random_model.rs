//! A freshly initialised model on disk: the start of tests, examples and trainings from scratch.
//!
//! Matrices are uniform with the configuration's standard deviation, norms are one. The numbers are
//! a function of the seed, the tensor's name and the element alone.

use std::path::Path;

use moh_model::config_file::ConfigFile;
use moh_model::flops::tensor_shapes;
use moh_model::weight_files::Dtype;

use crate::Error;
use crate::hf_directory::{Model, PIECE_BYTES, TensorSpec, Written, write_model};

/// Writes a random model of the configuration at `out`, see [`write_model`].
///
/// # Errors
/// As [`write_model`].
pub fn write_random_model(
    out: &Path,
    file: &ConfigFile,
    dtype: Dtype,
    max_shard_bytes: u64,
    seed: u64,
) -> Result<Written, Error> {
    let fields = file.to_json(&file.config, Some(dtype));
    let tensors: Vec<TensorSpec> = tensor_shapes(&file.config)
        .into_iter()
        .map(|(name, shape)| TensorSpec { name, shape, dtype })
        .collect();
    let model = Model { config: &fields, tensors: &tensors, max_shard_bytes, companions: &[] };
    // A uniform distribution of this half-width has the standard deviation that is asked for.
    let half_width = file.config.initializer_range * 3f64.sqrt();
    write_model(out, false, &model, &mut |spec, sink| {
        let elements: usize = spec.shape.iter().product();
        let is_norm = spec.shape.len() == 1;
        let mut state = spec.name.bytes().fold(seed, |state, byte| mix(state ^ u64::from(byte)));
        let piece = PIECE_BYTES / dtype.size();
        for start in (0..elements).step_by(piece) {
            let values: Vec<f32> = (start..elements.min(start + piece))
                .map(|_| {
                    state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                    let unit = (mix(state) >> 11) as f64 / (1u64 << 53) as f64;
                    if is_norm { 1.0 } else { ((2.0 * unit - 1.0) * half_width) as f32 }
                })
                .collect();
            let mut bytes = vec![0; values.len() * dtype.size()];
            dtype.write(&values, &mut bytes);
            sink(&bytes)?;
        }
        Ok(())
    })
}

/// The output function of SplitMix64.
fn mix(mut state: u64) -> u64 {
    state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}
