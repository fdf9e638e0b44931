//! The choice of a token by its logits, and the logarithms of probabilities, row by row.
//!
//! Changes of single logits come first, then the temperature, then the limits in the order `min_p`, `top_k`, `top_p`,
//! as in vLLM. Each limit keeps the first tokens in the order of their logits. Equal logits are in the order of their
//! ids. The chosen token is the first by id at which the sum of the kept probabilities exceeds `random` of their
//! total.

mod cpu;
#[cfg(gpu)]
mod cuda;

use crate::{Element, Memory, Result, View, check_ids, check_len, ensure};

/// How the token of a row of logits is chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct RowSampling {
    /// Divides the logits; 0 chooses the largest logit, the first among equal logits.
    pub temperature: f64,
    /// Keeps tokens with at least this share of the likeliest token's probability (min-p, arXiv 2407.01082); 0 keeps
    /// all.
    pub min_p: f64,
    /// Keeps this number of the likeliest tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the fewest of the likeliest tokens that add up to this share of the probabilities kept so far; 1
    /// keeps all.
    pub top_p: f64,
    /// From the uniform distribution over [0, 1).
    pub random: f32,
    /// Changes of logits, at most one per token. Changes of tokens that cannot be chosen have no effect.
    pub changes: Vec<LogitChange>,
}

impl RowSampling {
    /// Returns the factor of the logits, 0 to choose the likeliest token.
    fn inverse_temperature(&self) -> f32 {
        if self.temperature > 0.0 { (1.0 / self.temperature) as f32 } else { 0.0 }
    }
}

/// A change of a token's logit: `bias` is added, then a positive logit is divided by `repetition` and any other logit
/// is multiplied by it, then `penalty` is subtracted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitChange {
    /// The token of the changed logit.
    pub token: u32,
    /// Added.
    pub bias: f32,
    /// The repetition penalty (arXiv 1909.05858); 1 changes nothing.
    pub repetition: f32,
    /// Subtracted.
    pub penalty: f32,
}

impl LogitChange {
    /// Creates a change without an effect.
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
    /// The token is known.
    Given(u32),
    /// The token is chosen by the logits.
    Sampled(RowSampling),
}

/// A request for a row of logits.
#[derive(Debug, Clone, PartialEq)]
pub struct RowRequest {
    /// The token.
    pub token: RowToken,
    /// If set, also returns the logarithms of the probabilities of the token and of this number of likeliest tokens.
    pub log_probabilities: Option<usize>,
}

/// The result for a row of logits.
#[derive(Debug, Clone, PartialEq)]
pub struct RowChoice {
    /// The token.
    pub token: u32,
    /// The requested logarithms.
    pub log_probabilities: Option<LogProbabilities>,
}

/// Logarithms of the probabilities of a token and of the most likely tokens, by the original logits, without changes
/// or a temperature. The CPU computes them in f64, GPUs in f32.
#[derive(Debug, Clone, PartialEq)]
pub struct LogProbabilities {
    /// The token's logarithm, in nats.
    pub of_token: f64,
    /// The most likely tokens with their logarithms; among equal probabilities, lower tokens first.
    pub most_likely: Vec<(u32, f64)>,
}

/// Arguments of [`Sample::sample`].
pub struct SampleArgs<'a, M: Memory, T: Element> {
    /// Logits of a row, V.
    pub vocabulary: usize,
    /// Only tokens below this are chosen: the remaining logits pad the vocabulary.
    pub known: usize,
    /// `[R, V]`.
    pub logits: View<'a, M, T>,
    /// `[R]`.
    pub rows: &'a [RowRequest],
}

/// The choice of tokens as an operator of a device.
pub trait Sample: Memory {
    /// Chooses the token of each row; `None` if a logit is not a number or is infinity (-infinity is valid).
    ///
    /// Rows do not depend on each other. Devices add probabilities in different orders. If `random` is within
    /// rounding of the border of two tokens, devices may choose different tokens.
    fn sample<T: Element>(&self, args: SampleArgs<'_, Self, T>) -> Result<Vec<Option<RowChoice>>>;
}

/// Checks the lengths, and that the tokens of rows are in the vocabulary.
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
