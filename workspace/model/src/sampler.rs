//! Selects the next token from its logits: the most likely token, or a sample from their softmax,
//! over all tokens or only the most likely ones (top-k, top-p, min-p), with biases and penalties of tokens.
//!
//! With the same seed it selects, but for top-k, which candle draws in an unspecified order, the
//! same tokens as candle's `LogitsProcessor` on every processor: the same generator, and the same
//! softmax in f32, summed in the order of candle's AVX2 code.

use std::collections::{BTreeMap, BTreeSet};

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
    /// Tokens of the prompt.
    prompt: BTreeSet<u32>,
    /// How often each token was selected.
    selected: BTreeMap<u32, u32>,
}

/// How tokens are sampled; by default greedily. Biases come first, then penalties, the temperature, and the limits in
/// the order `min_p`, `top_k`, `top_p`, as in vLLM.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 selects the most likely token, the first of equal ones.
    pub temperature: f64,
    /// Samples from this many most likely tokens only.
    pub top_k: Option<usize>,
    /// Samples from the smallest set of the most likely tokens whose probabilities, among those of
    /// `top_k`, sum to at least this.
    pub top_p: Option<f64>,
    /// Samples from tokens with at least this share of the likeliest one's probability only (min-p, arXiv
    /// 2407.01082).
    pub min_p: Option<f64>,
    /// Divides the positive logits of tokens that occur in the prompt or were selected, and multiplies their
    /// negative ones (arXiv 1909.05858); above 1 it avoids them.
    pub repetition_penalty: Option<f64>,
    /// Subtracted from the logits of tokens that were selected.
    pub presence_penalty: f64,
    /// Subtracted from the logit of a token for each time that it was selected.
    pub frequency_penalty: f64,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
}

impl Sampler {
    /// Only ids below `vocab_size`, the tokenizer's, are selected: never rows that pad the
    /// vocabulary.
    pub fn new(seed: u64, sampling: Sampling, vocab_size: usize) -> Self {
        let random = StdRng::seed_from_u64(seed);
        let (prompt, selected) = (BTreeSet::new(), BTreeMap::new());
        Sampler { random, sampling, vocab_size, prompt, selected }
    }

    /// The same, after a prompt, whose tokens the repetition penalty counts.
    pub fn after(self, prompt: &[u32]) -> Self {
        Sampler { prompt: prompt.iter().copied().collect(), ..self }
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
        let token = match self.adjusted(known) {
            Some(logits) => self.choose(&logits)?,
            None => self.choose(known)?,
        };
        *self.selected.entry(token).or_default() += 1;
        Ok(token)
    }

