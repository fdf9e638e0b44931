//! bf16 matmuls on Intel's tile unit (AMX): the sums of blocks of 32 x 32 elements stay in four tiles
//! while `tdpbf16ps` multiplies and accumulates 32 terms of each.
//!
//! The right matrix is packed by all threads together, in blocks that stay in the second-level cache.
//! Each task packs some rows of the left one and multiplies them by the whole block. An element's
//! sum has the same order wherever a matmul is divided: of its terms in groups of [`STEP`], the
//! addend last.

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

use std::ops::Range;

pub(super) use permission::available;

use super::matrix::{Destination, Matrix, MatrixMut};
use super::packed::BlockPosition;
use super::tile::Output;
use crate::scalar::{DType, Element};
use crate::scratch::{with_scratch, with_shared_scratch};
use instructions::Instructions;
use operand::{PAIR, Role, SIDE, STEP, packed_len, steps};
use rayon::prelude::*;
use unit::{SUMS, Unit};

/// Terms per block of the right matrix: its packed panels of columns stay in the first-level cache.
const DEPTH: usize = 2048;
/// Elements of a block of the right matrix, and of a task's rows of the left one: both stay in the
/// second-level cache.
const RIGHT: usize = 1 << 19;
const LEFT: usize = 1 << 18;
/// Rows of a task at most.
const ROWS: usize = 256;
/// Rows that share a block of the right matrix while sums stay in scratch between blocks.
const PARTIAL_ROWS: usize = 2048;
/// Steps between visits of a block's sums: that part of a panel stays in the first-level cache for
/// all rows of a task.
const INNER: usize = 9;

/// The sizes of a matmul's blocks; they do not depend on the number of threads, except the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Blocks {
    /// Terms, columns and rows.
    depth: usize,
    columns: usize,
    rows: usize,
    /// Rows between which partial sums are stored.
    outer: usize,
    /// Elements of partial sums.
    partial: usize,
}

impl Blocks {
    /// The blocks of a matmul of `[rows, columns, terms]` on some threads. A bf16 result is rounded
    /// once: until the last block its sums are f32 in scratch.
    fn new([rows, columns, terms]: [usize; 3], is_bf16: bool, threads: usize) -> Self {
        let depth = terms.div_ceil(terms.div_ceil(DEPTH).max(1)).next_multiple_of(STEP);
        let most = |elements: usize| (elements / depth.max(1) / SIDE * SIDE).max(SIDE);
        let width = columns.min(most(RIGHT));
        let outer = if is_bf16 && terms > depth { rows.min(PARTIAL_ROWS) } else { rows };
        let partial = if is_bf16 && terms > depth { outer * width } else { 0 };
        // Two tasks for each thread, so that none waits long for another.
        let share = outer.div_ceil(2 * threads).next_multiple_of(SIDE);
        let rows = most(LEFT).min(ROWS).min(if threads > 1 { share } else { usize::MAX });
        Blocks { depth, columns: width, rows, outer, partial }
    }
}

/// The most scratch, in elements, of a thread in a matmul of at most `most` rows, columns and terms.
pub(super) fn most_scratch(most: usize) -> [usize; 2] {
    let depth = most.min(DEPTH).next_multiple_of(STEP);
    let rows = most.min(ROWS);
    let left = packed_len(rows, depth).min(LEFT + ROWS * STEP);
    [left, sums_len(rows)]
}

/// The same of the scratch that the threads share, which one of them holds.
pub(super) fn most_shared_scratch(most: usize) -> [usize; 2] {
    let Blocks { depth, columns, partial, .. } = Blocks::new([most; 3], true, 1);
    let deepest = DEPTH.min(depth.next_multiple_of(STEP));
    [partial.max(most.min(PARTIAL_ROWS) * columns), packed_len(columns, deepest).max(RIGHT)]
}

/// `out = scale * left right`, plus the destination's addend, on `threads` of rayon's threads; only if
/// [`available`].
pub(super) fn multiply<O: Element, A: Element, B: Element>(
    out: MatrixMut<'_, O>,
    destination: Destination<'_, O>,
    scale: f32,
    left: Matrix<'_, A>,
    right: Matrix<'_, B>,
    threads: usize,
) {
    assert!(available());
    multiply_on::<Instructions, _, _, _>(out, destination, scale, left, right, threads);
}

