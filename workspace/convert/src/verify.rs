//! Verifies a conversion: with all heads active, the output computes the source's logits.
//!
//! Both models run in f32 on the same token ids. If the output has a different element type, the
//! source's weights are first rounded to it, so that the logits should be equal. Then candle
//! computes the source with its own implementation, if it supports the model, and its logits of the
//! last token must equal the output's.

use std::path::Path;

use moh_device::{OnDevice, OpenDevice};
use moh_hf::{ConfigFile, WeightFiles};
use moh_kernels::{Backend, DType};
use moh_model::{Activations, Model, ModelConfig, MohConfig, PassShape, Recompute, StepSums};

use crate::{Error, candle};

/// Maximum number of token ids in the comparison.
const TOKENS: usize = 48;
/// Tolerance relative to the largest logit: sums of f32 in a different order.
const TOLERANCE: f32 = 1e-5;

/// Tolerance relative to the largest logit: another implementation's sums and exponentials.
const INDEPENDENT_TOLERANCE: f32 = 1e-4;

/// The result of the comparison with candle on the last token's logits.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Independent {
    /// The logits were compared.
    Compared {
        /// The largest absolute difference.
        largest_difference: f32,
    },
    /// It cannot compute the model.
    NotCompared {
        /// Why.
        reason: &'static str,
    },
}

/// What a comparison found.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Verification {
    /// Tokens compared.
    pub tokens: usize,
    /// Logits compared: those of the source's vocabulary.
    pub logits: usize,
    /// The largest absolute difference.
    pub largest_difference: f32,
    /// The largest logit of the source.
    pub largest_logit: f32,
    /// The comparison with another implementation.
    pub independent: Independent,
}

/// Compares the model in `out` with the one in `source` it was converted from, on a device that gives
/// the same bits in every run.
///
/// # Errors
/// When a model cannot be read, or the logits differ by more than rounding.
pub fn verify(source: &Path, out: &Path, device: OpenDevice) -> Result<Verification, Error> {
    device.run(Comparison { source, out })
}

struct Comparison<'a> {
    source: &'a Path,
    out: &'a Path,
}

impl OnDevice for Comparison<'_> {
    type Output = Result<Verification, Error>;

    fn run<B: Backend + Clone>(self, backend: B) -> Self::Output {
        verify_on(&backend, self.source, self.out)
    }
}

fn verify_on<B: Backend + Clone>(
    backend: &B,
    source: &Path,
    out: &Path,
) -> Result<Verification, Error> {
    let (before, after) = (ConfigFile::read(source)?.config, ConfigFile::read(out)?.config);
    let output = WeightFiles::open(out)?;
    let ids = sample_ids(before.vocab_size, before.max_position_embeddings);
    let expected = {
        let weights = WeightFiles::open(source)?;
        let rounded = |name: &str| output.get(name).map(|tensor| tensor.dtype);
        let dense = ModelConfig { moh: None, ..before.clone() };
        logits(backend, &weights, dense, &ids, rounded)?
    };
    let all_on = after.moh.clone().map(|moh| MohConfig {
        routed_top_k: moh.shared_heads.map(|shared| after.num_attention_heads - shared),
        ..moh
    });
    let all_on = ModelConfig { moh: all_on, ..after.clone() };
    let found =
        logits(backend, &output, all_on, &ids, |name| output.get(name).map(|tensor| tensor.dtype))?;
    let differences = compare(&expected, before.vocab_size, &found, after.vocab_size);
    let largest = differences.largest_logit.max(1.0);
    let refuse = |whose: &str, difference: f32| {
        let reason = format!(
            "verification failed: with all heads on, a logit differs from {whose} by {difference}, \
             more than rounding explains"
        );
        Err(Error::file(out, reason))
    };
    if exceeds(differences.largest_difference, TOLERANCE * largest) {
        return refuse("the source's", differences.largest_difference);
    }
    let independent = match candle::obstacle(&before) {
        Some(reason) => Independent::NotCompared { reason },
        None => {
            let weights = WeightFiles::open(source)?;
            let rounded = |name: &str| output.get(name).map(|tensor| tensor.dtype);
            let expected = candle::last_logits(&weights, &before, &ids, rounded)?;
            let last = &found[(ids.len() - 1) * after.vocab_size..];
            let found = compare(&expected, before.vocab_size, last, after.vocab_size);
            if exceeds(found.largest_difference, INDEPENDENT_TOLERANCE * largest) {
                return refuse("candle's of the source", found.largest_difference);
            }
            Independent::Compared { largest_difference: found.largest_difference }
        }
    };
    Ok(Verification {
        tokens: ids.len(),
        logits: ids.len() * before.vocab_size.min(after.vocab_size),
        largest_difference: differences.largest_difference,
        largest_logit: differences.largest_logit,
        independent,
    })
}

