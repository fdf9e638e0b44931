//! The cross-entropy and the distillation loss of a chunk, block by block of the vocabulary. A block's logits of both
//! heads are measured while they are in the caches, and stay unchanged: three softmaxes have no common
//! exponentials. The gradients compute the exponentials again.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use rayon::prelude::*;

use crate::cross_entropy::{HeadRanks, HeadTeacher, IGNORED};
use crate::math::{exp, largest, sum};
use crate::ranks::VocabularyRows;
use crate::simd::vectorized;
use crate::{Cpu, Element, Result};

use super::BLOCK;
use super::softmax::{PART, ROWS, add, sum_of_rows};

/// Statistics of a token's logits in a block. Exponentials are relative to the largest logit.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct BlockSums {
    largest: f32,
    /// The sum of the exponentials without the target's.
    others: f32,
    /// The exponentials of the student and of the teacher over the temperature, in the compared rows.
    student: Exponentials,
    teacher: Exponentials,
    /// The sum of the teacher's exponentials times the teacher's logit minus the student's logit. Each logit is
    /// relative to the largest logit of its head.
    difference: f32,
}

/// The largest of some logits, and the sum of the exponentials relative to it; -inf and 0 without logits.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Exponentials {
    largest: f32,
    sum: f32,
}

/// Scales for one of a token's three distributions: (exponential relative to `reference`) x `factor`.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Scaled {
    reference: f32,
    factor: f32,
}

const SUMS: usize = size_of::<BlockSums>() / size_of::<f32>();
/// Elements of the three [`Scaled`], which replace the first block's sums.
const SCALED: usize = 3 * size_of::<Scaled>() / size_of::<f32>();
const _: () = assert!(SCALED <= SUMS);

/// The sums of a token over the vocabulary, or over a rank's rows.
#[derive(Debug, Clone, Copy)]
struct TokenSums {
    /// Logarithm of the sum of the exponentials.
    log_sum: f64,
    /// Logarithms of the sums of the student's and of the teacher's exponentials over the temperature, in the compared
    /// rows;
    /// -inf without compared rows.
    student: f64,
    teacher: f64,
    /// Mean difference of the logits over the temperature, the teacher's minus the student's, weighted by the
    /// teacher's distribution.
    difference: f64,
}

/// Returns the columns of the table that `ranks` ranks sum: four sums of each rank, and the target's logit.
pub(super) fn columns(ranks: usize) -> usize {
    4 * ranks + 1
}

/// The statistics of each token.
pub(super) struct Distillation<'a> {
    statistics: &'a mut [f32],
    pub targets: &'a [u32],
    vocabulary: VocabularyRows,
    /// The local rows that are compared.
    pub compared: usize,
    temperature: f64,
    /// Gradient of the total loss with respect to a token's distillation loss.
    scale: f64,
    /// Gradient of the total loss with respect to a token's cross-entropy, after the gradients are prepared.
    target_scale: f32,
}

/// Returns the elements of the statistics of a token with this many local rows of the vocabulary.
fn statistics_len(rows: usize) -> usize {
    SUMS * rows.div_ceil(BLOCK) + 1
}

impl<'a> Distillation<'a> {
    /// Returns the elements of scratch for `tokens` tokens and `rows` local rows of the vocabulary.
    pub fn len(tokens: usize, rows: usize) -> usize {
        tokens * statistics_len(rows)
    }

    pub fn new<T: Element>(
        scratch: &'a mut [f32],
        targets: &'a [u32],
        vocabulary: VocabularyRows,
        teacher: &HeadTeacher<'_, Cpu, T>,
    ) -> Self {
        Distillation {
            statistics: &mut scratch[..Self::len(targets.len(), vocabulary.count)],
            targets,
            vocabulary,
            compared: teacher.rows.saturating_sub(vocabulary.first).min(vocabulary.count),
            temperature: f64::from(teacher.temperature),
            scale: f64::from(teacher.scale),
            target_scale: 0.0,
        }
    }

    /// Returns the compared rows of a block.
    pub fn compared_in(&self, block: &Range<usize>) -> Range<usize> {
        block.start.min(self.compared)..block.end.min(self.compared)
    }

