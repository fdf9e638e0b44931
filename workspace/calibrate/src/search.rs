//! The search for a layer's shared heads. Sets are judged by the error after a fit ([`Products::least`]). If there are
//! too many sets, they are also judged by the error without a new projection ([`HeadGrams::loss`]), which needs no fit.

use std::cell::LazyCell;

use moh_kernels::Backend;
use moh_kernels::router::SharedHeads;
use moh_model::LayerHeads;
use ndarray::{Array2, ArrayView2};
use rayon::prelude::*;

use crate::head_grams::HeadGrams;
use crate::products::ProductSums;
use crate::selection::{Ranking, Scores};
use crate::{Error, Result, matrix};

/// Maximum number of sets of one size that are all compared. Of more sets, good sets are built.
const MOST_SETS: usize = 128;
/// Maximum number of sets of a layer that are judged by a fit, if only one size with few sets is compared. With several
/// sizes half as many sets are judged, and then exchanges.
pub const FITS: usize = 64;
/// Lambda of the search's fits, in means of the diagonal of F^T F: on SmolLM2-135M, 0.1 chooses better sets than 0.001.
const RIDGE: f64 = 0.1;
/// Number of tokens by which sets are judged without a fit.
const GRAM_TOKENS: usize = 2048;
/// Number of tokens that a thread computes at a time.
const TOKENS: usize = 64;
/// Maximum rounds of exchanges that are judged by fits. They end after a round without a better set.
const ROUNDS: usize = 8;
/// Maximum exchanges that a round judges.
const EXCHANGES: usize = 8;
/// Maximum outputs by which sets are judged. The outputs of a wider layer are added up to this many sums, with signs.
const OUTPUTS: usize = 256;

/// The heads' outputs of a layer for some tokens, and the attention output from them.
pub(crate) struct LayerSample {
    pub scores: Scores,
    pub ranking: Ranking,
    /// `[tokens, heads * head_dim]`.
    outputs: Vec<f32>,
    /// Sums of the dense layer's attention output, `[tokens, judged outputs]`.
    targets: Vec<f32>,
    /// The sums of the output projection, `[judged outputs, heads * head_dim]`.
    judged: Array2<f64>,
    /// The output projection, `[width, heads * head_dim]`.
    weight: Array2<f32>,
    pass: usize,
}

/// A set of shared heads, and the error of the layer's attention output with it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Found {
    pub heads: LayerHeads,
    /// Relative squared error after a fit, with the fit's penalty ([`Products::least`]).
    pub error: f64,
}

/// Returns the number of outputs by which sets are judged in a layer of `width` outputs.
pub fn judged_outputs(width: usize) -> usize {
    width.min(OUTPUTS)
}

/// Adds up the rows of a matrix to at most [`OUTPUTS`] rows: row i to row i mod [`OUTPUTS`], with a sign. On average
/// over signs, the square of a vector of such sums is the square of the vector (count sketch, Charikar et al. 2002).
/// Sets are compared with the same signs.
fn sums_of_rows(matrix: ArrayView2<'_, f32>) -> Array2<f64> {
    let (width, columns) = matrix.dim();
    let mut sums = Array2::zeros((judged_outputs(width), columns));
    for (row, values) in matrix.rows().into_iter().enumerate() {
        let mut sum = sums.row_mut(row % OUTPUTS);
        sum.zip_mut_with(&values, |sum, &value| *sum += sign(row) * f64::from(value));
    }
    sums
}

/// Returns 1 or -1 by the number's hash (the finalizer of splitmix64); 1 below [`OUTPUTS`].
fn sign(number: usize) -> f64 {
    let mut hash = number as u64;
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    if number < OUTPUTS || (hash ^ (hash >> 31)) & 1 == 0 { 1.0 } else { -1.0 }
}

