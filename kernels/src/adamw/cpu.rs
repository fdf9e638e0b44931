//! The CPU bodies of AdamW and of the norm that its clipping needs.

use rayon::prelude::*;

use super::{AdamW, clip_factor};
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

/// The constants of a step as the inner loop uses them.
struct Constants {
    clip: f32,
    keep: f32,
    rate: f32,
    root_correction: f32,
    beta1: f32,
    beta2: f32,
    /// 1 - beta, subtracted in f64: beta2's rounding to f32 is large beside the difference.
    share1: f32,
    share2: f32,
    eps: f32,
}

impl Constants {
    fn new(step: &AdamW, squared_norm: f64) -> Self {
        let exponent = i32::try_from(step.step).unwrap_or(i32::MAX);
        Constants {
            clip: clip_factor(step.clip_norm, squared_norm) as f32,
            keep: (1.0 - step.learning_rate * step.weight_decay) as f32,
            rate: (step.learning_rate / (1.0 - step.beta1.powi(exponent))) as f32,
            root_correction: (1.0 / (1.0 - step.beta2.powi(exponent)).sqrt()) as f32,
            beta1: step.beta1 as f32,
            beta2: step.beta2 as f32,
            share1: (1.0 - step.beta1) as f32,
            share2: (1.0 - step.beta2) as f32,
            eps: step.eps as f32,
        }
    }

    /// The updated parameter; `m` and `v` are updated in place.
    #[inline(always)]
    fn update(&self, parameter: f32, gradient: f32, m: &mut f32, v: &mut f32) -> f32 {
        let gradient = gradient * self.clip;
        *m = self.beta1 * *m + self.share1 * gradient;
        *v = self.beta2 * *v + self.share2 * gradient * gradient;
        let denominator = v.sqrt() * self.root_correction + self.eps;
        parameter * self.keep - self.rate * *m / denominator
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
    let len = gradients.len();
    check_len("adamw", "squared_norm", squared_norm.len(), 1)?;
    check_len("adamw", "weights", weights.len(), len)?;
    check_len("adamw", "first_moment", first_moment.len(), len)?;
    check_len("adamw", "second_moment", second_moment.len(), len)?;
    let constants = Constants::new(step, squared_norm[0]);
    let state = (
        gradients.par_chunks(CHUNK),
        first_moment.par_chunks_mut(CHUNK),
        second_moment.par_chunks_mut(CHUNK),
        weights.par_chunks_mut(CHUNK),
    );
    match master {
        None => state.into_par_iter().for_each(|(g, m, v, w)| {
            vectorized!(update_weights(&constants, g, m, v, w));
        }),
        Some(master) => {
            check_len("adamw", "master", master.len(), len)?;
            (state.0, state.1, state.2, state.3, master.par_chunks_mut(CHUNK))
                .into_par_iter()
                .for_each(|(g, m, v, w, exact)| {
                    vectorized!({
                        update_weights(&constants, g, m, v, exact);
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
    constants: &Constants,
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
        weights[i] = W::from_f32(constants.update(weights[i].to_f32(), gradient, &mut m, &mut v));
        (first[i], second[i]) = (M::from_f32(m), M::from_f32(v));
    }
}
