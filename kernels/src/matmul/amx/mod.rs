//! bf16 matmuls on Intel's tile unit (AMX): the sums of blocks of 32 x 32 elements stay in four tiles
//! while `tdpbf16ps` multiplies and accumulates 32 terms of each.
//!
//! An element's sum has the same order wherever a matmul is divided: of its terms in groups of
//! [`STEP`](operand::STEP), the addend last.

pub(crate) mod in_place;
mod instructions;
#[cfg(test)]
mod model;
mod operand;
mod permission;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod traps;
mod unit;

use std::marker::PhantomData;

pub(super) use permission::available;
#[cfg(test)]
pub(crate) use tests::assembly_runs as tiles_run;

use super::blocked::{Kernel, PANEL};
use super::matrix::Matrix;
use super::output::Output;
use crate::scalar::Element;
use crate::scratch::with_scratch;
use operand::{PAIR, Role, SIDE, packed_len, steps};
use unit::{SUMS, Unit};

/// Terms per block. Most layers have fewer, so their sums are stored once.
const DEPTH: usize = 2048;
/// Elements of a block of the right matrix, and of a task's rows of the left one: both stay in the
/// second-level cache.
const RIGHT: usize = 1 << 19;
const LEFT: usize = 1 << 18;
/// Rows of a task at most.
const ROWS: usize = 256;
/// Steps between visits of a block's sums: that part of a panel stays in the first-level cache for
/// all rows of a task.
const INNER: usize = 9;

/// AMX; only if [`available`].
pub(super) type Amx = OnUnit<instructions::Instructions>;

/// A tile unit's instructions.
pub(super) struct OnUnit<U>(PhantomData<U>);

/// The most scratch, in elements, of a thread in a matmul of at most `most` rows, columns and terms.
pub(super) fn most_scratch(most: usize) -> [usize; 2] {
    let packed = |depth: usize| packed_len(most.min(rows_of(depth)), depth.next_multiple_of(32));
    let depth = most.min(DEPTH);
    [packed(depth).max(packed(depth.min(LEFT / ROWS))), sums_len(most.min(ROWS))]
}

/// Rows of a task of this many terms.
fn rows_of(depth: usize) -> usize {
    (LEFT / depth.max(1) / SIDE * SIDE).clamp(SIDE, ROWS)
}

/// Elements of the sums of one column of blocks.
fn sums_len(rows: usize) -> usize {
    rows.div_ceil(SIDE) * SUMS
}

impl<U: Unit> Kernel for OnUnit<U> {
    const ROWS: usize = SIDE;
    const DEPTH: usize = DEPTH;
    const RIGHT: usize = RIGHT;

    fn rows(depth: usize) -> usize {
        rows_of(depth)
    }

    fn panel_len(terms: usize) -> usize {
        packed_len(PANEL, terms)
    }

    fn pack_right<T: Element>(right: Matrix<'_, T>, out: &mut [u32]) {
        U::pack(right.transposed(), Role::Right, out);
    }

    #[allow(unsafe_code)]
    unsafe fn multiply_rows<T: Element>(
        left: Matrix<'_, T>,
        right: &[u32],
        columns: usize,
        output: Output,
    ) {
        let rows = left.rows;
        let steps = steps(left.columns);
        let inner = steps.div_ceil(steps.div_ceil(INNER).max(1)).max(1);
        with_scratch([packed_len(rows, left.columns), sums_len(rows)], |[packed, sums]| {
            let packed: &mut [u32] = bytemuck::cast_slice_mut(packed);
            U::pack(left, Role::Left, packed);
            let unit = U::configured();
            for column in (0..columns).step_by(SIDE) {
                let panel = &right[column / SIDE * steps * PAIR..][..steps * PAIR];
                for start in (0..steps.max(1)).step_by(inner) {
                    let part = start * PAIR..steps.min(start + inner) * PAIR;
                    for (strip, sums) in sums.chunks_exact_mut(SUMS).enumerate() {
                        let left = &packed[strip * steps * PAIR..][..steps * PAIR];
                        let (left, right) = (&left[part.clone()], &panel[part.clone()]);
                        let row = strip * SIDE;
                        let (height, width) = (SIDE.min(rows - row), SIDE.min(columns - column));
                        unit.multiply(left, right, width, start > 0, sums);
                        if part.end == panel.len() {
                            // SAFETY: the block is within the rows and columns of the promise.
                            unsafe { U::finish(sums, height, width, &output.at(row, column)) };
                        }
                    }
                }
            }
        });
    }
}
