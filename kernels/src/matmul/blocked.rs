//! Matmuls in packed blocks, on several threads. All threads pack a block of the right matrix
//! together, and each task multiplies some rows of the left matrix by the whole block.
//!
//! Blocks of terms depend on the shape alone, so the bits do not depend on the number of threads.

use std::ops::Range;

use rayon::prelude::*;

use super::matrix::{Destination, Matrix, MatrixMut};
use super::output::{Addend, Output, Target};
use crate::scalar::{DType, Element};
use crate::scratch::with_shared_scratch;

/// Columns of a packed panel of the right matrix.
pub(super) const PANEL: usize = 32;
/// Rows that share a right block while sums stay in scratch between blocks.
const PARTIAL_ROWS: usize = 2048;
/// Block lengths are rounded up to this many terms: only the last block has a part of a vector.
const VECTOR: usize = 32;

/// Elements of a right block below which one thread packs it: that takes less time than dividing the work.
const SMALL: usize = 1 << 14;

/// The instructions that multiply packed blocks.
pub(super) trait Kernel {
    /// Rows of the left matrix to which a task's size is rounded up.
    const ROWS: usize;

    /// Maximum terms of a block, a multiple of a vector.
    const DEPTH: usize;

    /// Elements of a right block, which stays in a cache.
    const RIGHT: usize;

    /// Returns the columns of a right block of this many terms, a multiple of [`PANEL`].
    fn columns(depth: usize) -> usize {
        (Self::RIGHT / depth.max(1) / PANEL * PANEL).max(PANEL)
    }

    /// Returns the elements of a packed panel of this many terms.
    fn panel_len(terms: usize) -> usize;

    /// Packs whole panels of a right block.
    fn pack_right<T: Element>(right: Matrix<'_, T>, out: &mut [u32]);

    /// Multiplies rows of the left matrix by a packed right block of `columns` columns.
    ///
    /// # Safety
    /// The output's pointers are valid for these rows and columns, and no other thread accesses the
    /// written elements.
    #[allow(unsafe_code)]
    unsafe fn multiply_rows<T: Element>(
        left: Matrix<'_, T>,
        right: &[u32],
        columns: usize,
        output: Output,
    );
}

/// The sizes of a matmul's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Blocks {
    /// Terms, and columns of the right matrix.
    depth: usize,
    columns: usize,
    /// Rows of the left matrix for one task.
    rows: usize,
    /// Rows between which partial sums are stored, and elements of these sums.
    outer: usize,
    partial: usize,
}

impl Blocks {
    /// Returns the blocks of a matmul of `[rows, columns, terms]` on some threads. A bf16 result is rounded
    /// once: until the last block its sums are f32 in scratch.
    fn new<K: Kernel>([rows, columns, terms]: [usize; 3], is_bf16: bool, threads: usize) -> Self {
        let depth = depth::<K>(terms);
        let columns = columns.min(K::columns(depth));
        let is_partial = is_bf16 && terms > depth;
        let outer = if is_partial { rows.min(PARTIAL_ROWS) } else { rows };
        let partial = if is_partial { outer * columns } else { 0 };
        // Two tasks for each thread, so that no thread waits long for another.
        let share = if threads > 1 { outer.div_ceil(2 * threads) } else { outer };
        let rows = share.next_multiple_of(K::ROWS).max(K::ROWS);
        Blocks { depth, columns, rows, outer, partial }
    }

    fn packed_len<K: Kernel>(&self) -> usize {
        packed_len::<K>(self.columns, self.depth)
    }
}

/// Returns the terms of a block.
pub(super) fn depth<K: Kernel>(terms: usize) -> usize {
    terms.div_ceil(terms.div_ceil(K::DEPTH).max(1)).next_multiple_of(VECTOR)
}

pub(super) fn packed_len<K: Kernel>(columns: usize, terms: usize) -> usize {
    columns.div_ceil(PANEL) * K::panel_len(terms)
}

