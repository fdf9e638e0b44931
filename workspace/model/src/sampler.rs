//! Selects the next token from its logits: the most likely token, or a sample from their softmax. The sample is over
//! all tokens or only the most likely tokens (top-k, top-p, min-p), with biases and penalties of tokens.
//!
//! A sampler stores the tokens so far and the random numbers. A device chooses the token ([`moh_kernels::sampling`]).
//! On the CPU without top-k, the token is the choice of candle's `LogitsProcessor` with the same seed.

use std::collections::{BTreeMap, BTreeSet};

use moh_kernels::Cpu;
use moh_kernels::sampling::{
    LogitChange, RowRequest, RowSampling, RowToken, Sample as _, SampleArgs,
};
use rand::rngs::StdRng;
use rand::{RngCore as _, SeedableRng as _};

use crate::{Error, Result};

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
    prompt: BTreeSet<u32>,
    /// The number of times that each token was selected.
    selected: BTreeMap<u32, u32>,
}

/// The settings of a sampler; greedy by default. Biases apply first, then penalties, the temperature, and the limits in
/// the order `min_p`, `top_k`, `top_p`, as in vLLM.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 selects the most likely token, the first of equally likely tokens.
    pub temperature: f64,
    /// Samples only from this many most likely tokens.
    pub top_k: Option<usize>,
    /// Samples from the smallest set of the most likely tokens with a total probability of at least this share. Only
    /// the tokens of `top_k` count.
    pub top_p: Option<f64>,
    /// Samples only from tokens with at least this share of the likeliest token's probability (min-p, arXiv
    /// 2407.01082).
    pub min_p: Option<f64>,
    /// Divides the positive logits of tokens that occur in the prompt or were selected, and multiplies their negative
    /// logits (arXiv 1909.05858). A penalty above 1 avoids these tokens.
    pub repetition_penalty: Option<f64>,
    /// Subtracted from the logits of tokens that were selected.
    pub presence_penalty: f64,
    /// Subtracted from a token's logit for each time that the token was selected.
    pub frequency_penalty: f64,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
}

impl Sampler {
    /// Creates a sampler that selects only ids below `vocab_size`, the tokenizer's number of ids, and so never rows
    /// that pad the vocabulary.
    pub fn new(seed: u64, sampling: Sampling, vocab_size: usize) -> Self {
        let random = StdRng::seed_from_u64(seed);
        let (prompt, selected) = (BTreeSet::new(), BTreeMap::new());
        Sampler { random, sampling, vocab_size, prompt, selected }
    }

    /// Sets the prompt; the repetition penalty counts its tokens.
    pub fn after(self, prompt: &[u32]) -> Self {
        Sampler { prompt: prompt.iter().copied().collect(), ..self }
    }

    /// Returns the tokenizer's number of ids.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Selects the next token.
    ///
    /// # Errors
    /// Fails without logits, and if a logit is NaN or infinite, except -infinity.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32> {
        let known = logits.len().min(self.vocab_size);
        if known == 0 {
            return Err(Error::no_token("there are none"));
        }
        let rows = [RowRequest { token: self.next_token(), log_probabilities: None }];
        let args = SampleArgs::<Cpu, f32> { vocabulary: logits.len(), known, logits, rows: &rows };
        let chosen = Cpu.sample(args)?.pop().flatten().ok_or_else(Error::not_finite)?;
        self.select(chosen.token);
        Ok(chosen.token)
    }

    /// Returns the choice of the next token for a device. The caller passes the chosen token to [`Self::select`].
    pub fn next_token(&mut self) -> RowToken {
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.sampling;
        let is_random = temperature > 0.0;
        RowToken::Sampled(RowSampling {
            temperature,
            min_p: min_p.unwrap_or(0.0),
            top_k: top_k.unwrap_or(0),
            top_p: top_p.filter(|&p| p > 0.0).unwrap_or(1.0),
            random: if is_random { unit(self.random.next_u32()) } else { 0.0 },
            changes: self.changes(),
        })
    }

    /// Records the next token.
    pub fn select(&mut self, token: u32) {
        *self.selected.entry(token).or_default() += 1;
    }

    /// Returns the biases and penalties of tokens.
    fn changes(&self) -> Vec<LogitChange> {
        let Sampling { repetition_penalty, presence_penalty, frequency_penalty, .. } =
            self.sampling;
        let repetition = repetition_penalty.unwrap_or(1.0) as f32;
        let mut changes = BTreeMap::new();
        let of = |token: u32| (token, LogitChange::none(token));
        changes.extend(self.sampling.logit_bias.iter().map(|&(token, _)| of(token)));
        if repetition != 1.0 {
            changes.extend(self.prompt.iter().copied().map(of));
        }
        if repetition != 1.0 || presence_penalty != 0.0 || frequency_penalty != 0.0 {
            changes.extend(self.selected.keys().copied().map(of));
        }
        for &(token, bias) in &self.sampling.logit_bias {
            changes.entry(token).and_modify(|change| change.bias += bias);
        }
        for (token, change) in &mut changes {
            let count = self.selected.get(token).copied().unwrap_or(0);
            if count > 0 {
                change.penalty = (presence_penalty + frequency_penalty * f64::from(count)) as f32;
            }
            if count > 0 || self.prompt.contains(token) {
                change.repetition = repetition;
            }
        }
        changes.into_values().collect()
    }
}

