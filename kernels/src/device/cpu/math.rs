//! Elementary functions in forms that the compiler vectorises.

use crate::scalar::Element;

/// Returns e^x to within 2 ulp for x <= 88; 0 below -87.
///
/// Range reduction x = k ln 2 + r, |r| <= ln 2 / 2, and a polynomial of degree 6 for e^r. A fused
/// operation is one instruction within [`vectorized!`](crate::simd::vectorized) on machines that
/// have the instruction (x86-64 since 2013, every aarch64), and a slow function with the same result elsewhere.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to the nearest integer
    const LN2_HIGH: f32 = 0.693_359_4; // few bits, so that k * LN2_HIGH is exact
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = x.clamp(-87.0, 88.0);
    let shifted = clamped.mul_add(std::f32::consts::LOG2_E, ROUND);
    let k = shifted - ROUND;
    let r = k.mul_add(-LN2_LOW, k.mul_add(-LN2_HIGH, clamped));
    let p = 1.388_888_9e-3_f32;
    let p = p.mul_add(r, 8.333_334e-3);
    let p = p.mul_add(r, 4.166_666_6e-2);
    let p = p.mul_add(r, 1.666_666_7e-1);
    let p = p.mul_add(r, 0.5);
    let p = p.mul_add(r, 1.0);
    let p = p.mul_add(r, 1.0);
    // The low mantissa bits of `shifted` are k in two's complement; shifted into the exponent they
    // multiply by 2^k.
    let scaled = f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23));
    if x < -87.0 { 0.0 } else { scaled }
}

/// Returns 1 / (1 + e^-x).
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Returns the sum of a slice in sixteen interleaved partial sums, a fixed order that vectorises.
#[inline(always)]
pub(crate) fn sum(x: &[f32]) -> f32 {
    let (chunks, rest) = x.as_chunks::<16>();
    let mut partial = [0f32; 16];
    for chunk in chunks {
        for lane in 0..16 {
            partial[lane] += chunk[lane];
        }
    }
    for (sum, value) in partial.iter_mut().zip(rest) {
        *sum += value;
    }
    partial.iter().sum()
}

/// Returns the largest element of a slice, in sixteen interleaved parts; -inf if the slice is empty. NaNs are ignored.
#[inline(always)]
pub(crate) fn largest(x: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if a > b { a } else { b };
    let (chunks, rest) = x.as_chunks::<16>();
    let mut lanes = [f32::NEG_INFINITY; 16];
    for chunk in chunks {
        for lane in 0..16 {
            lanes[lane] = larger(chunk[lane], lanes[lane]);
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |largest, &value| larger(value, largest))
}

/// Returns the sum of sixteen partial sums, by halves: each step is a vector operation.
#[inline(always)]
pub(crate) fn total(mut partial: [f32; 16]) -> f32 {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            partial[i] += partial[i + half];
        }
    }
    partial[0]
}

/// Returns the sum of the squares of a slice in `LANES` interleaved partial sums, in f64: the squares of
/// the largest elements do not overflow.
#[inline(always)]
pub(crate) fn sum_of_squares<const LANES: usize, T: Element>(x: &[T]) -> f64 {
    let square = |value: T| f64::from(value.to_f32()) * f64::from(value.to_f32());
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut partial = [0f64; LANES];
    for chunk in chunks {
        for (sum, &value) in partial.iter_mut().zip(chunk) {
            *sum += square(value);
        }
    }
    partial.iter().sum::<f64>() + rest.iter().map(|&value| square(value)).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_ulp_of_the_f64_function() {
        for i in -870_000..=880_000 {
            let x = i as f32 * 1e-4;
            let exact = (x as f64).exp();
            let error = ((exp(x) as f64 - exact) / exact).abs();
            assert!(error < 2.4e-7, "exp({x}) is off by {error:e}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-88.0), 0.0);
    }

    #[test]
    fn reductions_cover_the_rest_of_the_last_chunk() {
        let x: Vec<f32> = (1..=19).map(|i| i as f32).collect();
        assert_eq!(sum(&x), 190.0);
        assert_eq!(total(std::array::from_fn(|i| x[i])), 136.0);
    }
}