/// Returns the maximum scratch, in elements, that threads share in a matmul of at most `most` rows, columns and
/// terms.
pub(super) fn most_shared_scratch<K: Kernel>(most: usize) -> [usize; 2] {
    // If there are several blocks, each block has at least half of the maximum terms.
    let depths = [most.min(K::DEPTH), K::DEPTH / 2].map(|depth| depth.next_multiple_of(VECTOR));
    let columns = |depth| most.min(K::columns(depth));
    let packed = depths.map(|depth| packed_len::<K>(columns(depth), depth));
    let partial = most.min(PARTIAL_ROWS) * columns(K::DEPTH / 2);
    [if most > K::DEPTH { partial } else { 0 }, packed[0].max(packed[1])]
}

/// Computes `out = left right`, according to the destination, on `threads` of rayon's threads.
pub(super) fn multiply<K: Kernel, O: Element, A: Element, B: Element>(
    mut out: MatrixMut<'_, O>,
    left: Matrix<'_, A>,
    right: Matrix<'_, B>,
    threads: usize,
) {
    if out.rows == 0 || out.columns == 0 {
        return;
    }
    let terms = left.columns;
    let is_bf16 = O::DTYPE != DType::F32;
    let blocks = Blocks::new::<K>([out.rows, out.columns, terms], is_bf16, threads);
    with_shared_scratch([blocks.partial, blocks.packed_len::<K>()], |[partial, packed]| {
        let packed: &mut [u32] = bytemuck::cast_slice_mut(packed);
        for column in (0..out.columns).step_by(blocks.columns) {
            let columns = column..out.columns.min(column + blocks.columns);
            for row in (0..out.rows).step_by(blocks.outer) {
                let rows = row..out.rows.min(row + blocks.outer);
                // Without terms the addend must still be stored.
                for start in (0..terms.max(1)).step_by(blocks.depth.max(1)) {
                    let range = start..terms.min(start + blocks.depth);
                    let position =
                        BlockPosition { row, column, first: start == 0, last: range.end == terms };
                    let width = columns.len();
                    let output = position.output(&mut out, partial, width);
                    let right = right.rows(range.clone()).columns(columns.clone());
                    let packed = &mut packed[..packed_len::<K>(width, range.len())];
                    pack_right::<K, B>(right, packed, threads);
                    let left = left.columns(range).rows(rows.clone());
                    multiply_block::<K, A>(left, packed, width, Shared(output), blocks.rows);
                }
            }
        }
    });
}

fn pack_right<K: Kernel, T: Element>(right: Matrix<'_, T>, out: &mut [u32], threads: usize) {
    if threads == 1 || out.len() < SMALL {
        return K::pack_right(right, out);
    }
    let panel = K::panel_len(right.rows);
    let panels = (out.len() / panel).div_ceil(2 * threads);
    out.par_chunks_mut(panels * panel).enumerate().for_each(|(part, out)| {
        let first = part * panels * PANEL;
        let last = right.columns.min(first + panels * PANEL);
        K::pack_right(right.columns(first..last), out);
    });
}

/// Multiplies all rows of the left matrix by a packed right block, in tasks of at most `most` rows.
fn multiply_block<K: Kernel, T: Element>(
    left: Matrix<'_, T>,
    right: &[u32],
    columns: usize,
    output: Shared,
    most: usize,
) {
    in_parts(0..left.rows, most, K::ROWS, &|rows: Range<usize>| {
        let output = output.of_rows_from(rows.start);
        // SAFETY: the output has these rows and columns, and each task its own rows.
        #[allow(unsafe_code)]
        unsafe {
            K::multiply_rows(left.rows(rows), right, columns, output);
        }
    });
}

/// Runs `body` on parts of at most `most` rows, which start at multiples of `step`, on rayon's threads.
fn in_parts(rows: Range<usize>, most: usize, step: usize, body: &(impl Fn(Range<usize>) + Sync)) {
    if rows.len() <= most {
        return body(rows);
    }
    // Less than all rows, as there are more rows than one step.
    let middle = rows.start + (rows.len() / 2).next_multiple_of(step);
    let (first, rest) = (rows.start..middle, middle..rows.end);
    rayon::join(|| in_parts(first, most, step, body), || in_parts(rest, most, step, body));
}

/// The output that several tasks share.
#[derive(Clone, Copy)]
struct Shared(Output);

// SAFETY: the pointers stay valid while the matmul borrows the output and its partial sums, and each
// task writes only its own rows.
#[allow(unsafe_code)]
unsafe impl Sync for Shared {}