    /// The logits with biases and penalties, if there are any.
    fn adjusted(&self, logits: &[f32]) -> Option<Vec<f32>> {
        let Sampling { repetition_penalty, presence_penalty, frequency_penalty, .. } =
            self.sampling;
        let repetition = repetition_penalty.unwrap_or(1.0) as f32;
        let is_penalised = repetition != 1.0 || presence_penalty != 0.0 || frequency_penalty != 0.0;
        if !is_penalised && self.sampling.logit_bias.is_empty() {
            return None;
        }
        let mut logits = logits.to_vec();
        for &(token, bias) in &self.sampling.logit_bias {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit += bias;
            }
        }
        if repetition != 1.0 {
            for &token in self.prompt.union(&self.selected.keys().copied().collect()) {
                if let Some(logit) = logits.get_mut(token as usize) {
                    *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
                }
            }
        }
        for (&token, &count) in &self.selected {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit -= (presence_penalty + frequency_penalty * f64::from(count)) as f32;
            }
        }
        Some(logits)
    }

    /// Selects a token by its adjusted logits.
    fn choose(&mut self, known: &[f32]) -> Result<u32, Error> {
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.sampling;
        if temperature <= 0.0 {
            return Ok(likeliest(known));
        }
        let mut probabilities = softmax(known, temperature);
        let mut sum_of_kept = 1.0;
        if let Some(share) = min_p.filter(|&share| share > 0.0) {
            sum_of_kept = keep_at_least(&mut probabilities, share as f32);
        }
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

/// Sets all probabilities to 0 except those of at least a share of the largest; returns the sum of these.
fn keep_at_least(probabilities: &mut [f32], share: f32) -> f32 {
    let least = share * probabilities.iter().copied().fold(0.0, f32::max);
    for probability in probabilities.iter_mut().filter(|probability| **probability < least) {
        *probability = 0.0;
    }
    sum(probabilities)
}

/// The logarithm of a token's probability at temperature 1, before any bias or penalty, and the most likely tokens
/// with theirs.
#[derive(Debug, Clone, PartialEq)]
pub struct LogProbabilities {
    /// The token's, in nats.
    pub of_token: f32,
    /// The most likely tokens, the first of equal ones first, with theirs.
    pub most_likely: Vec<(u32, f32)>,
}

impl LogProbabilities {
    /// Those of `token` and of the `count` most likely tokens.
    ///
    /// # Panics
    /// Panics for a token without a logit.
    pub fn new(logits: &[f32], token: u32, count: usize) -> Self {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
        let of = |token: u32| (f64::from(logits[token as usize] - largest) - sum.ln()) as f32;
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        let by_logit = |a: &u32, b: &u32| {
            logits[*b as usize].total_cmp(&logits[*a as usize]).then_with(|| a.cmp(b))
        };
        let count = count.min(order.len());
        if count < order.len() && count > 0 {
            order.select_nth_unstable_by(count - 1, by_logit);
        }
        order.truncate(count);
        order.sort_unstable_by(by_logit);
        let most_likely = order.into_iter().map(|token| (token, of(token))).collect();
        LogProbabilities { of_token: of(token), most_likely }
    }
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
        Sampling { temperature, top_k, top_p, ..Sampling::default() }
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
    fn min_p_selects_tokens_near_the_likeliest() {
        let logits = [3f32, 4.0, 1.0, 3.0, 2.0, 0.5].map(f32::ln);
        let with = |min_p, top_k, top_p| {
            let min_p = Some(min_p);
            selected(Sampling { min_p, ..ours(1.0, top_k, top_p) }, &logits)
        };
        assert_eq!(with(0.75, None, None), [0, 1, 3]);
        assert_eq!(with(0.5, None, None), [0, 1, 3, 4]);
        assert_eq!(with(0.0, None, None), [0, 1, 2, 3, 4, 5]);
        assert_eq!(with(0.75, Some(2), None), [0, 1]);
        // Of these three tokens the likeliest has 0.4, and the first of the others 0.3.
        assert_eq!(with(0.75, None, Some(0.5)), [0, 1]);
    }

    #[test]
    fn biases_and_penalties_change_the_choice() {
        let logits = [1.0, 2.0, -1.0, 1.9];
        let all = |sampling: Sampling, prompt: &[u32], count: usize| {
            let mut sampler = Sampler::new(0, sampling, 9).after(prompt);
            (0..count).map(|_| sampler.sample(&logits).unwrap()).collect::<Vec<_>>()
        };
        let default = Sampling::default;
        assert_eq!(all(default(), &[1], 3), [1, 1, 1]);
        let logit_bias = vec![(2, 4.0), (77, 9.0)];
        assert_eq!(all(Sampling { logit_bias, ..default() }, &[], 2), [2, 2]);
        // 2 / 1.5 is less than 1.9, whose own third is less than the other's.
        let repetition = |penalty| Sampling { repetition_penalty: Some(penalty), ..default() };
        assert_eq!(all(repetition(1.5), &[], 4), [1, 3, 1, 1]);
        assert_eq!(all(repetition(1.5), &[1], 2), [3, 1]);
        assert_eq!(all(repetition(1.5), &[0, 1, 2, 3], 2), [1, 1]);
        // Once for all selections, and for each of them.
        let presence = Sampling { presence_penalty: 0.5, ..default() };
        assert_eq!(all(presence, &[1], 4), [1, 3, 1, 1]);
        let frequency = Sampling { frequency_penalty: 0.5, ..default() };
        assert_eq!(all(frequency, &[1], 6), [1, 3, 1, 3, 0, 1]);
    }

    #[test]
    fn log_probabilities_are_those_of_the_softmax() {
        let logits = [1f32, 2.0, 4.0, 2.0, 1.0].map(f32::ln);
        let found = LogProbabilities::new(&logits, 0, 3);
        assert!((found.of_token - 0.1f32.ln()).abs() < 1e-6);
        let expected = [(2, 0.4f32), (1, 0.2), (3, 0.2)];
        assert_eq!(found.most_likely.len(), 3);
        for ((token, found), (expected, probability)) in found.most_likely.iter().zip(expected) {
            assert!(*token == expected && (found - probability.ln()).abs() < 1e-6);
        }
        assert_eq!(LogProbabilities::new(&logits, 1, 0).most_likely, []);
        assert_eq!(LogProbabilities::new(&logits, 1, 9).most_likely.len(), 5);
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
