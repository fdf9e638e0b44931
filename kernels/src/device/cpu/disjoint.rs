//! Writing to parts of one buffer from several threads, where the parts interleave.

use std::marker::PhantomData;
use std::ops::Range;

/// A row-major matrix with column blocks that different threads write.
///
/// Attention's tasks each own the columns of some heads in every row, which `chunks_mut` cannot
/// express.
pub(crate) struct DisjointColumns<'a, T> {
    start: *mut T,
    rows: usize,
    row_stride: usize,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: access goes through `block_mut`, and its callers promise that no two threads access the same
// row and column; T itself may move between threads.
#[allow(unsafe_code)]
unsafe impl<T: Send> Sync for DisjointColumns<'_, T> {}

impl<'a, T> DisjointColumns<'a, T> {
    /// Borrows the buffer while the blocks are written.
    pub(crate) fn new(data: &'a mut [T], row_stride: usize) -> Self {
        assert!(row_stride > 0 && data.len().is_multiple_of(row_stride));
        let rows = data.len() / row_stride;
        DisjointColumns { start: data.as_mut_ptr(), rows, row_stride, owner: PhantomData }
    }

    /// Returns the columns `columns` of row `row`.
    ///
    /// # Safety
    /// No other live slice, of this thread or another, covers the same row and columns.
    #[allow(unsafe_code, clippy::mut_from_ref)]
    pub(crate) unsafe fn block_mut(&self, row: usize, columns: Range<usize>) -> &mut [T] {
        assert!(row < self.rows && columns.start <= columns.end && columns.end <= self.row_stride);
        // SAFETY: the range is within the buffer by the line above, and is borrowed once by the
        // caller's promise.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.start.add(row * self.row_stride + columns.start),
                columns.len(),
            )
        }
    }
}