impl LayerSample {
    /// Creates a sample of passes of `pass` tokens. `outputs` are the heads' outputs, `[tokens, heads * head_dim]`,
    /// `targets` the attention output from them, `[tokens, width]`, and `weight` is the output projection.
    pub fn new(
        scores: Scores,
        ranking: Ranking,
        outputs: Vec<f32>,
        targets: ArrayView2<'_, f32>,
        weight: Array2<f32>,
        pass: usize,
    ) -> Self {
        let sums = sums_of_rows(targets.t());
        let targets = sums.t().iter().map(|&y| y as f32).collect();
        let judged = sums_of_rows(weight.view());
        LayerSample { scores, ranking, outputs, targets, judged, weight, pass }
    }

    /// Returns the best set of shared heads with one of these numbers of heads, if `active` heads are active.
    pub fn best_set<B: Backend>(
        &self,
        sums: &mut ProductSums<'_, B>,
        numbers: &[usize],
        active: usize,
    ) -> Result<Found> {
        let (units, unit) = (self.ranking.units(), self.ranking.unit());
        let has_few_sets = |shared| number_of_sets(units, shared / unit) <= MOST_SETS;
        let most = if numbers.len() > 1 { FITS / 2 / numbers.len() } else { FITS };
        let (mut best, grams) = (None, LazyCell::new(|| self.grams()));
        for &shared in numbers {
            let top_k = active - shared;
            let sets = match has_few_sets(shared) {
                true => self.most_promising(&grams, shared, top_k, most)?,
                false => vec![self.exchanged(&grams, shared, top_k)?],
            };
            best = Some(self.best_of(sums, sets.into_iter(), top_k, best)?);
        }
        let best = best.ok_or(Error::SINGULAR)?;
        // With one number of heads, enough sets have been judged.
        let is_done = matches!(numbers, [shared] if has_few_sets(*shared));
        if is_done { Ok(best) } else { self.refined(sums, &grams, best) }
    }

    /// Returns all sets of `shared` heads. If there are more than `most`, returns the sets with the least errors
    /// without a fit.
    fn most_promising(
        &self,
        grams: &LazyCell<HeadGrams, impl FnOnce() -> HeadGrams>,
        shared: usize,
        top_k: usize,
        most: usize,
    ) -> Result<Vec<Vec<usize>>> {
        let (units, unit) = (self.ranking.units(), self.ranking.unit());
        let sets = subsets(units, shared / unit);
        if sets.len() <= most {
            return Ok(sets);
        }
        let sets = sets.iter().map(|set| self.loss(grams, set, top_k));
        let mut sets: Vec<_> = sets.collect::<Result<_>>()?;
        sets.sort_by(|a, b| a.0.total_cmp(&b.0));
        Ok(sets.into_iter().take(most).map(|(_, set)| set).collect())
    }

    /// Returns the error of a set without a fit, and the set.
    fn loss(&self, grams: &HeadGrams, set: &[usize], top_k: usize) -> Result<(f64, Vec<usize>)> {
        Ok((grams.loss(&self.scores, self.layer_heads(set, top_k)?), set.to_vec()))
    }

    /// Returns a set of `shared` heads that no exchange improves, by the error without a fit.
    fn exchanged(&self, grams: &HeadGrams, shared: usize, top_k: usize) -> Result<Vec<usize>> {
        let (units, count) = (self.ranking.units(), shared / self.ranking.unit());
        let loss = |set: Vec<usize>| self.loss(grams, &set, top_k);
        let mut set = Vec::new();
        while set.len() < count {
            set = least(others(&set, units).map(|unit| loss(with(&set, unit))))?.1;
        }
        let mut now = loss(set)?;
        loop {
            let before = now.0;
            for place in 0..count {
                let near = exchanges_at(&now.1, place, units);
                let next = least(near.map(loss))?;
                if next.0 < now.0 {
                    now = next;
                }
            }
            // A NaN ends the search too, and the fit that follows reports it.
            if now.0.total_cmp(&before).is_ge() {
                return Ok(now.1);
            }
        }
    }

