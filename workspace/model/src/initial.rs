//! Initial weights, as Hugging Face initialises a Llama: normally distributed matrices with the configuration's
//! standard deviation, and norms of 1. A tensor's values depend only on the seed and its name.

use rayon::prelude::*;

/// Number of values that one task writes: an even number, so that tasks do not divide pairs.
const CHUNK: usize = 1 << 15;

/// A generator of uniform 64-bit integers (SplitMix64, Steele et al. 2014).
struct SplitMix(u64);

impl SplitMix {
    /// The increment of the state for each integer.
    const INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;

    /// Returns the generator after `count` more integers.
    fn after(&self, count: usize) -> Self {
        SplitMix(self.0.wrapping_add((count as u64).wrapping_mul(Self::INCREMENT)))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(Self::INCREMENT);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a uniform number in (0, 1].
    fn unit(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }
}

/// Writes a tensor's initial values.
pub fn initialize(seed: u64, deviation: f64, name: &str, shape: &[usize], values: &mut [f32]) {
    if shape.len() < 2 {
        values.fill(1.0);
        return;
    }
    let keyed = name
        .bytes()
        .fold(seed ^ 0x6d6f_685f_696e_6974, |state, byte| SplitMix(state ^ u64::from(byte)).next());
    let uniform = SplitMix(keyed);
    values.par_chunks_mut(CHUNK).enumerate().for_each(|(index, chunk)| {
        fill_normal(uniform.after(index * CHUNK), deviation, chunk);
    });
}

/// Writes normal values. The Box-Muller transform makes each pair of them from two uniform numbers.
fn fill_normal(mut uniform: SplitMix, deviation: f64, values: &mut [f32]) {
    for pair in values.chunks_mut(2) {
        let radius = deviation * (-2.0 * uniform.unit().ln()).sqrt();
        let (sin, cos) = (std::f64::consts::TAU * uniform.unit()).sin_cos();
        for (value, part) in pair.iter_mut().zip([cos, sin]) {
            *value = (radius * part) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(name: &str) -> Vec<f32> {
        let mut values = vec![0.0; 9999];
        initialize(7, 0.02, name, &[101, 99], &mut values);
        values
    }

    #[test]
    fn matrices_are_normal_and_differ_by_name() {
        let values = matrix("a");
        let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / 9999.0;
        let variance = values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / 9999.0;
        assert!(mean.abs() < 1e-3 && (variance.sqrt() - 0.02).abs() < 1e-3);
        assert_eq!(values, matrix("a"));
        assert_ne!(values, matrix("b"));
    }

    #[test]
    fn chunks_continue_each_other() {
        let mut whole = vec![0.0; 2 * CHUNK + 3];
        fill_normal(SplitMix(5), 1.0, &mut whole);
        let mut parts = vec![0.0; whole.len()];
        for (index, chunk) in parts.chunks_mut(CHUNK).enumerate() {
            fill_normal(SplitMix(5).after(index * CHUNK), 1.0, chunk);
        }
        assert_eq!(whole, parts);
    }
}