    /// Calls `work` on each token's part of a block by both heads, with the token's statistics and the index of its
    /// target if the block has it. For an ignored token, calls `work` with `None`.
    fn each_token(
        &mut self,
        student: &mut [f32],
        teacher: &[f32],
        block: &Range<usize>,
        work: impl Fn(&mut [f32], &[f32], Option<(&mut [f32], Option<usize>)>) + Sync,
    ) {
        let (width, compared) = (block.len(), self.compared_in(block).len());
        let (vocabulary, len) = (self.vocabulary, statistics_len(self.vocabulary.count));
        let parts = (
            student.par_chunks_mut(ROWS * width),
            self.targets.par_chunks(ROWS),
            self.statistics.par_chunks_mut(ROWS * len),
        );
        parts.into_par_iter().enumerate().for_each(|(task, (student, targets, all))| {
            let rows = student.chunks_exact_mut(width).zip(targets);
            for (row, ((student, &target), statistics)) in
                rows.zip(all.chunks_exact_mut(len)).enumerate()
            {
                let teacher = &teacher[(task * ROWS + row) * compared..][..compared];
                let local = vocabulary.local(target).filter(|row| block.contains(row));
                let local = local.map(|row| row - block.start);
                work(student, teacher, (target != IGNORED).then_some((statistics, local)));
            }
        });
    }

    /// Measures block `number`'s logits, which stay unchanged.
    pub fn measure(
        &mut self,
        student: &mut [f32],
        teacher: &[f32],
        number: usize,
        block: &Range<usize>,
    ) {
        let inverse = (1.0 / self.temperature) as f32;
        self.each_token(student, teacher, block, |student, teacher, token| {
            let Some((statistics, target)) = token else { return };
            let (blocks, own) = split(statistics);
            if let Some(target) = target {
                *own = student[target];
            }
            blocks[number] = vectorized!(measured(student, teacher, target, inverse));
        });
    }

    /// Returns the summed losses, the cross-entropy first, in an order that depends only on the number of tokens.
    /// Prepares the gradients for a scale of the cross-entropy.
    pub fn losses(&mut self, scale: Option<f32>) -> [f64; 2] {
        self.target_scale = scale.unwrap_or_default();
        let (len, temperature) = (statistics_len(self.vocabulary.count), self.temperature);
        let distillation_scale = self.scale;
        sum_of_rows(self.statistics, self.targets, len, &|statistics, target| {
            if target == IGNORED {
                return [0.0; 2];
            }
            let sums = TokenSums::of(statistics, true, temperature);
            if let Some(scale) = scale {
                sums.scale(statistics, scale, distillation_scale, temperature);
            }
            sums.losses(f64::from(*split(statistics).1), temperature)
        })
    }

    /// Returns the losses over ranks with shards of the vocabulary on rank 0, and zero on the other ranks.
    pub fn losses_over(
        &mut self,
        ranks: &mut HeadRanks<'_, Cpu>,
        scale: Option<f32>,
    ) -> Result<[f64; 2]> {
        self.target_scale = scale.unwrap_or_default();
        let HeadRanks { rank, ranks: count, sums, all_reduce, .. } = ranks;
        let (columns, len) = (columns(*count), statistics_len(self.vocabulary.count));
        let (vocabulary, temperature) = (self.vocabulary, self.temperature);
        let table = &mut sums[..self.targets.len() * columns];
        let rows = (
            table.par_chunks_mut(columns),
            self.statistics.par_chunks_mut(len),
            self.targets.par_iter(),
        );
        rows.into_par_iter().with_min_len(ROWS).for_each(|(columns, statistics, &target)| {
            columns.fill(0.0);
            if target == IGNORED {
                return;
            }
            let is_local = vocabulary.local(target).is_some();
            let TokenSums { log_sum, student, teacher, difference } =
                TokenSums::of(statistics, is_local, temperature);
            columns[4 * *rank..][..4].copy_from_slice(&[log_sum, student, teacher, difference]);
            if let Some(logit) = columns.last_mut().filter(|_| is_local) {
                *logit = f64::from(*split(statistics).1);
            }
        });
        all_reduce(&mut *table)?;
        let rows = table.chunks_exact(columns).zip(self.statistics.chunks_exact_mut(len));
        let rows = rows.zip(self.targets).filter(|(_, target)| **target != IGNORED);
        let losses = rows.map(|((columns, statistics), _)| {
            let (ranks, target) = columns.as_chunks::<4>();
            let sums = TokenSums::over(ranks);
            if let Some(scale) = scale {
                sums.scale(statistics, scale, self.scale, temperature);
            }
            sums.losses(target[0], temperature)
        });
        let losses = losses.fold([0.0; 2], add);
        Ok(if *rank == 0 { losses } else { [0.0; 2] })
    }

