//! The tile unit itself.

use std::arch::asm;
use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::operand::{self, PAIR, ROWS, Role, SIDE};
use super::permission::available;
use super::unit::{SUMS, Unit};
use crate::matmul::avx512::tile;
use crate::matmul::matrix::Matrix;
use crate::matmul::output::Output;
use crate::scalar::Element;

/// The calling thread's tiles, configured: eight of 16 rows of 64 bytes. Not Send, as they are the
/// thread's.
pub(in crate::matmul) struct Instructions(PhantomData<*mut ()>);

/// The operand of `ldtilecfg`.
#[repr(C, align(64))]
struct Configuration([u8; 64]);

static CONFIGURATION: Configuration = {
    let mut bytes = [0; 64];
    bytes[0] = 1; // the palette
    let mut tile = 0;
    while tile < 8 {
        bytes[16 + 2 * tile] = (4 * ROWS) as u8; // bytes of a row, 16 bits
        bytes[48 + tile] = ROWS as u8;
        tile += 1;
    }
    Configuration(bytes)
};

/// Defines a function that multiplies one block in one `asm!`, so that the compiler has to know no
/// more of the tiles than that they change. The lists set the sums to zero, load them from memory,
/// multiply one step and store the sums.
///
/// Tiles 0 to 3 are the sums (rows first), 4 and 5 the left operand's, 6 and 7 the right one's.
macro_rules! block {
    (
        $name:ident, zero: [$($zero:literal)*], load: [$($load:literal)*],
        step: [$($step:literal)*], store: [$($store:literal)*]
    ) => {
        /// # Safety
        /// The machine has tiles, configured on this thread; the operands have `steps` steps and the
        /// sums a block.
        #[allow(unsafe_code)]
        #[inline]
        unsafe fn $name(
            left: *const u32,
            right: *const u32,
            steps: usize,
            adds: bool,
            sums: *mut f32,
        ) {
            // SAFETY: the caller's promise.
            unsafe {
                asm!(
                    "test {adds:e}, {adds:e}",
                    "jnz 2f",
                    $($zero,)*
                    "jmp 3f",
                    "2:",
                    $($load,)*
                    "3:",
                    "test {steps}, {steps}",
                    "jz 5f",
                    "4:",
                    $($step,)*
                    "add {left}, 2048",
                    "add {right}, 2048",
                    "dec {steps}",
                    "jnz 4b",
                    "5:",
                    $($store,)*
                    left = inout(reg) left => _,
                    right = inout(reg) right => _,
                    steps = inout(reg) steps => _,
                    adds = in(reg) u32::from(adds),
                    sums = in(reg) sums,
                    row = in(reg) 64usize,
                    sums_row = in(reg) 128usize,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack)
                );
            }
        }
    };
}

block!(
    two_by_two,
    zero: ["tilezero tmm0" "tilezero tmm1" "tilezero tmm2" "tilezero tmm3"],
    load: [
        "tileloadd tmm0, [{sums} + {sums_row}*1]"
        "tileloadd tmm1, [{sums} + {sums_row}*1 + 64]"
        "tileloadd tmm2, [{sums} + {sums_row}*1 + 2048]"
        "tileloadd tmm3, [{sums} + {sums_row}*1 + 2112]"
    ],
    step: [
        "tileloadd tmm6, [{right} + {row}*1]"
        "tileloadd tmm4, [{left} + {row}*1]"
        "tdpbf16ps tmm0, tmm4, tmm6"
        "tileloadd tmm5, [{left} + {row}*1 + 1024]"
        "tdpbf16ps tmm2, tmm5, tmm6"
        "tileloadd tmm7, [{right} + {row}*1 + 1024]"
        "tdpbf16ps tmm1, tmm4, tmm7"
        "tdpbf16ps tmm3, tmm5, tmm7"
    ],
    store: [
        "tilestored [{sums} + {sums_row}*1], tmm0"
        "tilestored [{sums} + {sums_row}*1 + 64], tmm1"
        "tilestored [{sums} + {sums_row}*1 + 2048], tmm2"
        "tilestored [{sums} + {sums_row}*1 + 2112], tmm3"
    ]
);

