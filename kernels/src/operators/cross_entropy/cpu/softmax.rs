//! The softmax of a chunk's logits, block by block of the vocabulary.

use std::ops::Range;

use rayon::prelude::*;

use crate::cross_entropy::{HeadRanks, IGNORED};
use crate::math::{exp, largest, sum};
use crate::ranks::VocabularyRows;
use crate::simd::vectorized;
use crate::{Cpu, Result};

use super::BLOCK;

/// Maximum tokens per task.
pub(super) const ROWS: usize = 16;
/// Logits that are exponentiated before they are summed.
pub(super) const PART: usize = 256;

/// The statistics of each token's softmax.
pub(super) struct Softmax<'a> {
    statistics: &'a mut [f32],
    targets: &'a [u32],
    vocabulary: VocabularyRows,
}

/// The statistics of one token.
struct Token<'a> {
    /// For each block the maximum logit, the reference of its exponentials. After the losses, the
    /// factor that turns the exponentials into gradients.
    maxima_or_factors: &'a mut [f32],
    /// For each block the sum of the exponentials without the target's.
    others: &'a mut [f32],
    /// The target's logit, if it is local.
    target: &'a mut f32,
}

/// Returns the elements of the statistics of a token with this many local rows of the vocabulary.
fn statistics_len(rows: usize) -> usize {
    2 * rows.div_ceil(BLOCK) + 1
}

impl<'a> Token<'a> {
    fn of(statistics: &'a mut [f32]) -> Self {
        let blocks = statistics.len() / 2;
        let (maxima_or_factors, rest) = statistics.split_at_mut(blocks);
        let (others, target) = rest.split_at_mut(blocks);
        Token { maxima_or_factors, others, target: &mut target[0] }
    }

    /// Returns the logarithm of the sum of the exponentials of all local logits.
    ///
    /// The target's term is added in f64: if it is the maximum, the loss is the logarithm of 1 plus the
    /// small sum of the other terms.
    fn log_sum(&self, is_local: bool) -> f64 {
        let maxima = &*self.maxima_or_factors;
        let maximum = f64::from(largest(maxima));
        let of_blocks = maxima.iter().zip(&*self.others);
        let others: f64 = of_blocks
            .map(|(&of_block, &sum)| f64::from(sum) * (f64::from(of_block) - maximum).exp())
            .sum();
        let own = if is_local { (f64::from(*self.target) - maximum).exp() } else { 0.0 };
        maximum + (others + own).ln()
    }
}

impl<'a> Softmax<'a> {
    /// Returns the elements of scratch for `tokens` tokens and `rows` local rows of the vocabulary.
    pub(super) fn len(tokens: usize, rows: usize) -> usize {
        tokens * statistics_len(rows)
    }

    pub(super) fn new(
        scratch: &'a mut [f32],
        targets: &'a [u32],
        vocabulary: VocabularyRows,
    ) -> Self {
        let statistics = &mut scratch[..Self::len(targets.len(), vocabulary.count)];
        Softmax { statistics, targets, vocabulary }
    }

