//! Verifies a conversion: the output has the source's weights, and computes the source's logits with all heads
//! active. If output projections are refitted, all comparisons use the output's projections instead of the
//! source's.
//!
//! Both models run in f32 on the same token ids. If the output has another element type, its logits must equal
//! the logits of the source with weights rounded to that type. If candle supports the model, candle also
//! computes the rounded source with its own implementation. Its logits of the last token must then equal the
//! output's.

use std::path::Path;

use moh_hf::StoredModel;
use moh_kernels::open_device::{OnDevice, OpenDevice};
use moh_kernels::{Backend, ElementType};
use moh_model::tensors::layer_of_output_projection;
use moh_model::{
    Activations, Model, ModelConfig, MohConfig, PassShape, Recompute, RouterKind, StepSums,
};

use crate::weights::{self, Rounding};
use crate::{Error, candle};

/// Maximum number of token ids in the comparison.
const TOKENS: usize = 48;
/// Tolerance relative to the largest logit: sums of f32 in a different order.
const TOLERANCE: f32 = 1e-5;

/// Tolerance relative to the largest logit: another implementation's sums and exponentials.
const INDEPENDENT_TOLERANCE: f32 = 1e-4;

/// The result of a comparison.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Verification {
    /// Number of compared logits, over the rows of the vocabulary that are equal to the source's.
    pub logits: usize,
    /// The largest absolute difference to the source's logits, with its weights in their own type.
    pub largest_difference: f32,
    /// The largest absolute difference to the logits of the source with weights rounded to the output's
    /// type. Rounding does not explain this difference.
    pub unexplained_difference: f32,
    /// The largest change of weights by rounding to another type. `None` if all weights have the source's bits.
    pub rounding: Option<Rounding>,
    /// The largest absolute difference of the last token's logits to candle's, or why candle cannot compute the model.
    pub independent: Result<f32, &'static str>,
}

/// Compares the model in `out` with the model in `source` from which it was converted, on a device that computes the
/// same bits in every run. Both models have the first `kept_rows` rows of the vocabulary.
pub(crate) fn verify(
    source: &Path,
    out: &Path,
    kept_rows: usize,
    refit: bool,
    device: OpenDevice,
) -> Result<Verification, Error> {
    let before = StoredModel::open(source)?;
    let after = StoredModel::open(out)?;
    if kept_rows == 0 {
        let reason = "the new tokenizer replaces the first row of the vocabulary, so that no logits can \
                      be compared: use --no-verify";
        return Err(Error::file(source, reason));
    }
    device.run(Comparison { source, before, after, kept_rows, refit })
}

struct Comparison<'a> {
    source: &'a Path,
    before: StoredModel,
    after: StoredModel,
    kept_rows: usize,
    /// Whether the output projections are refitted.
    refit: bool,
}

impl OnDevice for Comparison<'_> {
    type Output = Result<Verification, Error>;

    fn run<B: Backend + Clone>(self, backend: B) -> Self::Output {
        let Comparison { before, after, kept_rows, .. } = &self;
        let (config, output) = (&before.file.config, &after.weights);
        let dense = ModelConfig { moh: None, ..config.clone() };
        let (configs, refitted) =
            ([config, &after.file.config], |name: &str| self.is_refitted(name));
        let rounding = weights::compare(&before.weights, output, configs, *kept_rows, refitted)?;
        let ids = sample_ids(*kept_rows, config.max_position_embeddings);
        let rounded = |name: &str, values: &mut [f32]| {
            self.read_source(name, values)?;
            output.get(name)?.dtype.round(values);
            Ok(())
        };
        let own = |name: &str, values: &mut [f32]| self.read_source(name, values);
        let of_output = |name: &str, values: &mut [f32]| Ok(output.read_f32(name, values)?);

        let found = logits(&backend, self.all_heads_on(), &ids, of_output)?;
        let expected = logits(&backend, dense.clone(), &ids, rounded)?;
        let unexplained = self.compare(&expected, &found);
        let largest = unexplained.largest_logit.max(1.0);
        if exceeds(unexplained.largest_difference, TOLERANCE * largest) {
            return self.refuse("the source's", unexplained.largest_difference);
        }
        let differences = match rounding {
            None => unexplained,
            Some(_) => self.compare(&logits(&backend, dense, &ids, own)?, &found),
        };
        let independent = match candle::obstacle(config) {
            Some(reason) => Err(reason),
            None => {
                let expected = candle::last_logits(config, &ids, rounded)?;
                let last = &found[(ids.len() - 1) * after.file.config.vocab_size..];
                let Differences { largest_difference, .. } = self.compare(&expected, last);
                if exceeds(largest_difference, INDEPENDENT_TOLERANCE * largest) {
                    return self.refuse("candle's of the source", largest_difference);
                }
                Ok(largest_difference)
            }
        };
        Ok(Verification {
            logits: ids.len() * kept_rows,
            largest_difference: differences.largest_difference,
            unexplained_difference: unexplained.largest_difference,
            rounding,
            independent,
        })
    }
}

