//! The softmax of a chunk's logits, block by block of the vocabulary.

use std::ops::Range;

use rayon::prelude::*;

use crate::cross_entropy::IGNORED;
use crate::math::{exp, largest, sum};
use crate::ranks::VocabularyRows;
use crate::simd::vectorized;

use super::BLOCK;

/// Maximum tokens per task.
const ROWS: usize = 16;
/// Logits that are exponentiated before they are summed.
const PART: usize = 256;

/// Numbers of each token's softmax.
pub(super) struct Softmax<'a> {
    numbers: &'a mut [f32],
    pub(super) targets: &'a [u32],
    vocabulary: VocabularyRows,
}

/// The numbers of one token.
struct Token<'a> {
    /// By block, the maximum logit, from which exponentials are taken. For the gradients, the factor
    /// of the exponentials.
    largest: &'a mut [f32],
    /// By block, the sum of the exponentials without the target's.
    others: &'a mut [f32],
    /// The target's logit, if it is local.
    chosen: &'a mut f32,
}

/// Numbers of a token with this many local rows of the vocabulary.
fn numbers(rows: usize) -> usize {
    2 * rows.div_ceil(BLOCK) + 1
}

impl<'a> Token<'a> {
    fn of(numbers: &'a mut [f32]) -> Self {
        let blocks = numbers.len() / 2;
        let (largest, rest) = numbers.split_at_mut(blocks);
        let (others, chosen) = rest.split_at_mut(blocks);
        Token { largest, others, chosen: &mut chosen[0] }
    }

    /// Logarithm of the sum of the exponentials of all local logits.
    ///
    /// The target's term is added in f64: if it is the maximum, the loss is the logarithm of 1 plus the
    /// small sum of the others.
    fn log_sum(&self, is_local: bool) -> f64 {
        let most = f64::from(largest(self.largest));
        let of_blocks = self.largest.iter().zip(&*self.others);
        let others: f64 = of_blocks
            .map(|(&largest, &sum)| f64::from(sum) * (f64::from(largest) - most).exp())
            .sum();
        let own = if is_local { (f64::from(*self.chosen) - most).exp() } else { 0.0 };
        most + (others + own).ln()
    }
}

impl<'a> Softmax<'a> {
    /// Elements of scratch for `tokens` tokens and `rows` local rows of the vocabulary.
    pub(super) fn len(tokens: usize, rows: usize) -> usize {
        tokens * numbers(rows)
    }

    pub(super) fn new(
        scratch: &'a mut [f32],
        targets: &'a [u32],
        vocabulary: VocabularyRows,
    ) -> Self {
        let numbers = &mut scratch[..Self::len(targets.len(), vocabulary.count)];
        Softmax { numbers, targets, vocabulary }
    }

