//! The choice of tokens on the CPU: one task per row.
//!
//! With the same random numbers it chooses the same tokens as candle's `LogitsProcessor`, on every processor: the
//! softmax in f32 has the order of candle's AVX2 code. The exception is top-k, which candle draws in an unspecified
//! order.

use std::borrow::Cow;
use std::cmp::Ordering;

use rayon::prelude::*;

use super::{
    LogProbabilities, RowChoice, RowRequest, RowSampling, RowToken, Sample, SampleArgs, check,
};
use crate::compiled::compiled;
use crate::math::largest;
use crate::{Cpu, Element, Result};

impl Sample for Cpu {
    fn sample<T: Element>(&self, args: SampleArgs<'_, Self, T>) -> Result<Vec<Option<RowChoice>>> {
        compiled!(choose_all::<T>(args: SampleArgs<'_, Cpu, T>) -> Result<Vec<Option<RowChoice>>>)
    }
}

fn choose_all<T: Element>(args: SampleArgs<'_, Cpu, T>) -> Result<Vec<Option<RowChoice>>> {
    let SampleArgs { vocabulary, known, logits, rows } = args;
    check(vocabulary, known, logits.len(), rows)?;
    let logits = logits.par_chunks_exact(vocabulary);
    Ok(logits.zip(rows).map(|(logits, row)| choose(logits, known, row)).collect())
}

fn choose<T: Element>(logits: &[T], known: usize, row: &RowRequest) -> Option<RowChoice> {
    let logits: Vec<f32> = logits.iter().map(|logit| logit.to_f32()).collect();
    // Without an early return the loop is vectorised.
    if !logits.iter().fold(true, |all_below, logit| all_below & (*logit < f32::INFINITY)) {
        return None;
    }
    let token = match &row.token {
        RowToken::Given(id) => *id,
        RowToken::Sampled(sampling) => sample(&changed(&logits[..known], sampling), sampling)?,
    };
    let log_probabilities =
        row.log_probabilities.map(|count| LogProbabilities::new(&logits, token, count));
    Some(RowChoice { token, log_probabilities })
}

fn changed<'a>(logits: &'a [f32], sampling: &RowSampling) -> Cow<'a, [f32]> {
    let mut logits = Cow::Borrowed(logits);
    for change in &sampling.changes {
        if (change.token as usize) < logits.len() {
            let logit = &mut logits.to_mut()[change.token as usize];
            *logit = change.apply(*logit);
        }
    }
    logits
}

/// Chooses a token; `None` if no probability is a number.
fn sample(logits: &[f32], sampling: &RowSampling) -> Option<u32> {
    let RowSampling { min_p, top_k, top_p, random, .. } = *sampling;
    let scale = sampling.inverse_temperature();
    if scale == 0.0 {
        return Some(likeliest(logits));
    }
    let mut probabilities = softmax(logits, scale);
    let mut sum_of_kept = 1.0;
    if min_p > 0.0 {
        sum_of_kept = keep_at_least(&mut probabilities, min_p as f32);
    }
    if top_k > 0 && top_k < logits.len() {
        let most_likely = first(&probabilities, top_k);
        sum_of_kept = keep(&mut probabilities, &most_likely);
    }
    if top_p < 1.0 {
        clear_unlikely(&mut probabilities, top_p as f32 * sum_of_kept);
    }
    draw(&probabilities, random)
}

/// Returns the first token at which the sum of the probabilities exceeds `random` of their total.
fn draw(probabilities: &[f32], random: f32) -> Option<u32> {
    let mut sum = 0f32;
    let sums: Vec<f32> = (probabilities.iter())
        .map(|probability| {
            sum += probability;
            sum
        })
        .collect();
    let wanted = random * sum;
    let found = sums.partition_point(|&sum| sum <= wanted);
    // The index is below the vocabulary's size, which fits u32. Without any probability no token is found.
    (sum > 0.0 && found < sums.len()).then_some(found as u32)
}

/// Returns the index of the largest logit; among equal logits, the first.
fn likeliest(logits: &[f32]) -> u32 {
    let largest = largest(logits);
    logits.iter().position(|logit| *logit == largest).unwrap_or(0) as u32
}

/// Returns the softmax of the logits times `scale`.
fn softmax(logits: &[f32], scale: f32) -> Vec<f32> {
    let mut values: Vec<f32> = logits.iter().map(|logit| logit * scale).collect();
    let largest = largest(&values);
    values.iter_mut().for_each(|value| *value = (*value - largest).exp());
    let total = sum(&values);
    values.iter_mut().for_each(|value| *value /= total);
    values
}

/// Returns the sum in 32 columns, added pairwise, plus the remaining values one by one.
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

/// Sets all probabilities to 0 except the probabilities of some tokens; returns their sum, in the tokens' order.
fn keep(probabilities: &mut [f32], tokens: &[u32]) -> f32 {
    let kept: Vec<f32> = tokens.iter().map(|&token| probabilities[token as usize]).collect();
    probabilities.fill(0.0);
    for (&token, &probability) in tokens.iter().zip(&kept) {
        probabilities[token as usize] = probability;
    }
    kept.iter().sum()
}

/// Sets probabilities below a share of the largest probability to 0; returns the sum of the remaining probabilities.
fn keep_at_least(probabilities: &mut [f32], share: f32) -> f32 {
    let least = share * probabilities.iter().copied().fold(0.0, f32::max);
    for probability in probabilities.iter_mut().filter(|probability| **probability < least) {
        *probability = 0.0;
    }
    sum(probabilities)
}

/// Sets all probabilities to 0 except the largest probabilities that sum to at least `p`.
fn clear_unlikely(probabilities: &mut [f32], p: f32) {
    // A few tokens are enough for most distributions, and are faster to sort.
    let mut count = 64;
    loop {
        let mut order = first(probabilities, count.min(probabilities.len()));
        let mut reached = 0.0;
        let enough = order.iter().position(|&token| {
            let is_enough = reached >= p;
            reached += probabilities[token as usize];
            is_enough
        });
        if enough.is_some() || count >= probabilities.len() {
            order.truncate(enough.map_or(order.len(), |count| count.max(1)));
            keep(probabilities, &order);
            return;
        }
        count *= 16;
    }
}

impl LogProbabilities {
    /// Computes the logarithms for `token` and for the `count` most likely tokens.
    ///
    /// # Panics
    /// Panics for a token without a logit.
    pub fn new(logits: &[f32], token: u32, count: usize) -> Self {
        let largest = largest(logits);
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
        let of = |token: u32| f64::from(logits[token as usize] - largest) - sum.ln();
        let first = first(logits, count.min(logits.len()));
        let most_likely = first.into_iter().map(|token| (token, of(token))).collect();
        LogProbabilities { of_token: of(token), most_likely }
    }
}

/// Returns the `count` tokens with the largest logits, the largest first. Equal logits keep their order.
fn first(logits: &[f32], count: usize) -> Vec<u32> {
    let by_logit = |a: &u32, b: &u32| -> Ordering {
        logits[*b as usize].total_cmp(&logits[*a as usize]).then_with(|| a.cmp(b))
    };
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    if count < order.len() && count > 0 {
        order.select_nth_unstable_by(count - 1, by_logit);
    }
    order.truncate(count);
    order.sort_unstable_by(by_logit);
    order
}
