//! The search for a layer's shared heads.
//!
//! A set is judged by the error of the layer's attention output after the best output projection for the
//! heads that tokens then compute ([`Products::fit`]). Where a layer has few sets all are judged. Else a
//! set is built from none by adding the head that helps most, and improved by exchanging a shared head
//! for another one; both judge by the error without a new projection ([`HeadGrams::loss`]), which needs no
//! fit. Then the best exchange of each shared head by that measure is judged by the fit, round after round.

use moh_kernels::Backend;
use moh_kernels::router::SharedHeads;
use moh_model::{LayerHeads, ModelConfig, MohConfig};
use ndarray::{Array2, Axis, s};

use crate::head_grams::HeadGrams;
use crate::products::ProductSums;
use crate::selection::{Ranking, Scores};
use crate::{Error, RIDGE, Result};

/// Most sets of one size of which each is judged by a fit.
const MOST_SETS: usize = 128;
/// Tokens by which sets are judged without a fit.
const GRAM_TOKENS: usize = 4096;
/// Most rounds of exchanges that are judged by fits; they end where none is better.
const ROUNDS: usize = 8;

/// The heads' outputs of a layer for some tokens, and the attention output that they had made.
pub(crate) struct LayerSample {
    pub scores: Scores,
    pub ranking: Ranking,
    /// `[tokens, heads * head_dim]`.
    pub outputs: Array2<f32>,
    /// The dense layer's attention output, `[tokens, width]`.
    pub targets: Vec<f32>,
    /// The output projection, `[width, heads * head_dim]`.
    pub weight: Array2<f64>,
    /// Tokens of a pass.
    pub pass: usize,
}

/// A set of shared heads, and the error of the layer's attention output with it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Found {
    pub heads: LayerHeads,
    /// Relative squared error after a fit.
    pub error: f64,
}

impl LayerSample {
    /// The best set of `shared` heads beside `top_k` routed ones.
    pub fn best_set<B: Backend>(
        &self,
        sums: &mut ProductSums<'_, B>,
        shared: usize,
        top_k: usize,
    ) -> Result<Found> {
        let (units, count) = (self.units(), shared / self.ranking.unit());
        if number_of_sets(units, count) > MOST_SETS {
            return self.best_by_exchange(sums, shared, top_k);
        }
        let sets = subsets(units, count).into_iter().filter(|set| self.is_even(set));
        self.best_of(sums, sets, top_k, None)
    }

    /// A good set, without judging all.
    fn best_by_exchange<B: Backend>(
        &self,
        sums: &mut ProductSums<'_, B>,
        shared: usize,
        top_k: usize,
    ) -> Result<Found> {
        let grams = self.grams();
        let loss = |set: &[usize]| {
            let heads = self.layer_heads(set, top_k)?;
            Ok::<_, Error>((grams.loss(&self.scores, heads), set.to_vec()))
        };
        let (units, count) = (self.units(), shared / self.ranking.unit());
        let mut set = self.first_of_parts(count);
        while set.len() < count {
            let longer = others(&set, units).map(|unit| with(&set, unit));
            set = least(longer.map(|set| loss(&set)))?.1;
        }
        let mut now = loss(&set)?;
        loop {
            let near = exchanges(&now.1, units).filter(|set| self.is_even(set));
            let next = least(near.map(|set| loss(&set)))?;
            if next.0 >= now.0 {
                break;
            }
            now = next;
        }
        let mut best = self.judge(sums, &now.1, top_k)?;
        for _ in 0..ROUNDS {
            let unit = self.ranking.unit();
            let set: Vec<usize> =
                best.heads.shared.heads().step_by(unit).map(|head| head / unit).collect();
            // Of each shared head the best exchange: a fit may miss that head the least.
            let of_place = |place| {
                let near = exchanges_at(&set, place, units).filter(|set| self.is_even(set));
                least(near.map(|set| loss(&set)))
            };
            let near = (0..count).map(of_place).collect::<Result<Vec<_>>>()?;
            let near = near.into_iter().map(|(_, set)| set).filter(|set| set.len() == count);
            let next = self.best_of(sums, near, top_k, Some(best))?;
            if next == best {
                break;
            }
            best = next;
        }
        Ok(best)
    }

    /// Heads, or groups of heads that are shared together.
    fn units(&self) -> usize {
        self.ranking.heads / self.ranking.unit()
    }

    /// Whether every part of the heads shares as many.
    fn is_even(&self, set: &[usize]) -> bool {
        let parts = self.ranking.parts();
        let size = self.units() / parts;
        let shared = |part| set.iter().filter(|&&unit| unit / size == part).count();
        (0..parts).all(|part| shared(part) * parts == set.len())
    }

    /// The first heads of each part, where the heads have several; else none yet.
    fn first_of_parts(&self, count: usize) -> Vec<usize> {
        let parts = self.ranking.parts();
        let size = self.units() / parts;
        match parts {
            1 => Vec::new(),
            _ => (0..parts)
                .flat_map(|part| (0..count / parts).map(move |i| part * size + i))
                .collect(),
        }
    }

    fn layer_heads(&self, set: &[usize], top_k: usize) -> Result<LayerHeads> {
        let unit = self.ranking.unit();
        let heads = set.iter().flat_map(|&of| of * unit..(of + 1) * unit);
        Ok(LayerHeads { shared: SharedHeads::from_heads(heads)?, top_k })
    }