    /// Calls `work` on each token's part of a block, with the token's numbers and the index of its
    /// target, if that is in the block. An ignored token has no numbers.
    fn each_token(
        &mut self,
        part: &mut [f32],
        block: &Range<usize>,
        work: impl Fn(&mut [f32], Option<Token<'_>>, Option<usize>) + Sync,
    ) {
        let (width, numbers) = (block.len(), numbers(self.vocabulary.count));
        let vocabulary = self.vocabulary;
        let parts = (
            part.par_chunks_mut(ROWS * width),
            self.targets.par_chunks(ROWS),
            self.numbers.par_chunks_mut(ROWS * numbers),
        );
        parts.into_par_iter().for_each(|(part, targets, all)| {
            let rows = part.chunks_exact_mut(width).zip(targets);
            for ((row, &target), numbers) in rows.zip(all.chunks_exact_mut(numbers)) {
                let token = (target != IGNORED).then(|| Token::of(numbers));
                let local = vocabulary.local(target).filter(|row| block.contains(row));
                work(row, token, local.map(|row| row - block.start));
            }
        });
    }

    /// Replaces block `number`'s logits by exponentials relative to each token's maximum in the
    /// block. Those of ignored tokens are left as they are.
    pub(super) fn exponentiate(&mut self, logits: &mut [f32], number: usize, block: &Range<usize>) {
        self.each_token(logits, block, |row, token, target| {
            let Some(token) = token else { return };
            if let Some(target) = target {
                *token.chosen = row[target];
            }
            let found = vectorized!(exponentiate(row, target));
            (token.largest[number], token.others[number]) = found;
        });
    }

    /// The summed loss, in an order that depends only on the number of tokens; prepares the gradients
    /// of a scale.
    pub(super) fn losses(&mut self, scale: Option<f32>) -> f64 {
        let numbers = numbers(self.vocabulary.count);
        sum_of_rows(self.numbers, self.targets, numbers, &|numbers, target| {
            if target == IGNORED {
                return 0.0;
            }
            let token = Token::of(numbers);
            let log_sum = token.log_sum(true);
            let loss = log_sum - f64::from(*token.chosen);
            if let Some(scale) = scale {
                set_factors(token.largest, log_sum, scale);
            }
            loss
        })
    }

    /// Writes what the other ranks need to know of each token into its row of their table, of
    /// `columns` columns: in the rank's column the logarithm of the local sum, in the last one the
    /// target's logit, if it is local.
    pub(super) fn fill_table(&mut self, table: &mut [f64], columns: usize, rank: usize) {
        let numbers = numbers(self.vocabulary.count);
        let vocabulary = self.vocabulary;
        let rows = table.chunks_exact_mut(columns).zip(self.numbers.chunks_exact_mut(numbers));
        for ((columns, numbers), &target) in rows.zip(self.targets) {
            columns.fill(0.0);
            if target == IGNORED {
                continue;
            }
            let token = Token::of(numbers);
            let is_local = vocabulary.local(target).is_some();
            columns[rank] = token.log_sum(is_local);
            if let Some(chosen) = columns.last_mut().filter(|_| is_local) {
                *chosen = f64::from(*token.chosen);
            }
        }
    }

    /// The summed loss by a table that the ranks have summed; prepares the gradients of a scale.
    pub(super) fn losses_by(&mut self, table: &[f64], columns: usize, scale: Option<f32>) -> f64 {
        let numbers = numbers(self.vocabulary.count);
        let rows = table.chunks_exact(columns).zip(self.numbers.chunks_exact_mut(numbers));
        let rows = rows.zip(self.targets).filter(|(_, target)| **target != IGNORED);
        let losses = rows.map(|((columns, numbers), _)| {
            let Some((chosen, sums)) = columns.split_last() else { return 0.0 };
            let most = sums.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = sums.iter().map(|sum| (sum - most).exp()).sum();
            let log_sum = most + total.ln();
            if let Some(scale) = scale {
                set_factors(Token::of(numbers).largest, log_sum, scale);
            }
            log_sum - chosen
        });
        losses.sum()
    }

    /// Replaces block `number`'s exponentials by the gradients of the logits; after the losses.
    pub(super) fn differentiate(
        &mut self,
        exponentials: &mut [f32],
        number: usize,
        block: &Range<usize>,
        scale: f32,
    ) {
        self.each_token(exponentials, block, |row, token, target| {
            let Some(token) = token else { return row.fill(0.0) };
            vectorized!(multiply(row, token.largest[number]));
            if let Some(target) = target {
                row[target] -= scale;
            }
        });
    }
}

/// Replaces a token's maxima by the factors that make its exponentials gradients.
fn set_factors(largest: &mut [f32], log_sum: f64, scale: f32) {
    for largest in largest {
        *largest = (f64::from(scale) * (f64::from(*largest) - log_sum).exp()) as f32;
    }
}

/// The sum of `row` over the tokens, in an order that depends only on their number.
fn sum_of_rows(
    all: &mut [f32],
    targets: &[u32],
    numbers: usize,
    row: &(impl Fn(&mut [f32], u32) -> f64 + Sync),
) -> f64 {
    if targets.len() > ROWS {
        let half = targets.len().div_ceil(2);
        let (first, second) = all.split_at_mut(half * numbers);
        let (first_targets, second_targets) = targets.split_at(half);
        let (first, second) = rayon::join(
            || sum_of_rows(first, first_targets, numbers, row),
            || sum_of_rows(second, second_targets, numbers, row),
        );
        return first + second;
    }
    all.chunks_exact_mut(numbers).zip(targets).map(|(numbers, &target)| row(numbers, target)).sum()
}

#[inline(always)]
fn multiply(row: &mut [f32], factor: f32) {
    for value in row {
        *value *= factor;
    }
}

/// Replaces logits by exponentials relative to the maximum; returns the maximum, and the sum of the
/// exponentials but for `target`.
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
    // The sum reads a part while it is in the first-level cache; one loop for both does not
    // vectorise.
    for part in row.chunks_mut(PART) {
        for logit in part.iter_mut() {
            *logit = exp(*logit - largest);
        }
        total += sum(part);
    }
    total
}