block!(
    two_by_one,
    zero: ["tilezero tmm0" "tilezero tmm2"],
    load: [
        "tileloadd tmm0, [{sums} + {sums_row}*1]"
        "tileloadd tmm2, [{sums} + {sums_row}*1 + 2048]"
    ],
    step: [
        "tileloadd tmm6, [{right} + {row}*1]"
        "tileloadd tmm4, [{left} + {row}*1]"
        "tdpbf16ps tmm0, tmm4, tmm6"
        "tileloadd tmm5, [{left} + {row}*1 + 1024]"
        "tdpbf16ps tmm2, tmm5, tmm6"
    ],
    store: [
        "tilestored [{sums} + {sums_row}*1], tmm0"
        "tilestored [{sums} + {sums_row}*1 + 2048], tmm2"
    ]
);

/// Whether the instructions can be executed: in tests also where they are traps.
fn can_run() -> bool {
    #[cfg(test)]
    if super::traps::are_handled() {
        return true;
    }
    available()
}

impl Unit for Instructions {
    fn pack<T: Element>(matrix: Matrix<'_, T>, role: Role, out: &mut [u32]) {
        assert!(can_run());
        // SAFETY: a machine with tiles has the instructions.
        #[allow(unsafe_code)]
        unsafe {
            operand::pack(matrix, role, out);
        }
    }

    fn configured() -> Self {
        assert!(can_run());
        // SAFETY: the machine has tiles; loading the configuration clears them.
        #[allow(unsafe_code)]
        unsafe {
            asm!(
                "ldtilecfg [{}]",
                in(reg) &raw const CONFIGURATION,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, readonly, preserves_flags)
            );
        }
        Instructions(PhantomData)
    }

    fn multiply(&self, left: &[u32], right: &[u32], columns: usize, adds: bool, sums: &mut [f32]) {
        assert!(left.len() == right.len() && left.len().is_multiple_of(PAIR) && sums.len() == SUMS);
        let steps = left.len() / PAIR;
        let (left, right, sums) = (left.as_ptr(), right.as_ptr(), sums.as_mut_ptr());
        // SAFETY: `self` is this thread's configuration, and the lengths are checked above.
        #[allow(unsafe_code)]
        unsafe {
            match columns > ROWS {
                true => two_by_two(left, right, steps, adds, sums),
                false => two_by_one(left, right, steps, adds, sums),
            }
        }
    }

    #[allow(unsafe_code)]
    unsafe fn finish(sums: &[f32], rows: usize, columns: usize, output: &Output) {
        assert!(can_run() && sums.len() == SUMS && rows <= SIDE && columns <= SIDE);
        // SAFETY: a machine with tiles has the instructions; the rest is the caller's promise.
        unsafe { store(sums, rows, columns, output) }
    }
}

impl Drop for Instructions {
    fn drop(&mut self) {
        // SAFETY: the tiles are this thread's, and nothing in them is needed any more.
        #[allow(unsafe_code)]
        unsafe {
            asm!(
                "tilerelease",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, nomem, preserves_flags)
            );
        }
    }
}

/// # Safety
/// As [`Unit::finish`], on a machine with these instructions.
#[allow(unsafe_code)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn store(sums: &[f32], rows: usize, columns: usize, output: &Output) {
    for (row, sums) in sums.chunks_exact(SIDE).enumerate().take(rows) {
        let (first, second) = sums.split_at(ROWS);
        // SAFETY: the halves have a vector's length; the rest is the caller's promise.
        unsafe {
            let first = _mm512_loadu_ps(first.as_ptr());
            if columns > ROWS {
                tile::finish_row([first, _mm512_loadu_ps(second.as_ptr())], row, columns, output);
            } else {
                tile::finish_row([first], row, columns, output);
            }
        }
    }
}