    /// Calls `work` on each token's part of a block, with the token's statistics and the index of its
    /// target if the block has it. An ignored token has no statistics.
    fn each_token(
        &mut self,
        part: &mut [f32],
        block: &Range<usize>,
        work: impl Fn(&mut [f32], Option<Token<'_>>, Option<usize>) + Sync,
    ) {
        let (width, len) = (block.len(), statistics_len(self.vocabulary.count));
        let vocabulary = self.vocabulary;
        let parts = (
            part.par_chunks_mut(ROWS * width),
            self.targets.par_chunks(ROWS),
            self.statistics.par_chunks_mut(ROWS * len),
        );
        parts.into_par_iter().for_each(|(part, targets, all)| {
            let rows = part.chunks_exact_mut(width).zip(targets);
            for ((row, &target), statistics) in rows.zip(all.chunks_exact_mut(len)) {
                let token = (target != IGNORED).then(|| Token::of(statistics));
                let local = vocabulary.local(target).filter(|row| block.contains(row));
                work(row, token, local.map(|row| row - block.start));
            }
        });
    }

    /// Replaces block `number`'s logits by exponentials relative to each token's maximum in the
    /// block. The logits of ignored tokens stay unchanged.
    pub(super) fn exponentiate(&mut self, logits: &mut [f32], number: usize, block: &Range<usize>) {
        self.each_token(logits, block, |row, token, target| {
            let Some(token) = token else { return };
            if let Some(target) = target {
                *token.target = row[target];
            }
            let found = vectorized!(exponentiate(row, target));
            (token.maxima_or_factors[number], token.others[number]) = found;
        });
    }

    /// Returns the summed loss, in an order that depends only on the number of tokens. Prepares the gradients
    /// for a scale.
    pub(super) fn losses(&mut self, scale: Option<f32>) -> f64 {
        let len = statistics_len(self.vocabulary.count);
        sum_of_rows(self.statistics, self.targets, len, &|statistics, target| {
            if target == IGNORED {
                return [0.0; 2];
            }
            let token = Token::of(statistics);
            let log_sum = token.log_sum(true);
            let loss = log_sum - f64::from(*token.target);
            if let Some(scale) = scale {
                set_factors(token.maxima_or_factors, log_sum, scale);
            }
            [loss, 0.0]
        })[0]
    }

    /// Returns the loss over ranks with shards of the vocabulary on rank 0, and zero on the other ranks. Each rank
    /// writes to a row of the table for each token. Its own column gets the logarithm of the local sum. The last
    /// column gets the target's logit, if it is local.
    pub(super) fn losses_over(
        &mut self,
        ranks: &mut HeadRanks<'_, Cpu>,
        scale: Option<f32>,
    ) -> Result<f64> {
        let HeadRanks { rank, ranks: count, sums, all_reduce, .. } = ranks;
        let (columns, len) = (*count + 1, statistics_len(self.vocabulary.count));
        let table = &mut sums[..self.targets.len() * columns];
        let rows = table.chunks_exact_mut(columns).zip(self.statistics.chunks_exact_mut(len));
        for ((columns, statistics), &target) in rows.zip(self.targets) {
            columns.fill(0.0);
            if target == IGNORED {
                continue;
            }
            let token = Token::of(statistics);
            let is_local = self.vocabulary.local(target).is_some();
            columns[*rank] = token.log_sum(is_local);
            if let Some(logit) = columns.last_mut().filter(|_| is_local) {
                *logit = f64::from(*token.target);
            }
        }
        all_reduce(&mut *table)?;
        let rows = table.chunks_exact(columns).zip(self.statistics.chunks_exact_mut(len));
        let rows = rows.zip(self.targets).filter(|(_, target)| **target != IGNORED);
        let losses = rows.map(|((columns, statistics), _)| {
            let Some((target, sums)) = columns.split_last() else { return 0.0 };
            let maximum = sums.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = sums.iter().map(|sum| (sum - maximum).exp()).sum();
            let log_sum = maximum + total.ln();
            if let Some(scale) = scale {
                set_factors(Token::of(statistics).maxima_or_factors, log_sum, scale);
            }
            log_sum - target
        });
        let loss = losses.sum();
        Ok(if *rank == 0 { loss } else { 0.0 })
    }

    /// Replaces block `number`'s exponentials by the gradients of the logits. Call `losses` first.
    pub(super) fn differentiate(
        &mut self,
        exponentials: &mut [f32],
        number: usize,
        block: &Range<usize>,
        scale: f32,
    ) {
        self.each_token(exponentials, block, |row, token, target| {
            let Some(token) = token else { return row.fill(0.0) };
            vectorized!(multiply(row, token.maxima_or_factors[number]));
            if let Some(target) = target {
                row[target] -= scale;
            }
        });
    }
}

/// Replaces a token's maxima by the factors that turn its exponentials into gradients.
fn set_factors(maxima: &mut [f32], log_sum: f64, scale: f32) {
    for maximum in maxima {
        *maximum = (f64::from(scale) * (f64::from(*maximum) - log_sum).exp()) as f32;
    }
}

/// Returns the sums of both losses of some tokens.
pub(super) fn add(some: [f64; 2], others: [f64; 2]) -> [f64; 2] {
    [some[0] + others[0], some[1] + others[1]]
}

/// Returns the sums of `row`, both losses of a token, over the tokens, in an order that depends only on their number.
pub(super) fn sum_of_rows(
    all: &mut [f32],
    targets: &[u32],
    len: usize,
    row: &(impl Fn(&mut [f32], u32) -> [f64; 2] + Sync),
) -> [f64; 2] {
    if targets.len() > ROWS {
        let half = targets.len().div_ceil(2);
        let (first, second) = all.split_at_mut(half * len);
        let (first_targets, second_targets) = targets.split_at(half);
        let (first, second) = rayon::join(
            || sum_of_rows(first, first_targets, len, row),
            || sum_of_rows(second, second_targets, len, row),
        );
        return add(first, second);
    }
    let rows = all.chunks_exact_mut(len).zip(targets);
    rows.map(|(statistics, &target)| row(statistics, target)).fold([0.0; 2], add)
}

#[inline(always)]
fn multiply(row: &mut [f32], factor: f32) {
    for value in row {
        *value *= factor;
    }
}

/// Replaces logits by exponentials relative to the maximum; returns the maximum, and the sum of the
/// exponentials except `target`'s.
#[inline(always)]
fn exponentiate(row: &mut [f32], target: Option<usize>) -> (f32, f32) {
    let largest = largest(row);
    let Some(target) = target else {
        return (largest, exponentials(row, largest));
    };
    let own = exp(row[target] - largest);
    row[target] = f32::NEG_INFINITY;
    let others = exponentials(row, largest);
    row[target] = own;
    (largest, others)
}

/// Replaces logits by exponentials relative to the maximum and returns their sum.
#[inline(always)]
fn exponentials(row: &mut [f32], largest: f32) -> f32 {
    let mut total = 0.0;
    // The sum reads a part while the part is in the first-level cache. A single loop for both does not
    // vectorise.
    for part in row.chunks_mut(PART) {
        for logit in part.iter_mut() {
            *logit = exp(*logit - largest);
        }
        total += sum(part);
    }
    total
}
