//! The CPU bodies of AdamW and of the norm that its clipping needs.

use rayon::prelude::*;

use super::{AdamW, Constants, check, clip_factor};
use crate::error::{Result, check_len};
use crate::math::sum_of_squares;
use crate::scalar::Element;
use crate::simd::vectorized;

/// Numbers that one task updates or sums.
const CHUNK: usize = 16 * 1024;

pub(crate) fn squared_norm<G: Element>(x: &[G], out: &mut [f64]) -> Result<()> {
    check_len("squared_norm", "out", out.len(), 1)?;
    let partial: Vec<f64> =
        x.par_chunks(CHUNK).map(|chunk| vectorized!(sum_of_squares::<16, _>(chunk))).collect();
    out[0] += partial.iter().sum::<f64>();
    Ok(())
}

/// The constants of a step and its clipping.
struct Rule {
    constants: Constants,
    clip: f32,
}

impl Rule {
    /// The updated parameter; `m` and `v` are updated in place.
    #[inline(always)]
    fn update(&self, parameter: f32, gradient: f32, m: &mut f32, v: &mut f32) -> f32 {
        let Constants { keep, rate, root_correction, beta1, beta2, share1, share2, eps } =
            self.constants;
        let gradient = gradient * self.clip;
        *m = beta1 * *m + share1 * gradient;
        *v = beta2 * *v + share2 * gradient * gradient;
        let denominator = v.sqrt() * root_correction + eps;
        parameter * keep - rate * *m / denominator
    }
}

#[allow(clippy::too_many_arguments)]
pub(crate) fn adamw<T: Element, G: Element, M: Element>(
    step: &AdamW,
    squared_norm: &[f64],
    gradients: &[G],
    weights: &mut [T],
    master: Option<&mut [f32]>,
    first_moment: &mut [M],
    second_moment: &mut [M],
) -> Result<()> {
    check(
        gradients.len(),
        squared_norm.len(),
        weights.len(),
        master.as_ref().map(|master| master.len()),
        [first_moment.len(), second_moment.len()],
    )?;
    let clip = clip_factor(step.clip_norm, squared_norm[0]) as f32;
    let rule = Rule { constants: Constants::new(step), clip };
    let state = (
        gradients.par_chunks(CHUNK),
        first_moment.par_chunks_mut(CHUNK),
        second_moment.par_chunks_mut(CHUNK),
        weights.par_chunks_mut(CHUNK),
    );
    match master {
        None => state.into_par_iter().for_each(|(g, m, v, w)| {
            vectorized!(update_weights(&rule, g, m, v, w));
        }),
        Some(master) => {
            (state.0, state.1, state.2, state.3, master.par_chunks_mut(CHUNK))
                .into_par_iter()
                .for_each(|(g, m, v, w, exact)| {
                    vectorized!({
                        update_weights(&rule, g, m, v, exact);
                        for (w, &exact) in w.iter_mut().zip(&*exact) {
                            *w = T::from_f32(exact);
                        }
                    });
                });
        }
    }
    Ok(())
}

#[inline(always)]
fn update_weights<W: Element, G: Element, M: Element>(
    rule: &Rule,
    gradients: &[G],
    first_moment: &mut [M],
    second_moment: &mut [M],
    weights: &mut [W],
) {
    let len = gradients.len();
    let (first, second) = (&mut first_moment[..len], &mut second_moment[..len]);
    let weights = &mut weights[..len];
    for i in 0..len {
        let (mut m, mut v) = (first[i].to_f32(), second[i].to_f32());
        let gradient = gradients[i].to_f32();
        weights[i] = W::from_f32(rule.update(weights[i].to_f32(), gradient, &mut m, &mut v));
        (first[i], second[i]) = (M::from_f32(m), M::from_f32(v));
    }
}