fn multiply_on<U: Unit, O: Element, A: Element, B: Element>(
    mut out: MatrixMut<'_, O>,
    destination: Destination<'_, O>,
    scale: f32,
    left: Matrix<'_, A>,
    right: Matrix<'_, B>,
    threads: usize,
) {
    let terms = left.columns;
    let is_bf16 = O::DTYPE != DType::F32;
    let blocks = Blocks::new([out.rows, out.columns, terms], is_bf16, threads);
    let right_len = packed_len(blocks.columns, blocks.depth);
    with_shared_scratch([blocks.partial, right_len], |[partial, packed]| {
        let packed: &mut [u32] = bytemuck::cast_slice_mut(packed);
        for column in (0..out.columns).step_by(blocks.columns) {
            let columns = column..out.columns.min(column + blocks.columns);
            for row in (0..out.rows).step_by(blocks.outer) {
                let rows = row..out.rows.min(row + blocks.outer);
                // Without terms the addend still has to be stored.
                for start in (0..terms.max(1)).step_by(blocks.depth.max(1)) {
                    let range = start..terms.min(start + blocks.depth);
                    let position =
                        BlockPosition { row, column, first: start == 0, last: range.end == terms };
                    let width = columns.len();
                    let output = position.output(&mut out, destination, scale, partial, width);
                    let right = right.rows(range.clone()).columns(columns.clone());
                    let packed = &mut packed[..packed_len(width, range.len())];
                    pack_right::<U, B>(right.transposed(), packed, threads);
                    let packed = &*packed;
                    let left = left.columns(range).rows(rows.clone());
                    let output = Shared(output);
                    in_parts(0..rows.len(), blocks.rows, &|rows: Range<usize>| {
                        let output = output.of_rows(rows.start);
                        let left = left.rows(rows);
                        // SAFETY: the output has these rows and columns, and each task its own rows.
                        #[allow(unsafe_code)]
                        unsafe {
                            multiply_rows::<U, A>(left, packed, width, output);
                        }
                    });
                }
            }
        }
    });
}

/// The output of several tasks.
#[derive(Clone, Copy)]
struct Shared(Output);

// SAFETY: the pointers stay valid while the matmul borrows the output and its partial sums, and each
// task writes rows of its own.
#[allow(unsafe_code)]
unsafe impl Sync for Shared {}

impl Shared {
    fn of_rows(&self, first: usize) -> Output {
        self.0.at(first, 0)
    }
}

/// Runs `body` on parts of at most `most` rows, which begin at whole blocks.
fn in_parts(rows: Range<usize>, most: usize, body: &(impl Fn(Range<usize>) + Sync)) {
    if rows.len() <= most {
        return body(rows);
    }
    let middle = rows.start + (rows.len() / 2).next_multiple_of(SIDE).min(rows.len() / SIDE * SIDE);
    let (first, rest) = (rows.start..middle, middle..rows.end);
    rayon::join(|| in_parts(first, most, body), || in_parts(rest, most, body));
}

/// Packs the columns of a block, `[columns, terms]`, on the threads.
fn pack_right<U: Unit, B: Element>(columns: Matrix<'_, B>, out: &mut [u32], threads: usize) {
    let panel = steps(columns.columns) * PAIR;
    if threads == 1 || out.is_empty() {
        return U::pack(columns, Role::Right, out);
    }
    let panels = (out.len() / panel).div_ceil(2 * threads);
    out.par_chunks_mut(panels * panel).enumerate().for_each(|(part, out)| {
        let first = part * panels * SIDE;
        let last = columns.rows.min(first + panels * SIDE);
        U::pack(columns.rows(first..last), Role::Right, out);
    });
}

/// Multiplies some rows of the left matrix by a packed block of `columns` columns.
///
/// # Safety
/// The output's pointers are valid for these rows and columns, and no other thread accesses the
/// elements that it writes.
#[allow(unsafe_code)]
unsafe fn multiply_rows<U: Unit, A: Element>(
    left: Matrix<'_, A>,
    right: &[u32],
    columns: usize,
    output: Output,
) {
    let steps = steps(left.columns);
    let inner = steps.div_ceil(steps.div_ceil(INNER).max(1)).max(1);
    let rows = left.rows;
    let lengths = [packed_len(rows, left.columns), sums_len(rows)];
    with_scratch(lengths, |[packed, sums]| {
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
                    let size = (SIDE.min(rows - row), SIDE.min(columns - column));
                    unit.multiply(left, right, size.1, start > 0, sums);
                    if part.end == panel.len() {
                        // SAFETY: the block is within the rows and columns of the caller's promise.
                        unsafe { U::finish(sums, size, &output.at(row, column)) };
                    }
                }
            }
        }
    });
}

/// Elements of the sums of all blocks of one column of blocks.
fn sums_len(rows: usize) -> usize {
    rows.div_ceil(SIDE) * SUMS
}