    /// Replaces a block's logits by their gradients. Call `losses` with a scale first.
    pub fn differentiate(&mut self, student: &mut [f32], teacher: &[f32], block: &Range<usize>) {
        let (inverse, scale) = ((1.0 / self.temperature) as f32, self.target_scale);
        self.each_token(student, teacher, block, |student, teacher, token| {
            let Some((statistics, target)) = token else { return student.fill(0.0) };
            let scaled: &[Scaled] = bytemuck::cast_slice(&statistics[..SCALED]);
            let scaled = [scaled[0], scaled[1], scaled[2]];
            vectorized!(differentiated(student, teacher, scaled, inverse));
            if let Some(target) = target {
                student[target] -= scale;
            }
        });
    }
}

/// Returns the sums of a token's blocks, and the target's logit, if it is local.
fn split(statistics: &mut [f32]) -> (&mut [BlockSums], &mut f32) {
    let (blocks, target) = statistics.split_at_mut(statistics.len() - 1);
    (bytemuck::cast_slice_mut(blocks), &mut target[0])
}

/// Returns the logarithm of a sum of exponentials. Each term is a logarithm or maximum, and a sum relative to it. -inf
/// without terms.
fn log_sum_exp(terms: impl Iterator<Item = (f64, f64)> + Clone) -> f64 {
    let largest = terms.clone().map(|(term, _)| term).fold(f64::NEG_INFINITY, f64::max);
    if largest == f64::NEG_INFINITY {
        return largest;
    }
    largest + terms.map(|(term, sum)| (term - largest).exp() * sum).sum::<f64>().ln()
}

impl TokenSums {
    /// Computes the sums of a token's local rows, which may include its target.
    fn of(statistics: &mut [f32], is_local: bool, temperature: f64) -> Self {
        let (blocks, target) = split(statistics);
        let blocks = &*blocks;
        let wide = |exponentials: &Exponentials| {
            (f64::from(exponentials.largest) / temperature, f64::from(exponentials.sum))
        };
        let others = blocks.iter().map(|block| (f64::from(block.largest), f64::from(block.others)));
        let own = is_local.then_some((f64::from(*target), 1.0));
        let teacher = log_sum_exp(blocks.iter().map(|block| wide(&block.teacher)));
        let compared = blocks.iter().filter(|block| block.teacher.sum > 0.0);
        let difference = compared.map(|block| {
            let (largest, sum) = wide(&block.teacher);
            let apart = f64::from(block.teacher.largest) - f64::from(block.student.largest);
            (largest - teacher).exp() * (f64::from(block.difference) + apart * sum) / temperature
        });
        TokenSums {
            log_sum: log_sum_exp(others.chain(own)),
            student: log_sum_exp(blocks.iter().map(|block| wide(&block.student))),
            teacher,
            difference: difference.sum(),
        }
    }

    /// Computes the sums over the rows of all ranks, from each rank's sums in the order of the fields.
    fn over(ranks: &[[f64; 4]]) -> Self {
        let all = |column: usize| log_sum_exp(ranks.iter().map(move |sums| (sums[column], 1.0)));
        let teacher = all(2);
        let difference = ranks.iter().map(|sums| (sums[2] - teacher).exp() * sums[3]);
        TokenSums { log_sum: all(0), student: all(1), teacher, difference: difference.sum() }
    }

