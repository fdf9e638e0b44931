//! f32 matmuls on any machine: packed blocks, divided into tiles of sums that stay in the vector registers
//! ([`tile`]). bf16 operands are converted while they are packed.

mod pack;
#[cfg(test)]
mod tests;
mod tile;

use pulp::{Arch, Simd, WithSimd};

use super::blocked::{Kernel, PANEL};
use super::matrix::Matrix;
use super::output::Output;
use crate::scalar::Element;
use crate::scratch::with_scratch;
use pack::Left;
use tile::TILE_ROWS;

/// Terms per block. Most layers have fewer terms, so their sums are stored once.
const DEPTH: usize = 2048;
/// Rows of a left block, which stays in the second-level cache.
const ROWS: usize = 8 * TILE_ROWS;
/// Elements of a right block, which stays in the last-level cache.
const RIGHT: usize = 1 << 20;

/// Returns the maximum scratch, in elements, of a thread in a matmul of at most `most` rows, columns and terms.
pub(super) fn most_scratch(most: usize) -> [usize; 1] {
    let depth = most.min(DEPTH).next_multiple_of(32);
    [pack::most_left_len(most.min(ROWS), depth).max(pack::right_scratch(depth))]
}

/// The machine's multiplication and addition of f32 vectors.
pub(super) struct Vector;

impl Kernel for Vector {
    const ROWS: usize = TILE_ROWS;
    const DEPTH: usize = DEPTH;
    const RIGHT: usize = RIGHT;

    fn panel_len(terms: usize) -> usize {
        terms * PANEL
    }

    fn pack_right<T: Element>(right: Matrix<'_, T>, out: &mut [u32]) {
        pack::right(right, bytemuck::cast_slice_mut(out));
    }

    #[allow(unsafe_code)]
    unsafe fn multiply_rows<T: Element>(
        left: Matrix<'_, T>,
        right: &[u32],
        columns: usize,
        output: Output,
    ) {
        let right = bytemuck::cast_slice(right);
        assert!(right.len() >= columns.next_multiple_of(PANEL) * left.columns);
        with_scratch([pack::left_len(left.rows(0..left.rows.min(ROWS)))], |[packed]| {
            // The blocks' outputs are valid by the caller's promise.
            Arch::new().dispatch(Rows { left, packed, right, columns, output });
        });
    }
}

struct Rows<'a, T> {
    left: Matrix<'a, T>,
    packed: &'a mut [f32],
    /// Packed panels of the left matrix's terms and `columns` columns.
    right: &'a [f32],
    columns: usize,
    /// Valid for the rows of the left matrix and these columns; no other thread accesses any of them.
    output: Output,
}

impl<T: Element> WithSimd for Rows<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Rows { left, packed, right, columns, output } = self;
        let terms = left.columns;
        let (rows, width) = tile::shape::<S>();
        for row in (0..left.rows).step_by(ROWS) {
            let part = left.rows(row..left.rows.min(row + ROWS));
            let operand = Left::of(part, packed);
            for column in (0..columns).step_by(width) {
                let panel = &right[column / PANEL * PANEL * terms..][..PANEL * terms];
                let panel = panel.as_ptr().wrapping_add(column % PANEL);
                for first in (0..part.rows).step_by(rows) {
                    let size = (rows.min(part.rows - first), width.min(columns - column));
                    let operands = tile::Operands { terms, left: operand.row(first), right: panel };
                    // SAFETY: the tile is within the left block, the panel and the output.
                    #[allow(unsafe_code)]
                    unsafe {
                        tile::tile(simd, size, operands, &output.at(row + first, column));
                    }
                }
            }
        }
    }
}