impl Shared {
    fn of_rows_from(&self, row: usize) -> Output {
        self.0.at(row, 0)
    }
}

/// A block's position in the output and in the terms.
pub(super) struct BlockPosition {
    pub(super) row: usize,
    pub(super) column: usize,
    pub(super) first: bool,
    pub(super) last: bool,
}

impl BlockPosition {
    /// Returns the destination of the block's sums.
    pub(super) fn output<O: Element>(
        &self,
        out: &mut MatrixMut<'_, O>,
        partial: &mut [f32],
        partial_stride: usize,
    ) -> Output {
        let &BlockPosition { row, column, first, last } = self;
        let start = out.start.wrapping_add(row * out.row_stride + column);
        let f32_out = O::DTYPE == DType::F32;
        let addend = match out.destination {
            _ if !first && f32_out => Addend::F32(start.cast_const().cast(), out.row_stride),
            _ if !first => Addend::F32(partial.as_ptr(), partial_stride),
            Destination::Overwrite => Addend::Nothing,
            Destination::Accumulate => addend(start.cast_const(), out.row_stride),
            Destination::AddTo(Matrix { data, row_stride, .. }) => {
                addend(data[row * row_stride + column..].as_ptr(), row_stride)
            }
        };
        let target = if f32_out {
            Target::F32(start.cast(), out.row_stride)
        } else if last {
            Target::Bf16(start.cast(), out.row_stride)
        } else {
            Target::F32(partial.as_mut_ptr(), partial_stride)
        };
        Output { addend, target }
    }
}

/// Returns the elements of the output's type as an addend.
fn addend<O: Element>(start: *const O, stride: usize) -> Addend {
    if O::DTYPE == DType::F32 {
        Addend::F32(start.cast(), stride)
    } else {
        Addend::Bf16(start.cast(), stride)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(target_arch = "x86_64")]
    use crate::matmul::avx512::Avx512;
    use crate::matmul::vector::Vector;

    /// Checks that the blocks of a shape fit the scratch that is reserved for its largest side.
    fn fits<K: Kernel>(shape: [usize; 3], is_bf16: bool, threads: usize) {
        let blocks = Blocks::new::<K>(shape, is_bf16, threads);
        let Blocks { depth, columns, rows, outer, partial } = blocks;
        assert!(columns == shape[1] || columns.is_multiple_of(PANEL), "{blocks:?}");
        assert!(depth <= K::DEPTH && rows.is_multiple_of(K::ROWS) && rows > 0, "{blocks:?}");
        assert_eq!(partial > 0, is_bf16 && shape[2] > depth);
        assert!(outer <= shape[0]);
        let widest = shape.into_iter().max().unwrap_or(0);
        let [most_partial, right] = most_shared_scratch::<K>(widest);
        assert!(
            partial <= most_partial && blocks.packed_len::<K>() <= right,
            "{shape:?} {blocks:?}"
        );
    }

    #[test]
    fn blocks_fit_the_reserved_scratch() {
        for shape in [
            [1, 1, 0],
            [1, 1, 1],
            [1024, 32_000, 288],
            [1024, 288, 32_000],
            [300, 2049, 2049],
            [4096, 4096, 4096],
            [128_256, 4096, 512],
        ] {
            for threads in [1, 2, 64] {
                for is_bf16 in [false, true] {
                    fits::<Vector>(shape, is_bf16, threads);
                    #[cfg(target_arch = "x86_64")]
                    fits::<Avx512>(shape, is_bf16, threads);
                }
            }
        }
    }

    #[test]
    fn parts_cover_all_rows_once_from_whole_steps() {
        for rows in [0, 1, 24, 25, 300, 1000] {
            let covered = std::sync::Mutex::new(vec![0; rows]);
            in_parts(0..rows, 96, 24, &|part| {
                assert!(part.start.is_multiple_of(24) && part.len() <= 96, "{part:?}");
                let mut covered = covered.lock().unwrap();
                covered[part].iter_mut().for_each(|count| *count += 1);
            });
            assert!(covered.into_inner().unwrap().iter().all(|&count| count == 1));
        }
    }
}
