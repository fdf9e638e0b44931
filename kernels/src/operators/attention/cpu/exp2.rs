//! Powers of 2, which the softmax uses instead of powers of e.

use pulp::Simd;

/// Coefficients of a polynomial of degree 5 for 2^f, |f| <= 1/2, from f^5 down to f. They minimise
/// the largest relative error, with the constant coefficient fixed at 1.
const COEFFICIENTS: [f32; 5] =
    [1.327_647_2e-3, 9.675_541e-3, 5.550_713_3e-2, 2.402_212e-1, 6.931_469_7e-1];

/// Returns 2^x with a relative error below 2.5e-7 for -126 <= x <= 127, and 0 below -150.
#[inline(always)]
pub(super) fn exp2<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    #[cfg(target_arch = "x86_64")]
    if std::any::TypeId::of::<S>() == std::any::TypeId::of::<pulp::x86::V4>() {
        // SAFETY: a `V4` exists only if the machine has the instructions, and its vectors have this
        // type.
        #[allow(unsafe_code)]
        return unsafe {
            let power = avx512::exp2(std::mem::transmute_copy(&x));
            std::mem::transmute_copy(&power)
        };
    }
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to the nearest integer
    let round = simd.splat_f32s(ROUND);
    let shifted = simd.add_f32s(x, round);
    let f = simd.sub_f32s(x, simd.sub_f32s(shifted, round));
    let mut p = simd.splat_f32s(COEFFICIENTS[0]);
    for coefficient in &COEFFICIENTS[1..] {
        p = simd.mul_add_e_f32s(p, f, simd.splat_f32s(*coefficient));
    }
    p = simd.mul_add_e_f32s(p, f, simd.splat_f32s(1.0));
    // The low bits of `shifted` are k; shifted into the exponent they multiply by 2^k.
    let k = simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(shifted), simd.splat_u32s(23));
    let scaled = simd.transmute_f32s_u32s(simd.add_u32s(simd.transmute_u32s_f32s(p), k));
    // With this order of operands the result of a NaN is a NaN.
    let tiny = simd.less_than_f32s(x, simd.splat_f32s(-126.0));
    simd.select_f32s(tiny, simd.splat_f32s(0.0), scaled)
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;

    /// Computes the same with two thirds of the instructions: AVX-512 has an instruction that rounds and another that
    /// multiplies by a power of 2.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn exp2(x: __m512) -> __m512 {
        let k = _mm512_roundscale_ps::<0>(x);
        let f = _mm512_sub_ps(x, k);
        let mut p = _mm512_set1_ps(super::COEFFICIENTS[0]);
        for coefficient in &super::COEFFICIENTS[1..] {
            p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(*coefficient));
        }
        p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0));
        _mm512_scalef_ps(p, k)
    }
}

#[cfg(test)]
mod tests {
    use pulp::{Arch, WithSimd};

    use super::*;

    struct Powers<'a>(&'a mut [f32]);

    impl WithSimd for Powers<'_> {
        type Output = ();

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) {
            for x in S::as_mut_simd_f32s(self.0).0 {
                *x = exp2(simd, *x);
            }
        }
    }

    #[test]
    fn powers_are_those_of_the_f64_function_or_zero() {
        let exponents: Vec<f32> = (-125_999..=127_000).map(|i| i as f32 * 1e-3).collect();
        let mut ends = [-151.0, -1e30, f32::MIN, f32::NAN].repeat(4);
        for arch in crate::simd::tests::kinds() {
            let mut powers = exponents[..exponents.len() / 16 * 16].to_vec();
            arch.dispatch(Powers(&mut powers));
            for (&power, &x) in powers.iter().zip(&exponents) {
                let exact = f64::from(x).exp2();
                let error = ((f64::from(power) - exact) / exact).abs();
                assert!(error < 2.5e-7, "2^{x} is off by {error:e}");
            }
        }
        Arch::new().dispatch(Powers(&mut ends));
        assert_eq!(ends[..3], [0.0; 3]);
        assert!(ends[3].is_nan());
    }
}