    /// Returns the cross-entropy and the distillation loss of a token; `target` is the target's logit.
    fn losses(&self, target: f64, temperature: f64) -> [f64; 2] {
        let divergence = self.difference + self.student - self.teacher;
        [self.log_sum - target, temperature * temperature * divergence]
    }

    /// Replaces the first sums of a token by the factors that turn its logits into gradients of these scales.
    fn scale(&self, statistics: &mut [f32], scale: f32, distillation: f64, temperature: f64) {
        // The factor corrects the rounding error of the reference, which is f32.
        let scaled = |log_sum: f64, scale: f64, temperature: f64| {
            let reference = (log_sum * temperature) as f32;
            let factor = scale * (f64::from(reference) / temperature - log_sum).exp();
            Scaled { reference, factor: factor as f32 }
        };
        let distillation = distillation * temperature;
        let all = [
            scaled(self.log_sum, f64::from(scale), 1.0),
            scaled(self.student, distillation, temperature),
            scaled(self.teacher, distillation, temperature),
        ];
        statistics[..SCALED].copy_from_slice(bytemuck::cast_slice(&all));
    }
}

/// Measures a row's logits by both heads. The teacher has logits only for the compared rows.
#[inline(always)]
fn measured(
    student: &mut [f32],
    teacher: &[f32],
    target: Option<usize>,
    inverse: f32,
) -> BlockSums {
    let most = largest(student);
    let mut found = compare(&student[..teacher.len()], teacher, inverse);
    found.largest = most;
    // The target has a separate term.
    let own = target.map(|target| std::mem::replace(&mut student[target], f32::NEG_INFINITY));
    let mut others = 0.0;
    let mut exponentials = [0f32; PART];
    for part in student.chunks(PART) {
        let exponentials = &mut exponentials[..part.len()];
        for (exponential, &logit) in exponentials.iter_mut().zip(part) {
            *exponential = exp(logit - most);
        }
        others += sum(exponentials);
    }
    found.others = others;
    if let (Some(target), Some(own)) = (target, own) {
        student[target] = own;
    }
    found
}

/// Returns the sums of the compared logits.
#[inline(always)]
fn compare(student: &[f32], teacher: &[f32], inverse: f32) -> BlockSums {
    let (most, teachers_most) = (largest(student), largest(teacher));
    let [mut sum_student, mut sum_teacher, mut difference] = [0f64; 3];
    let mut parts = [[0f32; PART]; 3];
    for (student, teacher) in student.chunks(PART).zip(teacher.chunks(PART)) {
        let [students, teachers, differences] = &mut parts;
        let len = student.len();
        let (students, teachers) = (&mut students[..len], &mut teachers[..len]);
        let (differences, teacher) = (&mut differences[..len], &teacher[..len]);
        for i in 0..len {
            let (own, other) = (student[i] - most, teacher[i] - teachers_most);
            students[i] = exp(own * inverse);
            teachers[i] = exp(other * inverse);
            differences[i] = teachers[i] * (other - own);
        }
        sum_student += f64::from(sum(students));
        sum_teacher += f64::from(sum(teachers));
        difference += f64::from(sum(differences));
    }
    BlockSums {
        largest: most,
        others: 0.0,
        student: Exponentials { largest: most, sum: sum_student as f32 },
        teacher: Exponentials { largest: teachers_most, sum: sum_teacher as f32 },
        difference: difference as f32,
    }
}

/// Replaces a row's logits by their gradients, without the target's term.
#[inline(always)]
fn differentiated(
    student: &mut [f32],
    teacher: &[f32],
    [own, compared, teachers]: [Scaled; 3],
    inverse: f32,
) {
    let (both, alone) = student.split_at_mut(teacher.len());
    for (value, &other) in both.iter_mut().zip(teacher) {
        let hard = exp(*value - own.reference) * own.factor;
        let soft = exp((*value - compared.reference) * inverse) * compared.factor;
        *value = hard + (soft - exp((other - teachers.reference) * inverse) * teachers.factor);
    }
    for value in alone {
        *value = exp(*value - own.reference) * own.factor;
    }
}