/// Returns a number in [0, 1) of 23 random bits, as `rand` does.
fn unit(bits: u32) -> f32 {
    (bits >> 9) as f32 / (1u32 << 23) as f32
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};
    use candle_transformers::generation::{LogitsProcessor, Sampling as Theirs};

    use super::*;

    /// Returns spread logits, some of them equal.
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
                        let (found, expected) = (ours.sample(&logits), theirs.sample(&tensor));
                        assert_eq!(found.unwrap(), expected.unwrap(), "{temperature} {top_p:?}");
                    }
                }
            }
        }
    }

    fn ours(temperature: f64, top_k: Option<usize>, top_p: Option<f64>) -> Sampling {
        Sampling { temperature, top_k, top_p, ..Sampling::default() }
    }

    /// Returns the tokens that 2000 samples select, in ascending order.
    fn selected(sampling: Sampling, logits: &[f32]) -> Vec<u32> {
        let mut sampler = Sampler::new(3, sampling, usize::MAX);
        let found = (0..2000).map(|_| sampler.sample(logits).unwrap());
        found.collect::<BTreeSet<u32>>().into_iter().collect()
    }

    #[test]
    fn top_k_selects_among_the_most_likely_tokens() {
        // Probabilities of 3/16, 4/16, 1/16, 3/16, 4/16, 1/16.
        let logits = [3f32, 4.0, 1.0, 3.0, 4.0, 1.0].map(f32::ln);
        let with = |top_k, top_p| selected(ours(1.0, top_k, top_p), &logits);
        assert_eq!(with(Some(2), None), [1, 4]);
        // The first of equal tokens.
        assert_eq!(with(Some(1), None), [1]);
        assert_eq!(with(Some(3), None), [0, 1, 4]);
        assert_eq!(with(Some(6), None), [0, 1, 2, 3, 4, 5]);
        assert_eq!(with(Some(0), None), [0, 1, 2, 3, 4, 5], "0 disables it, as in transformers");
        // Tokens 1 and 4 have half of the probability, and 8/11 of the probability of the first three tokens.
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
        // Of the probability of these three tokens the likeliest has 0.4, and the next 0.3.
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
        // 2 / 1.5 is less than 1.9, and 1.9 / 1.5 is less than 2 / 1.5.
        let repetition = |penalty| Sampling { repetition_penalty: Some(penalty), ..default() };
        assert_eq!(all(repetition(1.5), &[], 4), [1, 3, 1, 1]);
        assert_eq!(all(repetition(1.5), &[1], 2), [3, 1]);
        assert_eq!(all(repetition(1.5), &[0, 1, 2, 3], 2), [1, 1]);
        // The presence penalty counts once for all selections, the frequency penalty once for each.
        let presence = Sampling { presence_penalty: 0.5, ..default() };
        assert_eq!(all(presence, &[1], 4), [1, 3, 1, 1]);
        let frequency = Sampling { frequency_penalty: 0.5, ..default() };
        assert_eq!(all(frequency, &[1], 6), [1, 3, 1, 3, 0, 1]);
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
        let error = Sampler::new(0, ours(1.0, None, None), 9).sample(&[f32::NAN, 1.0]).unwrap_err();
        let expected = "no token can be sampled from these logits: one is not finite";
        assert_eq!(error.to_string(), expected);
        assert!(Sampler::new(0, Sampling::default(), 9).sample(&[]).is_err());
    }
}