    /// The best of some sets, and of `known`; the first of equals.
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
        best.ok_or(Error::Singular)
    }

    /// The error of the attention output after a fit to these shared heads.
    pub fn judge<B: Backend>(
        &self,
        sums: &mut ProductSums<'_, B>,
        set: &[usize],
        top_k: usize,
    ) -> Result<Found> {
        let heads = self.layer_heads(set, top_k)?;
        let (width, inputs) = self.weight.dim();
        let head_dim = inputs / self.ranking.heads;
        let mut active = vec![false; self.ranking.heads];
        let mut tokens = self.scores.tokens();
        let passes = self.outputs.axis_chunks_iter(Axis(0), self.pass);
        for (outputs, targets) in passes.zip(self.targets.chunks_exact(self.pass * width)) {
            let mut masked: Vec<f32> = outputs.iter().copied().collect();
            for (output, scores) in masked.chunks_exact_mut(inputs).zip(tokens.by_ref()) {
                self.scores.select(scores, heads, &mut active);
                let heads = output.chunks_exact_mut(head_dim).zip(&active);
                heads.filter(|(_, active)| !**active).for_each(|(output, _)| output.fill(0.0));
            }
            sums.add(&masked, targets)?;
        }
        let error = sums.take().fit(self.weight.view(), RIDGE)?.error;
        Ok(Found { heads, error })
    }

    fn grams(&self) -> HeadGrams {
        let tokens = self.outputs.nrows().min(GRAM_TOKENS);
        let weight = self.weight.mapv(|weight| weight as f32);
        HeadGrams::new(self.outputs.slice(s![..tokens, ..]), weight.view(), self.ranking.heads)
    }
}

fn others(set: &[usize], heads: usize) -> impl Iterator<Item = usize> + '_ {
    (0..heads).filter(|head| !set.contains(head))
}

fn with(set: &[usize], head: usize) -> Vec<usize> {
    [set, &[head]].concat()
}

/// The sets with one head exchanged for another.
fn exchanges(set: &[usize], heads: usize) -> impl Iterator<Item = Vec<usize>> + '_ {
    (0..set.len()).flat_map(move |place| exchanges_at(set, place, heads))
}

/// The sets with the head at one place exchanged for another.
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

/// The set with the least loss, the first of equals.
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

/// h over s, or a number above [`MOST_SETS`].
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

/// Most fits by which the shared heads of layer `layer` are chosen, as many as `moh` shares.
pub fn most_fits(config: &ModelConfig, moh: &MohConfig, layer: usize) -> usize {
    let unit = Ranking::new(moh.router, config).unit();
    let (units, shared) = (config.num_attention_heads / unit, moh.layer(layer).shared.len() / unit);
    match number_of_sets(units, shared) {
        _ if shared == units => 0,
        all if all <= MOST_SETS => all,
        _ => 1 + ROUNDS * shared,
    }
}

/// All sets of `shared` of the heads.
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
    use crate::matrix;

    /// Heads of different importance; with `repeats`, head 4 has nearly the output of head 1.
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
        let (outputs, weight) = (matrix::<f32>(&outputs, inputs), matrix::<f64>(&weight, inputs));
        let exact = outputs.mapv(f64::from).dot(&weight.t());
        let targets = exact.iter().map(|&y| y as f32).collect();
        LayerSample { scores, ranking, outputs, targets, weight, pass }
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
                (RouterKind::WithinGroup, 4, 4),
            ] {
                let sample = sample(seed, router, false);
                let mut sums = ProductSums::new(&Cpu, sample.pass, 32, 24).unwrap();
                let all = sample.best_set(&mut sums, shared, top_k).unwrap();
                let found = sample.best_by_exchange(&mut sums, shared, top_k).unwrap();
                assert_eq!((found.heads.shared.len(), found.heads.top_k), (shared, top_k));
                let of_group = |head: usize| found.heads.shared.contains(head);
                for group in 0..4 {
                    let (first, second) = (of_group(2 * group), of_group(2 * group + 1));
                    match router {
                        RouterKind::Group => assert_eq!(first, second),
                        RouterKind::WithinGroup => assert!(first != second),
                        _ => {}
                    }
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
        // Only a fit sees that head 1 can take the place of head 4: exchanges end at a set that is
        // worse than the best one, but not worse than twice its error.
        let mut largest = 1f64;
        for seed in 0..4 {
            let sample = sample(seed, RouterKind::QueryNorm, true);
            let mut sums = ProductSums::new(&Cpu, sample.pass, 32, 24).unwrap();
            let all = sample.best_set(&mut sums, 4, 2).unwrap();
            let found = sample.best_by_exchange(&mut sums, 4, 2).unwrap();
            largest = largest.max(found.error / all.error);
        }
        assert!(largest < 2.0, "{largest}");
    }

    #[test]
    fn all_heads_leave_no_error() {
        let sample = sample(9, RouterKind::QueryNorm, true);
        let mut sums = ProductSums::new(&Cpu, sample.pass, 32, 24).unwrap();
        let found = sample.judge(&mut sums, &[0, 3, 5], 5).unwrap();
        assert!(found.error < 1e-6, "{}", found.error);
        let fewer = sample.judge(&mut sums, &[0, 3, 5], 4).unwrap();
        assert!(fewer.error > 1e-4, "{}", fewer.error);
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
        assert_eq!(exchanges(&[1, 4], 5).count(), 6);
    }
}