    /// Improves a set by exchanges that are judged by fits, and returns the best set.
    fn refined<B: Backend>(
        &self,
        sums: &mut ProductSums<'_, B>,
        grams: &HeadGrams,
        mut best: Found,
    ) -> Result<Found> {
        let (unit, top_k) = (self.ranking.unit(), best.heads.top_k);
        for _ in 0..ROUNDS {
            let heads = best.heads.shared.heads().step_by(unit);
            let set: Vec<usize> = heads.map(|head| head / unit).collect();
            // The best exchange of each shared head, because a fit may need any of these heads the least.
            let of_place = |place| {
                let near = exchanges_at(&set, place, self.ranking.units());
                least(near.map(|set| self.loss(grams, &set, top_k)))
            };
            let mut near = (0..set.len()).map(of_place).collect::<Result<Vec<_>>>()?;
            near.retain(|(_, near)| near.len() == set.len());
            near.sort_by(|a, b| a.0.total_cmp(&b.0));
            let near = near.into_iter().take(EXCHANGES).map(|(_, set)| set);
            let next = self.best_of(sums, near, top_k, Some(best))?;
            if next == best {
                break;
            }
            best = next;
        }
        Ok(best)
    }

    fn layer_heads(&self, set: &[usize], top_k: usize) -> Result<LayerHeads> {
        let unit = self.ranking.unit();
        let heads = set.iter().flat_map(|&of| of * unit..(of + 1) * unit);
        Ok(LayerHeads { shared: SharedHeads::from_heads(heads)?, top_k })
    }

    /// Returns the best of some sets and of `known`; the first of equally good sets.
    fn best_of<B: Backend>(
        &self,
        sums: &mut ProductSums<'_, B>,
        sets: impl Iterator<Item = Vec<usize>>,
        top_k: usize,
        known: Option<Found>,
    ) -> Result<Found> {
        let mut best = known;
        for set in sets {
            let found = self.judge(sums, &set, top_k)?;
            if best.is_none_or(|best| found.error < best.error) {
                best = Some(found);
            }
        }
        // A layer has at least one set of each size.
        best.ok_or(Error::SINGULAR)
    }

    /// Returns the error of the attention output after a fit to these shared heads.
    pub fn judge<B: Backend>(
        &self,
        sums: &mut ProductSums<'_, B>,
        set: &[usize],
        top_k: usize,
    ) -> Result<Found> {
        let heads = self.layer_heads(set, top_k)?;
        let (width, inputs) = self.judged.dim();
        let head_dim = inputs / self.ranking.heads;
        let selector = self.scores.selector(heads);
        let mask = |active: &mut Vec<bool>, order: &[u16], output: &[f32], masked: &mut [f32]| {
            selector.select(order, active);
            masked.copy_from_slice(output);
            let heads = masked.chunks_exact_mut(head_dim).zip(active);
            heads.filter(|(_, active)| !**active).for_each(|(masked, _)| masked.fill(0.0));
        };
        let orders: Vec<&[u16]> = self.scores.tokens().collect();
        let passes = self.outputs.chunks_exact(self.pass * inputs).zip(orders.chunks(self.pass));
        let mut masked = vec![0f32; self.pass * inputs];
        for ((outputs, orders), targets) in passes.zip(self.targets.chunks_exact(self.pass * width))
        {
            let tokens = masked.par_chunks_exact_mut(inputs).zip(outputs.par_chunks_exact(inputs));
            tokens.zip(orders).with_min_len(TOKENS).for_each_init(
                || vec![false; self.ranking.heads],
                |active, ((masked, output), order)| mask(active, order, output, masked),
            );
            sums.add(&masked, targets)?;
        }
        let error = sums.take().least(self.judged.view(), RIDGE)?;
        Ok(Found { heads, error })
    }

    pub fn grams(&self) -> HeadGrams {
        let inputs = self.weight.ncols();
        let elements = self.outputs.len().min(GRAM_TOKENS * inputs);
        let outputs: Array2<f32> = matrix(&self.outputs[..elements], inputs);
        HeadGrams::new(outputs.view(), self.weight.view(), self.ranking.heads)
    }
}

