//! Sums and maxima over ranks, shared by the engines for host memory. Elements are reduced in rank
//! order, so a layout always computes the same bits. bf16 is summed in f32 and rounded once.

use std::convert::identity;

use bytemuck::Zeroable;
use half::{bf16, f16};
use moh_kernels::{DType, Element, Scalar};

/// The reduction of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduce {
    /// The sum. Integers wrap around.
    Sum,
    /// The maximum. NaN if any element is NaN.
    Max,
}

/// Number of elements with sums that stay in the first-level cache until they are stored.
const BLOCK: usize = 1024;

/// An element type and the type of its sums.
trait Summand: Scalar {
    type Wide: Copy + Zeroable + PartialOrd;
    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
    fn sum(a: Self::Wide, b: Self::Wide) -> Self::Wide;
}

macro_rules! summand {
    ($($type:ty as $wide:ty: $widen:expr, $narrow:expr, $sum:expr;)*) => {
        $(impl Summand for $type {
            type Wide = $wide;
            #[inline(always)]
            fn widen(self) -> $wide {
                $widen(self)
            }
            #[inline(always)]
            fn narrow(wide: $wide) -> Self {
                $narrow(wide)
            }
            #[inline(always)]
            fn sum(a: $wide, b: $wide) -> $wide {
                $sum(a, b)
            }
        })*
    };
}

/// Returns the larger value, or NaN if one of the two is NaN.
#[inline(always)]
fn larger<T: PartialOrd>(a: T, b: T) -> T {
    // A NaN is not equal to itself, and compares as neither larger nor smaller.
    let b_is_nan = b.partial_cmp(&b).is_none();
    if b > a || b_is_nan { b } else { a }
}

summand! {
    f32 as f32: identity, identity, std::ops::Add::add;
    f64 as f64: identity, identity, std::ops::Add::add;
    f16 as f32: f16::to_f32, f16::from_f32, std::ops::Add::add;
    bf16 as f32: Element::to_f32, Element::from_f32, std::ops::Add::add;
    u32 as u32: identity, identity, u32::wrapping_add;
    i16 as i16: identity, identity, i16::wrapping_add;
    u8 as u8: identity, identity, u8::wrapping_add;
}

/// Replaces `out` by the reduction over all ranks. `slice(rank)` is the slice of a rank, or `None` if
/// the slice is in `out`. The bytes are slices of `dtype`, all of the same length.
pub(crate) fn reduce<'a>(
    dtype: DType,
    reduce: Reduce,
    out: &mut [u8],
    num_ranks: usize,
    slice: impl Fn(usize) -> Option<&'a [u8]>,
) {
    match dtype {
        DType::F32 => reduce_of::<f32>(reduce, out, num_ranks, slice),
        DType::F16 => reduce_of::<f16>(reduce, out, num_ranks, slice),
        DType::BF16 => reduce_of::<bf16>(reduce, out, num_ranks, slice),
        DType::F64 => reduce_of::<f64>(reduce, out, num_ranks, slice),
        DType::U32 => reduce_of::<u32>(reduce, out, num_ranks, slice),
        DType::I16 => reduce_of::<i16>(reduce, out, num_ranks, slice),
        DType::U8 => reduce_of::<u8>(reduce, out, num_ranks, slice),
    }
}

fn reduce_of<'a, S: Summand>(
    reduce: Reduce,
    out: &mut [u8],
    num_ranks: usize,
    slice: impl Fn(usize) -> Option<&'a [u8]>,
) {
    let out: &mut [S] = bytemuck::cast_slice_mut(out);
    let mut sums = [S::Wide::zeroed(); BLOCK];
    for start in (0..out.len()).step_by(BLOCK) {
        let range = start..out.len().min(start + BLOCK);
        let sums = &mut sums[..range.len()];
        for rank in 0..num_ranks {
            let elements = match slice(rank) {
                Some(bytes) => &bytemuck::cast_slice::<u8, S>(bytes)[range.clone()],
                None => &out[range.clone()],
            };
            match (rank, reduce) {
                (0, _) => combine(sums, elements, |_, element| element),
                (_, Reduce::Sum) => combine(sums, elements, S::sum),
                (_, Reduce::Max) => combine(sums, elements, larger),
            }
        }
        for (out, &sum) in out[range].iter_mut().zip(&*sums) {
            *out = S::narrow(sum);
        }
    }
}

#[inline(always)]
fn combine<S: Summand>(
    sums: &mut [S::Wide],
    elements: &[S],
    operation: impl Fn(S::Wide, S::Wide) -> S::Wide,
) {
    for (sum, &element) in sums.iter_mut().zip(elements) {
        *sum = operation(*sum, element.widen());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reduced<S: Scalar>(how: Reduce, slices: &[Vec<S>], own: usize) -> Vec<S> {
        let mut out = slices[own].clone();
        let bytes = bytemuck::cast_slice_mut(&mut out);
        let slice = |rank: usize| (rank != own).then(|| bytemuck::cast_slice(&slices[rank]));
        reduce(S::DTYPE, how, bytes, slices.len(), slice);
        out
    }

    #[test]
    fn sums_are_taken_in_the_order_of_the_ranks_whoever_takes_them() {
        let slices: Vec<Vec<f32>> = (0..5)
            .map(|rank| (0..2500).map(|i| 0.1 * i as f32 + 1e6 / (rank as f32 + 0.3)).collect())
            .collect();
        let expected: Vec<f32> =
            (0..2500).map(|i| slices[1..].iter().fold(slices[0][i], |sum, p| sum + p[i])).collect();
        for own in 0..5 {
            assert_eq!(reduced(Reduce::Sum, &slices, own), expected);
        }
    }

    #[test]
    fn bf16_is_rounded_once() {
        // 256 + 1 + 1 is 258 in f32 and in bf16, but 256 + 1 rounds to 256 in bf16.
        let slices = [256.0, 1.0, 1.0].map(|x| vec![bf16::from_f32(x)]);
        assert_eq!(reduced(Reduce::Sum, &slices, 1), [bf16::from_f32(258.0)]);
    }

    #[test]
    fn maxima_keep_nan_and_integers_wrap() {
        for own in 0..3 {
            let slices =
                [vec![1.0f32, f32::NAN, 3.0], vec![2.0, 9.0, -3.0], vec![0.0, 1.0, f32::NAN]];
            let max = reduced(Reduce::Max, &slices, own);
            assert!(max[0] == 2.0 && max[1].is_nan() && max[2].is_nan(), "{max:?}");
        }
        assert_eq!(reduced(Reduce::Sum, &[vec![200u8], vec![100]], 0), [44]);
        assert_eq!(reduced(Reduce::Max, &[vec![7u32], vec![9]], 0), [9]);
        assert_eq!(reduced(Reduce::Sum, &[vec![0.5f64], vec![0.25]], 1), [0.75]);
    }
}
