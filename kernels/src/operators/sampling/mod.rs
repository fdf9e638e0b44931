//! The choice of a token by its logits, and the logarithms of probabilities, row by row.
//!
//! Changes of single logits come first, then the temperature, then the limits in the order `min_p`, `top_k`, `top_p`, as in
//! vLLM: of the tokens in the order of their logits, equal ones in that of their ids, each limit keeps the first ones. The
//! chosen token is the first by id up to which the kept probabilities add up to more than `random` of their sum.

mod cpu;
#[cfg(gpu)]
mod cuda;

use crate::{Element, Memory, Result, View, check_ids, check_len, ensure};

/// How the token of a row of logits is chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct RowSampling {
    /// Divides the logits; 0 chooses the largest one, the first of equal ones.
    pub temperature: f64,
    /// Keeps tokens with at least this share of the likeliest one's probability (min-p, arXiv 2407.01082); 0 keeps all.
    pub min_p: f64,
    /// Keeps so many of the likeliest tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the fewest of the likeliest tokens whose probabilities, among those that are kept so far, add up to this; 1
    /// keeps all.
    pub top_p: f64,
    /// From the uniform distribution over [0, 1).
    pub random: f32,
    /// Changes of logits, at most one of a token; those of tokens that cannot be chosen have no effect.
    pub changes: Vec<LogitChange>,
}

impl RowSampling {
    /// Returns the factor of the logits, 0 for the likeliest token alone.
    fn inverse_temperature(&self) -> f32 {
        if self.temperature > 0.0 { (1.0 / self.temperature) as f32 } else { 0.0 }
    }
}

/// A change of a token's logit: `bias` is added, then a positive logit is divided by `repetition` and another one
/// multiplied, then `penalty` is subtracted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitChange {
    /// Whose logit.
    pub token: u32,
    /// Added.
    pub bias: f32,
    /// The repetition penalty (arXiv 1909.05858); 1 changes nothing.
    pub repetition: f32,
    /// Subtracted.
    pub penalty: f32,
}

impl LogitChange {
    /// Creates a change of nothing.
    pub const fn none(token: u32) -> Self {
        LogitChange { token, bias: 0.0, repetition: 1.0, penalty: 0.0 }
    }

    fn apply(&self, logit: f32) -> f32 {
        let biased = logit + self.bias;
        let repeated =
            if biased > 0.0 { biased / self.repetition } else { biased * self.repetition };
        repeated - self.penalty
    }
}

/// The token of a row.
#[derive(Debug, Clone, PartialEq)]
pub enum RowToken {
    /// It is known.
    Given(u32),
    /// It is chosen by the logits.
    Sampled(RowSampling),
}

/// What is computed of a row of logits.
#[derive(Debug, Clone, PartialEq)]
pub struct RowRequest {
    /// The token.
    pub token: RowToken,
    /// Of so many likeliest tokens, and of the token itself, the logarithms of the probabilities are wanted.
    pub log_probabilities: Option<usize>,
}

/// What was computed of a row of logits.
#[derive(Debug, Clone, PartialEq)]
pub struct RowChoice {
    /// The token.
    pub token: u32,
    /// Those that were wanted.
    pub log_probabilities: Option<LogProbabilities>,
}

/// The logarithm of a token's probability by the logits as they are, without changes or a temperature, and the most likely
/// tokens with theirs. The CPU computes them in f64, GPUs in f32.
#[derive(Debug, Clone, PartialEq)]
pub struct LogProbabilities {
    /// The token's, in nats.
    pub of_token: f64,
    /// The most likely tokens, the first of equal ones first, with theirs.
    pub most_likely: Vec<(u32, f64)>,
}

/// Arguments of [`Sample::sample`].
pub struct SampleArgs<'a, M: Memory, T: Element> {
    /// Logits of a row, V.
    pub vocabulary: usize,
    /// Only tokens below this are chosen: the others pad the vocabulary.
    pub known: usize,
    /// `[R, V]`.
    pub logits: View<'a, M, T>,
    /// `[R]`.
    pub rows: &'a [RowRequest],
}

/// The choice of tokens as an operator of a device.
pub trait Sample: Memory {
    /// Chooses the token of each row; `None` where a logit is not a number or infinite, but for -infinity.
    ///
    /// Rows do not depend on each other. Devices add probabilities in different orders: they may choose different tokens
    /// where `random` is within rounding of the border of two.
    fn sample<T: Element>(&self, args: SampleArgs<'_, Self, T>) -> Result<Vec<Option<RowChoice>>>;
}

/// Checks the lengths, and that the tokens of rows are of the vocabulary.
fn check(vocabulary: usize, known: usize, logits: usize, rows: &[RowRequest]) -> Result<()> {
    const NAME: &str = "sample";
    ensure(NAME, (1..=vocabulary).contains(&known), || {
        format!("{known} of {vocabulary} tokens can be chosen")
    })?;
    check_len(NAME, "logits", logits, rows.len() * vocabulary)?;
    let given = rows.iter().filter_map(|row| match row.token {
        RowToken::Given(id) => Some(id),
        RowToken::Sampled(_) => None,
    });
    check_ids(given, vocabulary)
}
