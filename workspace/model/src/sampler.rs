//! Selects the next token from its logits: the most likely token, or a sample from their softmax,
//! over all tokens or only the most likely ones (top-p).
//!
//! With the same seed it selects the same tokens as candle's `LogitsProcessor` on every processor:
//! the same generator, and the same softmax in f32, summed in the order of candle's AVX2 code.

use rand::SeedableRng as _;
use rand::distr::Distribution as _;
use rand::distr::weighted::WeightedIndex;
use rand::rngs::StdRng;

use crate::Error;

/// Selects tokens from logits.
pub struct Sampler {
    random: StdRng,
    sampling: Sampling,
    vocab_size: usize,
}

/// The sampling strategy.
#[derive(Debug, Clone, Copy)]
enum Sampling {
    /// The most likely token; the first of equal ones.
    Greedy,
    /// All tokens, with their probabilities at this temperature.
    All { temperature: f64 },
    /// The smallest set of the most likely tokens whose probabilities sum to at least `p`.
    TopP { p: f32, temperature: f64 },
}

impl Sampler {
    /// Greedy if `temperature` is 0; otherwise samples, with `top_p` from the smallest set of
    /// tokens whose probabilities sum to at least `top_p`. Only ids below `vocab_size`, the
    /// tokenizer's, are selected: never rows that pad the vocabulary.
    pub fn new(seed: u64, temperature: f64, top_p: Option<f64>, vocab_size: usize) -> Self {
        let sampling = match top_p {
            _ if temperature <= 0.0 => Sampling::Greedy,
            Some(p) if p > 0.0 && p < 1.0 => Sampling::TopP { p: p as f32, temperature },
            _ => Sampling::All { temperature },
        };
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
        match self.sampling {
            Sampling::Greedy => Ok(likeliest(known)),
            Sampling::All { temperature } => self.draw(&softmax(known, temperature)),
            Sampling::TopP { p, temperature } => {
                let mut probabilities = softmax(known, temperature);
                clear_unlikely(&mut probabilities, p);
                self.draw(&probabilities)
            }
        }
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

/// Sets all probabilities to 0 except the largest ones that sum to at least `p`.
fn clear_unlikely(probabilities: &mut [f32], p: f32) {
    let mut order: Vec<usize> = (0..probabilities.len()).collect();
    order.sort_by(|&i, &j| probabilities[j].total_cmp(&probabilities[i]));
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
                    let mut ours = Sampler::new(seed, temperature, top_p, usize::MAX);
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

    #[test]
    fn rows_that_pad_the_vocabulary_are_never_chosen() {
        let logits = [0.0, 1.0, 9.0, 9.0];
        assert_eq!(Sampler::new(0, 0.0, None, 2).sample(&logits).unwrap(), 1);
        let mut sampler = Sampler::new(0, 5.0, None, 2);
        assert!((0..100).all(|_| sampler.sample(&logits).unwrap() < 2));
    }

    #[test]
    fn logits_that_are_no_numbers_are_refused() {
        let message =
            Sampler::new(0, 1.0, None, 9).sample(&[f32::NAN, 1.0]).unwrap_err().to_string();
        assert!(message.starts_with("no token can be sampled from these logits: "), "{message}");
        assert!(Sampler::new(0, 0.0, None, 9).sample(&[]).is_err());
    }
}
