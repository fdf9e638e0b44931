//! The CPU bodies of AdamW and of the norm for its clipping.

use half::bf16;
use rayon::prelude::*;

use super::remainder::{join, split};
use super::{AdamWUpdate, Constants, Optimizer};
use crate::compiled::compiled;
use crate::math::sum_of_squares;
use crate::simd::vectorized;
use crate::{Cpu, Element, Result, check_len};

/// Elements per task.
const CHUNK: usize = 16 * 1024;

impl Constants {
    /// Returns the updated parameter; updates `m` and `v` in place.
    #[inline(always)]
    fn update(&self, parameter: f32, gradient: f32, m: &mut f32, v: &mut f32) -> f32 {
        let &Constants { clip, keep, rate, root_correction, .. } = self;
        let &Constants { beta1, beta2, share1, share2, eps, .. } = self;
        let gradient = gradient * clip;
        *m = beta1 * *m + share1 * gradient;
        *v = beta2 * *v + share2 * gradient * gradient;
        let denominator = v.sqrt() * root_correction + eps;
        parameter * keep - rate * *m / denominator
    }
}

/// Access to the f32 parameters of a task.
trait Parameters {
    fn len(&self) -> usize;
    fn get(&self, i: usize) -> f32;
    fn set(&mut self, i: usize, value: f32);
}

impl<W: Element> Parameters for &mut [W] {
    #[inline(always)]
    fn len(&self) -> usize {
        <[W]>::len(self)
    }
    #[inline(always)]
    fn get(&self, i: usize) -> f32 {
        self[i].to_f32()
    }
    #[inline(always)]
    fn set(&mut self, i: usize, value: f32) {
        self[i] = W::from_f32(value);
    }
}

/// f32 parameters, each stored as a weight and its remainder.
struct Joined<'a> {
    weights: &'a mut [bf16],
    remainders: &'a mut [i16],
}

impl Parameters for Joined<'_> {
    #[inline(always)]
    fn len(&self) -> usize {
        self.weights.len().min(self.remainders.len())
    }
    #[inline(always)]
    fn get(&self, i: usize) -> f32 {
        join(self.weights[i], self.remainders[i])
    }
    #[inline(always)]
    fn set(&mut self, i: usize, value: f32) {
        (self.weights[i], self.remainders[i]) = split(value);
    }
}

impl Optimizer for Cpu {
    fn squared_norms<G: Element>(&self, xs: &[&[G]], out: &mut [f64]) -> Result<()> {
        compiled!(squared_norms::<G>(xs: &[&[G]], out: &mut [f64]))
    }

    fn adamw<T: Element, G: Element, S: Element>(
        &self,
        args: AdamWUpdate<'_, Self, T, G, S>,
    ) -> Result<()> {
        compiled!(adamw::<T, G, S>(args: AdamWUpdate<'_, Cpu, T, G, S>))
    }
}

fn squared_norms<G: Element>(xs: &[&[G]], out: &mut [f64]) -> Result<()> {
    check_len("squared_norms", "out", out.len(), 1)?;
    for x in xs {
        let partial: Vec<f64> =
            x.par_chunks(CHUNK).map(|chunk| vectorized!(sum_of_squares::<16, _>(chunk))).collect();
        out[0] += partial.iter().sum::<f64>();
    }
    Ok(())
}

fn adamw<T: Element, G: Element, S: Element>(args: AdamWUpdate<'_, Cpu, T, G, S>) -> Result<()> {
    args.check()?;
    let AdamWUpdate { step, gradients, weights, remainder, .. } = args;
    let AdamWUpdate { first_moment, second_moment, .. } = args;
    let rule = Constants::new(step);
    let state = (
        gradients.par_chunks(CHUNK),
        first_moment.par_chunks_mut(CHUNK),
        second_moment.par_chunks_mut(CHUNK),
    );
    match remainder {
        None => {
            (state.0, state.1, state.2, weights.par_chunks_mut(CHUNK))
                .into_par_iter()
                .for_each(|(g, m, v, weights)| vectorized!(update(&rule, g, m, v, weights)));
        }
        Some(remainder) => {
            // `check` has ensured that the weights are bf16.
            let weights = bytemuck::cast_slice_mut::<T, bf16>(weights);
            let exact = (weights.par_chunks_mut(CHUNK), remainder.par_chunks_mut(CHUNK));
            (state.0, state.1, state.2, exact.0, exact.1).into_par_iter().for_each(
                |(g, m, v, weights, remainders)| {
                    vectorized!(update(&rule, g, m, v, Joined { weights, remainders }));
                },
            );
        }
    }
    Ok(())
}

#[inline(always)]
fn update<G: Element, M: Element>(
    rule: &Constants,
    gradients: &[G],
    first_moment: &mut [M],
    second_moment: &mut [M],
    mut parameters: impl Parameters,
) {
    let len = gradients.len();
    let (first, second) = (&mut first_moment[..len], &mut second_moment[..len]);
    assert!(parameters.len() >= len, "a task's slices have equal lengths");
    for i in 0..len {
        let (mut m, mut v) = (first[i].to_f32(), second[i].to_f32());
        let gradient = gradients[i].to_f32();
        parameters.set(i, rule.update(parameters.get(i), gradient, &mut m, &mut v));
        (first[i], second[i]) = (M::from_f32(m), M::from_f32(v));
    }
}