/// Whether a difference is more than allowed; one that is not a number is.
fn exceeds(difference: f32, allowed: f32) -> bool {
    difference.is_nan() || difference > allowed
}

/// Rounds values to a type.
pub(crate) fn round(dtype: DType, values: &mut [f32]) {
    let mut bytes = vec![0; values.len() * dtype.bytes()];
    dtype.write(values, &mut bytes);
    dtype.read(&bytes, values);
}

/// Distinct-looking ids from all over the vocabulary, the same every time.
fn sample_ids(vocab_size: usize, positions: usize) -> Vec<u32> {
    (0..TOKENS.min(positions))
        // Below the vocabulary's size, which fits.
        .map(|index| ((index * 7919 + 13) % vocab_size) as u32)
        .collect()
}

fn logits<B: Backend + Clone>(
    backend: &B,
    weights: &WeightFiles,
    config: ModelConfig,
    ids: &[u32],
    rounded: impl Fn(&str) -> Result<DType, moh_hf::Error>,
) -> Result<Vec<f32>, Error> {
    let mut model =
        Model::<B, f32>::new::<Error>(backend.clone(), config, ids.len(), |segment, values| {
            weights.read_f32(&segment.name, values)?;
            round(rounded(&segment.name)?, values);
            Ok(())
        })?;
    let shape = PassShape {
        batch: 1,
        length: ids.len(),
        recompute: Recompute::Block,
        training: false,
        document_mask: false,
    };
    let mut activations = Activations::new(&model, shape)?;
    activations.upload(backend, ids, ids, &[])?;
    model.forward(&mut activations, &mut StepSums::new(backend)?)?;
    Ok(model.logits(&activations)?)
}

/// How far two tables of logits are apart.
struct Differences {
    largest_difference: f32,
    largest_logit: f32,
}

/// Compares the logits of the source's vocabulary, row by row.
fn compare(expected: &[f32], old_vocab: usize, found: &[f32], new_vocab: usize) -> Differences {
    let shared = old_vocab.min(new_vocab);
    let rows = expected.chunks_exact(old_vocab).zip(found.chunks_exact(new_vocab));
    let (mut largest_difference, mut largest_logit) = (0f32, 0f32);
    for (expected, found) in rows {
        for (a, b) in expected.iter().zip(&found[..shared]) {
            let difference = (a - b).abs();
            // `max` would drop what is not a number.
            if difference > largest_difference || difference.is_nan() {
                largest_difference = difference;
            }
            largest_logit = largest_logit.max(a.abs());
        }
    }
    Differences { largest_difference, largest_logit }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_difference_is_found_among_the_old_vocabulary_only() {
        let verification = compare(&[1.0, 2.0, -3.0, 4.0], 2, &[1.0, 2.5, 9.0, -3.0, 4.0, 9.0], 3);
        assert_eq!((verification.largest_difference, verification.largest_logit), (0.5, 4.0));
        let nan = compare(&[f32::NAN, 1.0], 2, &[0.0, 1.0], 2);
        assert!(nan.largest_difference.is_nan());
    }

    #[test]
    fn ids_stay_within_the_vocabulary_and_the_positions() {
        assert!(sample_ids(7, 16).iter().all(|&id| id < 7));
        assert_eq!(sample_ids(512, 16).len(), 16);
        assert_eq!(sample_ids(512, 4096).len(), TOKENS);
    }
}
