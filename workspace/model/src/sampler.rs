//! Selects the next token from its logits: the most likely token, or a sample from their softmax,
//! over all tokens or only the most likely ones (top-k, top-p).
//!
//! With the same seed it selects, but for top-k, which candle draws in an unspecified order, the
//! same tokens as candle's `LogitsProcessor` on every processor: the same generator, and the same
//! softmax in f32, summed in the order of candle's AVX2 code.

use rand::SeedableRng as _;
use rand::distr::Distribution as _;
use rand::distr::weighted::WeightedIndex;
use rand::rngs::StdRng;

use crate::Error;

/// Selects tokens from logits.
///
/// ```
/// use moh_model::{Sampler, Sampling};
///
/// let logits = [0.5, 3.0, 2.0, 9.0];
/// // The last row pads the vocabulary: the tokenizer has three ids.
/// let mut greedy = Sampler::new(1, Sampling::default(), 3);
/// assert_eq!(greedy.sample(&logits)?, 1);
///
/// let sampling = Sampling { temperature: 0.8, top_k: Some(2), ..Sampling::default() };
/// let mut sampler = Sampler::new(1, sampling, 3);
/// assert_ne!(sampler.sample(&logits)?, 0);
/// # Ok::<_, moh_model::Error>(())
/// ```
pub struct Sampler {
    random: StdRng,
    sampling: Sampling,
    vocab_size: usize,
}

/// How tokens are sampled; by default greedily.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sampling {
    /// Divides the logits; 0 selects the most likely token, the first of equal ones.
    pub temperature: f64,
    /// Samples from this many most likely tokens only.
    pub top_k: Option<usize>,
    /// Samples from the smallest set of the most likely tokens whose probabilities, among those of
    /// `top_k`, sum to at least this.
    pub top_p: Option<f64>,
}

impl Sampler {
    /// Only ids below `vocab_size`, the tokenizer's, are selected: never rows that pad the
    /// vocabulary.
    pub fn new(seed: u64, sampling: Sampling, vocab_size: usize) -> Self {
        Sampler { random: StdRng::seed_from_u64(seed), sampling, vocab_size }
    }

    /// Selects the next token.
    ///
    /// # Errors
    /// Fails if the logits are not finite.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, Error> {
        let known = &logits[..logits.len().min(self.vocab_size)];
        if known.is_empty() {
            return Err(Error::Sampling { reason: "there are none".to_owned() });
        }
        let Sampling { temperature, top_k, top_p } = self.sampling;
        if temperature <= 0.0 {
            return Ok(likeliest(known));
        }
        let mut probabilities = softmax(known, temperature);
        let mut sum_of_kept = 1.0;
        if let Some(k) = top_k.filter(|&k| k > 0 && k < known.len()) {
            sum_of_kept = keep_most_likely(&mut probabilities, k);
        }
        if let Some(p) = top_p.filter(|&p| p > 0.0 && p < 1.0) {
            clear_unlikely(&mut probabilities, p as f32 * sum_of_kept);
        }
        self.draw(&probabilities)
    }

    /// Samples a token by its probability.
    fn draw(&mut self, probabilities: &[f32]) -> Result<u32, Error> {
        let tokens = WeightedIndex::new(probabilities)
            .map_err(|source| Error::Sampling { reason: source.to_string() })?;
        // An index below the vocabulary's size, which fits.
        Ok(tokens.sample(&mut self.random) as u32)
    }
}

/// Index of the largest logit; the first of equal ones.
fn likeliest(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (index, logit) in logits.iter().enumerate() {
        if logits[best] < *logit {
            best = index;
        }
    }
    best as u32
}

/// Probabilities at a temperature above 0.
fn softmax(logits: &[f32], temperature: f64) -> Vec<f32> {
    let scale = (1.0 / temperature) as f32;
    let mut values: Vec<f32> = logits.iter().map(|logit| logit * scale).collect();
    let largest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    values.iter_mut().for_each(|value| *value = (*value - largest).exp());
    let total = sum(&values);
    values.iter_mut().for_each(|value| *value /= total);
    values
}

/// The sum in 32 columns, added pairwise, plus the remaining values one by one.
fn sum(values: &[f32]) -> f32 {
    let (rows, rest) = values.as_chunks::<32>();
    let mut columns = [0f32; 32];
    for row in rows {
        for (column, value) in columns.iter_mut().zip(row) {
            *column += value;
        }
    }
    let lane = |i: usize| (columns[i] + columns[8 + i]) + (columns[16 + i] + columns[24 + i]);
    let quarter = |i: usize| lane(i) + lane(4 + i);
    let whole = (quarter(0) + quarter(1)) + (quarter(2) + quarter(3));
    rest.iter().fold(whole, |total, value| total + value)
}

/// The indices of probabilities, the largest first, equal ones in their order.
fn by_probability(probabilities: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..probabilities.len()).collect();
    order.sort_by(|&i, &j| probabilities[j].total_cmp(&probabilities[i]));
    order
}

