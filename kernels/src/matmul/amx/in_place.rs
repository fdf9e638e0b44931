//! Products of operands that are stored as tiles can load them: the left one with pairs of terms along
//! its rows, the right one with pairs of terms of all columns side by side.

use std::arch::asm;

use super::instructions::Instructions;
use super::operand::{ROWS, SIDE};
use super::unit::Unit as _;

/// Rows, columns and terms are multiples of this.
pub(crate) const MULTIPLE: usize = SIDE;

/// Runs `body` with the calling thread's tiles configured; it may not use them otherwise.
pub(crate) fn with_tiles<R>(body: impl FnOnce() -> R) -> R {
    let _configured = Instructions::configured();
    body()
}

/// `out = left right`, or `out += left right`, of `[rows, pairs]` and `[pairs, columns]`, all row-major;
/// beside `left` is the distance between the starts of its rows.
///
/// # Safety
/// Only within [`with_tiles`].
///
/// # Panics
/// Panics if a size is no multiple of [`MULTIPLE`] terms, or an operand or the result is too short.
#[allow(unsafe_code)]
pub(crate) unsafe fn multiply(
    [rows, pairs, columns]: [usize; 3],
    (left, left_stride): (&[u32], usize),
    right: &[u32],
    out: &mut [f32],
    adds: bool,
) {
    if rows == 0 || columns == 0 || pairs == 0 {
        assert!(adds || rows == 0 || columns == 0, "a product without terms would be zero");
        return;
    }
    assert!(rows.is_multiple_of(SIDE) && columns.is_multiple_of(SIDE));
    assert!(pairs.is_multiple_of(ROWS));
    assert!(left.len() >= (rows - 1) * left_stride + pairs);
    assert!(right.len() >= pairs * columns && out.len() >= rows * columns);
    for row in (0..rows).step_by(SIDE) {
        for column in (0..columns).step_by(SIDE) {
            let left = (left[row * left_stride..].as_ptr(), left_stride);
            let right = right[column..].as_ptr();
            let out = out[row * columns + column..].as_mut_ptr();
            // SAFETY: the tiles are configured by the caller's promise, and the block is within the
            // operands and the result by the lines above.
            unsafe {
                block([pairs / ROWS, columns], left, right, out, adds);
            }
        }
    }
}

/// Multiplies a block of 32 x 32 sums.
///
/// # Safety
/// The machine has tiles, configured on this thread; the operands have 32 rows or columns and `steps`
/// steps, and there are 32 x 32 sums, in rows of `left_stride`, `columns` and `columns` elements.
#[allow(unsafe_code)]
#[inline]
unsafe fn block(
    [steps, columns]: [usize; 2],
    (left, left_stride): (*const u32, usize),
    right: *const u32,
    sums: *mut f32,
    adds: bool,
) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "test {adds:e}, {adds:e}",
            "jnz 2f",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "jmp 4f",
            "2:",
            "tileloadd tmm0, [{sums} + {row}*1]",
            "tileloadd tmm1, [{sums} + {row}*1 + 64]",
            "tileloadd tmm2, [{lower_sums} + {row}*1]",
            "tileloadd tmm3, [{lower_sums} + {row}*1 + 64]",
            "4:",
            "tileloadd tmm6, [{right} + {row}*1]",
            "tileloadd tmm4, [{left} + {left_row}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{lower_left} + {left_row}*1]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tileloadd tmm7, [{right} + {row}*1 + 64]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {left}, 64",
            "add {lower_left}, 64",
            "add {right}, {right_step}",
            "dec {steps}",
            "jnz 4b",
            "tilestored [{sums} + {row}*1], tmm0",
            "tilestored [{sums} + {row}*1 + 64], tmm1",
            "tilestored [{lower_sums} + {row}*1], tmm2",
            "tilestored [{lower_sums} + {row}*1 + 64], tmm3",
            left = inout(reg) left => _,
            lower_left = inout(reg) left.add(ROWS * left_stride) => _,
            left_row = in(reg) 4 * left_stride,
            right = inout(reg) right => _,
            row = in(reg) 4 * columns,
            right_step = in(reg) 4 * ROWS * columns,
            sums = in(reg) sums,
            lower_sums = in(reg) sums.add(ROWS * columns),
            steps = inout(reg) steps => _,
            adds = in(reg) u32::from(adds),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack)
        );
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::matmul::amx::tests::assembly_runs;
    use crate::matmul::tests::elements;

    #[test]
    fn products_agree() {
        if !assembly_runs() {
            return;
        }
        for [rows, columns, pairs] in [[32, 32, 16], [64, 96, 48], [32, 64, 160]] {
            let left_stride = pairs + 3;
            let left = elements::<bf16>(2 * rows * left_stride, 1);
            let right = elements::<bf16>(2 * pairs * columns, 2);
            for adds in [false, true] {
                let before = elements::<f32>(rows * columns, 3);
                let mut out = before.clone();
                let [left_pairs, right_pairs] = [&left, &right].map(|x| bytemuck::cast_slice(x));
                let sizes = [rows, pairs, columns];
                // SAFETY: within `with_tiles`.
                #[allow(unsafe_code)]
                with_tiles(|| unsafe {
                    multiply(sizes, (left_pairs, left_stride), right_pairs, &mut out, adds);
                });
                for (index, (&found, before)) in out.iter().zip(before).enumerate() {
                    let (row, column) = (index / columns, index % columns);
                    let products = (0..2 * pairs).map(|term| {
                        let pair = term / 2 * columns + column;
                        let right = right[2 * pair + term % 2].to_f64();
                        left[2 * row * left_stride + term].to_f64() * right
                    });
                    let added = if adds { f64::from(before) } else { 0.0 };
                    let error = (f64::from(found) - products.sum::<f64>() - added).abs();
                    assert!(error < 1e-4, "({row}, {column}) is off by {error:e}");
                }
            }
        }
    }
}
