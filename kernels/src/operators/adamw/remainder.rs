//! An f32 parameter stored as the bf16 weight of the model and a 16-bit remainder, which together
//! are exact. A separate f32 copy would need 32 bits (Megatron-LM's `store_param_remainders`).
//!
//! ```text
//! bits(exact) = bits(weight) * 2^16 + remainder
//! ```

use half::bf16;

use crate::scalar::Element;

/// Returns the f32 value of a bf16 weight and its remainder.
#[inline(always)]
pub fn join(weight: bf16, remainder: i16) -> f32 {
    let bits = u32::from(weight.to_bits()) << 16;
    f32::from_bits(bits.wrapping_add_signed(i32::from(remainder)))
}

/// Returns the nearest bf16 value, ties to even, and the remainder: [`join`] returns `exact`, with one exception. One
/// value in 2^17 is a tie that rounds down by 2^15, but a remainder is at most 2^15 - 1. The value's
/// magnitude decreases by one unit in the last of 24 bits, as any f32 operation may round.
#[inline(always)]
pub fn split(exact: f32) -> (bf16, i16) {
    let weight = <bf16 as Element>::from_f32(exact);
    let left = exact.to_bits().wrapping_sub(u32::from(weight.to_bits()) << 16).cast_signed();
    // Only a NaN's remainder can exceed a tie's. The value stays a NaN.
    (weight, left.clamp(i32::from(i16::MIN), i32::from(i16::MAX)) as i16)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns values around the rounding boundaries of every bf16 value.
    fn values() -> impl Iterator<Item = f32> {
        let lows = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
        (0..=u32::from(u16::MAX))
            .flat_map(move |high| lows.map(|low| f32::from_bits(high << 16 | low)))
    }

    #[test]
    fn a_number_comes_back_but_for_the_last_bit_of_a_tie() {
        for exact in values() {
            let (weight, remainder) = split(exact);
            let back = join(weight, remainder);
            if exact.is_nan() {
                assert!(back.is_nan() && weight.is_nan());
                continue;
            }
            let tie = exact.to_bits() & 0x1_ffff == 0x8000;
            assert_eq!(back.to_bits(), exact.to_bits() - u32::from(tie), "{exact}");
            assert_eq!(weight, bf16::from_f32(exact), "{exact}");
        }
    }

    #[test]
    fn what_came_back_splits_into_the_same() {
        // Otherwise a resumed run would differ from an uninterrupted run.
        for exact in values().filter(|exact| !exact.is_nan()) {
            let (weight, remainder) = split(exact);
            let (weight_again, remainder_again) = split(join(weight, remainder));
            assert_eq!((weight.to_bits(), remainder), (weight_again.to_bits(), remainder_again));
        }
    }
}