/// Sets all probabilities to 0 except the `k` largest; returns the sum of these.
fn keep_most_likely(probabilities: &mut [f32], k: usize) -> f32 {
    let order = by_probability(probabilities);
    order[k..].iter().for_each(|&index| probabilities[index] = 0.0);
    order[..k].iter().map(|&index| probabilities[index]).sum()
}

/// Sets all probabilities to 0 except the largest ones that sum to at least `p`.
fn clear_unlikely(probabilities: &mut [f32], p: f32) {
    let order = by_probability(probabilities);
    let mut reached = 0.0;
    for index in order {
        if reached >= p {
            probabilities[index] = 0.0;
        } else {
            reached += probabilities[index];
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};
    use candle_transformers::generation::{LogitsProcessor, Sampling as Theirs};

    use super::*;

    /// Logits that spread, with equal ones among them.
    fn logits(count: usize, step: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 7919 + step * 104_729) % 257) as f32 / 31.0 - 4.0).collect()
    }

    #[test]
    fn the_choices_are_those_of_candles_sampler() {
        for seed in [0, 1, 42] {
            for (temperature, top_p) in [
                (0.0, None),
                (0.0, Some(0.9)),
                (0.8, None),
                (1.0, Some(0.9)),
                (1.7, Some(0.3)),
                (0.3, Some(1.0)),
            ] {
                let sampling = match top_p {
                    _ if temperature == 0.0 => Theirs::ArgMax,
                    None => Theirs::All { temperature },
                    Some(p) => Theirs::TopP { p, temperature },
                };
                for count in [1, 31, 512, 1003] {
                    let mut ours = Sampler::new(seed, ours(temperature, None, top_p), usize::MAX);
                    let mut theirs = LogitsProcessor::from_sampling(seed, sampling.clone());
                    for step in 0..50 {
                        let logits = logits(count, step);
                        let tensor = Tensor::from_slice(&logits, count, &Device::Cpu).unwrap();
                        let expected = theirs.sample(&tensor).unwrap();
                        assert_eq!(
                            ours.sample(&logits).unwrap(),
                            expected,
                            "{temperature} {top_p:?}"
                        );
                    }
                }
            }
        }
    }

    fn ours(temperature: f64, top_k: Option<usize>, top_p: Option<f64>) -> Sampling {
        Sampling { temperature, top_k, top_p }
    }

    /// The tokens that 2000 samples select, in ascending order.
    fn selected(sampling: Sampling, logits: &[f32]) -> Vec<u32> {
        let mut sampler = Sampler::new(3, sampling, usize::MAX);
        let found: std::collections::BTreeSet<u32> =
            (0..2000).map(|_| sampler.sample(logits).unwrap()).collect();
        found.into_iter().collect()
    }

    #[test]
    fn top_k_selects_among_the_most_likely_tokens() {
        // Probabilities of 3/16, 4/16, 1/16, 3/16, 4/16, 1/16.
        let logits = [3f32, 4.0, 1.0, 3.0, 4.0, 1.0].map(f32::ln);
        let with = |top_k, top_p| selected(ours(1.0, top_k, top_p), &logits);
        assert_eq!(with(Some(2), None), [1, 4]);
        // Of equal tokens the first.
        assert_eq!(with(Some(1), None), [1]);
        assert_eq!(with(Some(3), None), [0, 1, 4]);
        assert_eq!(with(Some(6), None), [0, 1, 2, 3, 4, 5]);
        assert_eq!(with(Some(0), None), [0, 1, 2, 3, 4, 5], "0 disables it, as in transformers");
        // Of all tokens 1 and 4 are half, and 0 more; of the first three they are 8/11.
        assert_eq!(with(None, Some(0.6)), [0, 1, 4]);
        assert_eq!(with(Some(3), Some(0.6)), [1, 4]);
        assert_eq!(with(Some(3), Some(0.8)), [0, 1, 4]);
        assert_eq!(selected(ours(0.0, Some(3), None), &logits), [1]);
    }

    #[test]
    fn rows_that_pad_the_vocabulary_are_never_chosen() {
        let logits = [0.0, 1.0, 9.0, 9.0];
        assert_eq!(Sampler::new(0, Sampling::default(), 2).sample(&logits).unwrap(), 1);
        let mut sampler = Sampler::new(0, ours(5.0, None, None), 2);
        assert!((0..100).all(|_| sampler.sample(&logits).unwrap() < 2));
    }

    #[test]
    fn logits_that_are_no_numbers_are_refused() {
        let message = Sampler::new(0, ours(1.0, None, None), 9)
            .sample(&[f32::NAN, 1.0])
            .unwrap_err()
            .to_string();
        assert!(message.starts_with("no token can be sampled from these logits: "), "{message}");
        assert!(Sampler::new(0, Sampling::default(), 9).sample(&[]).is_err());
    }
}