impl Comparison<'_> {
    fn is_refitted(&self, name: &str) -> bool {
        self.refit && layer_of_output_projection(name).is_some()
    }

    /// Reads a tensor of the source, or of the output if it is refitted.
    fn read_source(&self, name: &str, values: &mut [f32]) -> Result<(), Error> {
        let model = if self.is_refitted(name) { &self.after } else { &self.before };
        Ok(model.weights.read_f32(name, values)?)
    }

    /// Returns the output's configuration with all heads active. Every routed head is selected. If the router selects
    /// no heads or weighs them, every head is shared.
    fn all_heads_on(&self) -> ModelConfig {
        let config = &self.after.file.config;
        let heads = config.num_attention_heads;
        let selects = |router: RouterKind| router.selects() && !router.has_matrices();
        let moh = config.moh.clone().map(|moh| match selects(moh.router) {
            true => MohConfig {
                routed_top_k: moh.shared_heads.counts().map(|shared| heads - shared),
                ..moh
            },
            false => MohConfig { shared_heads: heads.into(), routed_top_k: 0.into(), ..moh },
        });
        ModelConfig { moh, ..config.clone() }
    }

    /// Compares the source's logits with the output's.
    fn compare(&self, expected: &[f32], found: &[f32]) -> Differences {
        let vocabularies = [&self.before, &self.after].map(|model| model.file.config.vocab_size);
        compare(expected, found, vocabularies, self.kept_rows)
    }

    fn refuse<T>(&self, whose: &str, difference: f32) -> Result<T, Error> {
        let reason = format!(
            "verification failed: with all heads on, a logit of the output differs from {whose} by \
             {difference:.2e}, more than rounding explains"
        );
        Err(Error::file(self.source, reason))
    }
}

/// Returns whether a difference exceeds the limit or is not a number.
fn exceeds(difference: f32, allowed: f32) -> bool {
    difference.is_nan() || difference > allowed
}

/// Returns ids spread over the vocabulary, the same in every run.
fn sample_ids(vocab_size: usize, positions: usize) -> Vec<u32> {
    (0..TOKENS.min(positions))
        // Below the vocabulary's size, which fits.
        .map(|index| ((index * 7919 + 13) % vocab_size) as u32)
        .collect()
}

fn logits<B: Backend + Clone>(
    backend: &B,
    config: ModelConfig,
    ids: &[u32],
    read: impl Fn(&str, &mut [f32]) -> Result<(), Error>,
) -> Result<Vec<f32>, Error> {
    let f32 = ElementType::F32;
    let mut model =
        Model::new::<Error>(backend.clone(), f32, config, ids.len(), |segment, values| {
            read(&segment.name, values)
        })?;
    let shape = PassShape::evaluation(1, ids.len(), Recompute::Block);
    let mut activations = Activations::new(&model, shape)?;
    activations.upload(backend, ids, ids, &[])?;
    model.forward(&mut activations, &mut StepSums::new(backend)?)?;
    Ok(model.logits(&activations)?)
}

/// The distance of two tables of logits.
#[derive(Debug, Clone, Copy)]
struct Differences {
    largest_difference: f32,
    largest_logit: f32,
}

/// Compares the first `columns` logits of every row of two tables. `lengths` are the lengths of their rows.
fn compare(expected: &[f32], found: &[f32], lengths: [usize; 2], columns: usize) -> Differences {
    let rows = expected.chunks_exact(lengths[0]).zip(found.chunks_exact(lengths[1]));
    let (mut largest_difference, mut largest_logit) = (0f32, 0f32);
    for (expected, found) in rows {
        for (a, b) in expected.iter().zip(found).take(columns) {
            let difference = (a - b).abs();
            // `max` would drop NaN.
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
        let found = compare(&[1.0, 2.0, -3.0, 4.0], &[1.0, 2.5, 9.0, -3.0, 4.0, 9.0], [2, 3], 2);
        assert_eq!((found.largest_difference, found.largest_logit), (0.5, 4.0));
        let found = compare(&[1.0, 2.0, -3.0, 4.0], &[1.0, 2.5, 9.0, -3.0, 4.0, 9.0], [2, 3], 1);
        assert_eq!((found.largest_difference, found.largest_logit), (0.0, 3.0));
        let nan = compare(&[f32::NAN, 1.0], &[0.0, 1.0], [2, 2], 2);
        assert!(nan.largest_difference.is_nan());
    }

    #[test]
    fn ids_stay_within_the_vocabulary_and_the_positions() {
        assert!(sample_ids(7, 16).iter().all(|&id| id < 7));
        assert_eq!(sample_ids(512, 16).len(), 16);
        assert_eq!(sample_ids(512, 4096).len(), TOKENS);
    }
}