fn others(set: &[usize], heads: usize) -> impl Iterator<Item = usize> + '_ {
    (0..heads).filter(|head| !set.contains(head))
}

fn with(set: &[usize], head: usize) -> Vec<usize> {
    [set, &[head]].concat()
}

/// Returns the sets with the head at `place` exchanged for another head.
fn exchanges_at(
    set: &[usize],
    place: usize,
    heads: usize,
) -> impl Iterator<Item = Vec<usize>> + '_ {
    others(set, heads).map(move |head| {
        let mut set = set.to_vec();
        set[place] = head;
        set
    })
}

/// Returns the set with the least loss; the first of equally good sets.
fn least(sets: impl Iterator<Item = Result<(f64, Vec<usize>)>>) -> Result<(f64, Vec<usize>)> {
    let mut best: Option<(f64, Vec<usize>)> = None;
    for set in sets {
        let set = set?;
        if best.as_ref().is_none_or(|best| set.0 < best.0) {
            best = Some(set);
        }
    }
    Ok(best.unwrap_or((f64::INFINITY, Vec::new())))
}

/// Returns the binomial coefficient of `heads` and `shared`, or a number above [`MOST_SETS`].
fn number_of_sets(heads: usize, shared: usize) -> usize {
    let smaller = shared.min(heads - shared);
    let mut number = 1usize;
    for i in 0..smaller {
        number = number * (heads - i) / (i + 1);
        if number > MOST_SETS {
            break;
        }
    }
    number
}

