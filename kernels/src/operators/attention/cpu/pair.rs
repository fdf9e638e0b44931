//! Pairs of bf16; AVX512-BF16 multiplies them and adds in f32, at twice the rate of f32.

use std::arch::x86_64::*;

use bytemuck::{Pod, Zeroable};
use pulp::x86::V4;
use pulp::{Arch, Simd, WithSimd};

use super::factor::{Block, Factor, NARROW};
use crate::matmul::{Bf16Path, interleaved};
use crate::scalar::{DType, Element};

/// Two terms, the first in the low half. A block's terms are rounded to nearest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub(super) struct Pair(u32);

/// Elements of a vector of f32.
const LANES: usize = 16;

/// Runs the work compiled for the instructions of [`V4`] and AVX512-BF16.
#[target_feature(
    enable = "avx,avx2,bmi1,bmi2,fma,lzcnt,avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512bf16"
)]
fn with_bf16<W: WithSimd>(v4: V4, work: W) -> W::Output {
    work.with_simd(v4)
}

impl Factor for Pair {
    const TERMS: usize = 2;

    fn multiplies<T: Element>(arch: Arch) -> bool {
        T::DTYPE == DType::BF16
            && matches!(arch, Arch::V4(_))
            && Bf16Path::in_use() != Bf16Path::F32
    }

    #[inline(always)]
    fn of<T: Element>(term: impl Fn(usize) -> T) -> Pair {
        let bits = |i| term(i).to_f32().to_bits();
        Pair(bits(0) >> 16 | (bits(1) & 0xffff_0000))
    }

    fn dispatch<W: WithSimd>(arch: Arch, work: W) -> W::Output {
        let Arch::V4(v4) = arch else { unreachable!("asked `multiplies` first") };
        assert!(Bf16Path::in_use() != Bf16Path::F32);
        // SAFETY: the machine has the instructions of V4 and of the path in use.
        #[allow(unsafe_code)]
        unsafe {
            with_bf16(v4, work)
        }
    }

    #[inline(always)]
    fn multiply_add<S: Simd>(self, simd: S, vector: S::f32s, sum: S::f32s) -> S::f32s {
        const { assert!(size_of::<S::f32s>() == size_of::<__m512>()) };
        let factor = simd.splat_f32s(f32::from_bits(self.0));
        // SAFETY: only `dispatch` runs this code, on a machine that has the instruction; every bit
        // pattern of these 64-byte vector types is valid.
        #[allow(unsafe_code)]
        unsafe {
            let sum: __m512 = std::mem::transmute_copy(&sum);
            let sum = _mm512_dpbf16_ps(
                sum,
                std::mem::transmute_copy(&factor),
                std::mem::transmute_copy(&vector),
            );
            std::mem::transmute_copy(&sum)
        }
    }

    #[inline(always)]
    fn multiply_add_narrow(self, vector: [Pair; NARROW], sum: [f32; NARROW]) -> [f32; NARROW] {
        // SAFETY: as above. The arrays are 32 bytes.
        #[allow(unsafe_code)]
        unsafe {
            let factor = std::mem::transmute::<__m256i, __m256bh>(_mm256_set1_epi32(self.0 as i32));
            let sum = std::mem::transmute::<[f32; NARROW], __m256>(sum);
            let vector = std::mem::transmute::<[Pair; NARROW], __m256bh>(vector);
            std::mem::transmute::<__m256, [f32; NARROW]>(_mm256_dpbf16_ps(sum, factor, vector))
        }
    }

    #[inline(always)]
    fn store<S: Simd>(_: S, block: &mut Block<'_, Pair>, two: usize, keys: [[S::f32s; 2]; 2]) {
        const { assert!(size_of::<S::f32s>() == size_of::<__m512>()) };
        // SAFETY: as above.
        #[allow(unsafe_code)]
        let keys: [[__m512; 2]; 2] = unsafe { std::mem::transmute_copy(&keys) };
        let room = 2 * LANES * two..2 * LANES * (two + 1);
        let [first, second] = keys;
        if let Some(out) = block.along_keys.get_mut(room.clone()) {
            for (vector, out) in out.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                // SAFETY: as above. The order's array is as long as a vector.
                #[allow(unsafe_code)]
                unsafe {
                    let both = rounded(first[vector], second[vector]);
                    let order = _mm512_loadu_epi16(ORDER.as_ptr().cast());
                    store(out, _mm512_permutexvar_epi16(order, both));
                }
            }
        }
        if let Some(out) = block.along_rows.get_mut(room) {
            for (key, out) in keys.iter().zip(out.as_chunks_mut::<LANES>().0) {
                // SAFETY: as above.
                #[allow(unsafe_code)]
                unsafe {
                    store(out, rounded(key[0], key[1]));
                }
            }
        }
    }

    #[inline(always)]
    fn choose<'a>(_: &'a [f32], stored: &'a [Pair]) -> &'a [Pair] {
        stored
    }
}

/// Rounds both vectors to bf16, one after the other.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn rounded(first: __m512, second: __m512) -> __m512i {
    let both = _mm512_cvtne2ps_pbh(second, first);
    // SAFETY: both types are 64 bytes, and every bit pattern is valid in them.
    #[allow(unsafe_code)]
    unsafe {
        std::mem::transmute::<__m512bh, __m512i>(both)
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(out: &mut [Pair; LANES], pairs: __m512i) {
    // SAFETY: the array is as long as the vector.
    #[allow(unsafe_code)]
    unsafe {
        _mm512_storeu_si512(out.as_mut_ptr().cast(), pairs);
    }
}

/// The order that moves element i of a vector's first half to the low half of pair i, and element i
/// of its second half to the high half.
static ORDER: [u16; 2 * LANES] = interleaved(0, LANES);