fn subsets(heads: usize, shared: usize) -> Vec<Vec<usize>> {
    match shared {
        0 => vec![Vec::new()],
        _ => (shared - 1..heads)
            .flat_map(|last| subsets(last, shared - 1).into_iter().map(move |set| with(&set, last)))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use moh_kernels::Cpu;
    use moh_model::RouterKind;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;
    use crate::products::ProductBuffers;

    /// Returns a sample of heads with different importance. With `repeats`, head 4 has nearly the output of head 1.
    fn sample(seed: u64, router: RouterKind, repeats: bool) -> LayerSample {
        let (heads, head_dim, width, pass) = (8, 4, 24, 64);
        let (tokens, inputs) = (4 * pass, heads * head_dim);
        let mut rng = StdRng::seed_from_u64(seed);
        let mut random = |len: usize| (0..len).map(|_| rng.random_range(-1f32..1.0)).collect();
        let (queries, mut outputs, weight): (Vec<f32>, Vec<f32>, Vec<f32>) =
            (random(tokens * inputs), random(tokens * inputs), random(width * inputs));
        for output in outputs.chunks_exact_mut(inputs) {
            for (at, value) in output.iter_mut().enumerate() {
                *value *= 1.0 + (at / head_dim * 5 % 7) as f32;
            }
            if !repeats {
                continue;
            }
            let (first, others) = output.split_at_mut(4 * head_dim);
            let copied = others[..head_dim].iter_mut().zip(&first[head_dim..]);
            copied.for_each(|(value, other)| *value = 0.9 * other + 0.1 * *value);
        }
        let ranking = Ranking { router, heads, group: 2 };
        let mut scores = Scores::new(ranking);
        scores.add(&queries, head_dim);
        let weight = matrix::<f32>(&weight, inputs);
        let targets = matrix::<f32>(&outputs, inputs).dot(&weight.t());
        LayerSample::new(scores, ranking, outputs, targets.view(), weight, pass)
    }

    fn sums(sample: &LayerSample) -> ProductSums<'static, Cpu> {
        let buffers = ProductBuffers::new(&Cpu, sample.pass, 32, 24).unwrap();
        ProductSums::new(&Cpu, buffers, &|| false)
    }

    /// Returns the set that is found if there are too many sets to judge all.
    fn best_by_exchange(
        sample: &LayerSample,
        sums: &mut ProductSums<'static, Cpu>,
        shared: usize,
        top_k: usize,
    ) -> Found {
        let grams = sample.grams();
        let set = sample.exchanged(&grams, shared, top_k).unwrap();
        let found = sample.judge(sums, &set, top_k).unwrap();
        sample.refined(sums, &grams, found).unwrap()
    }

    #[test]
    fn exchanges_find_sets_about_as_good_as_all() {
        for seed in 0..4 {
            for (router, shared, top_k) in [
                (RouterKind::QueryNorm, 4, 2),
                (RouterKind::QueryNorm, 2, 2),
                (RouterKind::Static, 3, 0),
                (RouterKind::Group, 4, 2),
                (RouterKind::Group, 2, 2),
            ] {
                let sample = sample(seed, router, false);
                let mut sums = sums(&sample);
                let active = shared + top_k;
                let all = sample.best_set(&mut sums, &[shared], active).unwrap();
                let found = best_by_exchange(&sample, &mut sums, shared, top_k);
                assert_eq!((found.heads.shared.len(), found.heads.top_k), (shared, top_k));
                let of_group = |head: usize| found.heads.shared.contains(head);
                for group in 0..4 {
                    let (first, second) = (of_group(2 * group), of_group(2 * group + 1));
                    assert!(router != RouterKind::Group || first == second);
                }
                let (least, error) = (all.error, found.error);
                assert!(
                    error >= least && error <= 1.1 * least,
                    "seed {seed}: {error}, not {least}"
                );
            }
        }
    }

    #[test]
    fn a_head_that_repeats_another_may_be_overlooked() {
        // Only a fit shows that head 1 can replace head 4. So exchanges end at a set that is worse than the best set,
        // but not worse than twice its error.
        let mut largest = 1f64;
        for seed in 0..4 {
            let sample = sample(seed, RouterKind::QueryNorm, true);
            let mut sums = sums(&sample);
            let all = sample.best_set(&mut sums, &[4], 6).unwrap();
            let found = best_by_exchange(&sample, &mut sums, 4, 2);
            largest = largest.max(found.error / all.error);
        }
        assert!(largest < 2.0, "{largest}");
    }

    #[test]
    fn all_heads_leave_no_error() {
        let sample = sample(9, RouterKind::QueryNorm, true);
        let mut sums = sums(&sample);
        let found = sample.judge(&mut sums, &[0, 3, 5], 5).unwrap();
        assert!(found.error < 1e-6, "{}", found.error);
        let fewer = sample.judge(&mut sums, &[0, 3, 5], 4).unwrap();
        assert!(fewer.error > 1e-4, "{}", fewer.error);
    }

    #[test]
    fn sums_of_outputs_keep_squares_about() {
        let mut rng = StdRng::seed_from_u64(2);
        let narrow = Array2::from_shape_fn((OUTPUTS, 3), |_| rng.random_range(-1f32..1.0));
        assert_eq!(sums_of_rows(narrow.view()), narrow.mapv(f64::from));
        let wide = Array2::from_shape_fn((16 * OUTPUTS, 20), |_| rng.random_range(-1f32..1.0));
        let square = |sums: &Array2<f64>| sums.iter().map(|x| x * x).sum::<f64>();
        let ratio = square(&sums_of_rows(wide.view())) / square(&wide.mapv(f64::from));
        assert!((ratio - 1.0).abs() < 0.1, "{ratio}");
    }

    #[test]
    fn sets_are_counted_and_listed() {
        for heads in 1..9 {
            for shared in 0..=heads {
                let sets = subsets(heads, shared);
                assert_eq!(sets.len(), number_of_sets(heads, shared));
                let mut unique = sets.clone();
                unique.sort();
                unique.dedup();
                assert_eq!(unique.len(), sets.len());
                assert!(sets.iter().all(|set| set.len() == shared && set.is_sorted()));
            }
        }
        assert!(number_of_sets(64, 32) > MOST_SETS && number_of_sets(32, 1) == 32);
        assert_eq!(exchanges_at(&[1, 4], 1, 5).count(), 3);
    }
}
