//! Matrix views: the operands and the destination of a matmul.

use std::marker::PhantomData;
use std::ops::Range;

use bytemuck::Pod;

use crate::scalar::Element;

/// Whether a gradient is overwritten or accumulated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accumulation {
    /// Overwrites the elements, which need not be initialised.
    Overwrite,
    /// Adds the gradient to the elements.
    Add,
}

/// A read-only matrix with strides, in elements; contiguous along rows or columns.
///
/// Invariant: the elements of all rows and columns are within `data`.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a, T> {
    pub(super) data: &'a [T],
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) row_stride: usize,
    pub(super) column_stride: usize,
}

impl<'a, T> Matrix<'a, T> {
    /// Creates a row-major matrix that starts at the slice's start.
    pub(crate) fn new(data: &'a [T], rows: usize, columns: usize) -> Self {
        Self::with_stride(data, rows, columns, columns)
    }

    /// Creates a row-major matrix with rows `row_stride` elements apart.
    pub(crate) fn with_stride(
        data: &'a [T],
        rows: usize,
        columns: usize,
        row_stride: usize,
    ) -> Self {
        assert!(fits(data.len(), rows, columns, row_stride), "the matrix leaves its slice");
        Matrix { data, rows, columns, row_stride, column_stride: 1 }
    }

    pub(super) fn shape(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    pub(crate) fn columns(self, columns: Range<usize>) -> Self {
        assert!(columns.start <= columns.end && columns.end <= self.columns);
        // An empty matrix has no element to start at.
        let empty = self.rows == 0 || columns.is_empty();
        let start = if empty { 0 } else { columns.start * self.column_stride };
        Matrix { data: &self.data[start..], columns: columns.len(), ..self }
    }

    pub(crate) fn rows(self, rows: Range<usize>) -> Self {
        self.transposed().columns(rows).transposed()
    }

    /// Returns the transpose, without moving elements.
    pub(crate) fn transposed(self) -> Self {
        Matrix {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    pub(super) fn row(&self, row: usize) -> &'a [T] {
        assert!(row < self.rows && self.column_stride == 1);
        &self.data[row * self.row_stride..][..self.columns]
    }
}

impl<'a, T: Element> Matrix<'a, T> {
    pub(super) fn as_f32(&self) -> Option<Matrix<'a, f32>> {
        self.cast()
    }

    /// Returns the same matrix if its elements are of type `U`.
    pub(super) fn cast<U: Element>(&self) -> Option<Matrix<'a, U>> {
        let &Matrix { data, rows, columns, row_stride, column_stride } = self;
        let data = cast(data)?;
        Some(Matrix { data, rows, columns, row_stride, column_stride })
    }
}

/// A mutable row-major matrix with a stride, and the effect of a matmul on it: overwrites it, unless another
/// destination is set. Several threads can write its blocks.
pub(crate) struct MatrixMut<'a, T> {
    pub(super) start: *mut T,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) row_stride: usize,
    pub(super) destination: Destination<'a, T>,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: the view is the only access to its elements (created from a unique slice, split into
// disjoint blocks), and T itself may move between threads and, in an addend, be shared by threads.
#[allow(unsafe_code)]
unsafe impl<T: Send + Sync> Send for MatrixMut<'_, T> {}

impl<'a, T: Element> MatrixMut<'a, T> {
    /// Creates a row-major matrix that starts at the slice's start.
    pub(crate) fn new(data: &'a mut [T], rows: usize, columns: usize) -> Self {
        Self::with_stride(data, rows, columns, columns)
    }

    /// Creates a row-major matrix with rows `row_stride` elements apart.
    pub(crate) fn with_stride(
        data: &'a mut [T],
        rows: usize,
        columns: usize,
        row_stride: usize,
    ) -> Self {
        assert!(fits(data.len(), rows, columns, row_stride), "the matrix leaves its slice");
        let (start, destination) = (data.as_mut_ptr(), Destination::Overwrite);
        MatrixMut { start, rows, columns, row_stride, destination, owner: PhantomData }
    }

    /// Returns the same matrix with another destination.
    pub(crate) fn with(self, destination: impl Into<Destination<'a, T>>) -> Self {
        MatrixMut { destination: destination.into(), ..self }
    }

    /// Returns the columns before `column`, and the remaining columns.
    pub(super) fn split_columns(self, column: usize) -> (Self, Self) {
        assert!(column <= self.columns);
        let part = |columns: Range<usize>| MatrixMut {
            columns: columns.len(),
            destination: match self.destination {
                Destination::AddTo(addend) => Destination::AddTo(addend.columns(columns.clone())),
                other => other,
            },
            ..self.view_from(0, columns.start)
        };
        (part(0..column), part(column..self.columns))
    }

    /// Returns a view that starts at (row, column); the caller sets its shape.
    fn view_from(&self, row: usize, column: usize) -> Self {
        // Wrapping: the start of an empty view may be beyond the slice's end; it is not read.
        let start = self.start.wrapping_add(row * self.row_stride + column);
        MatrixMut { start, owner: PhantomData, ..*self }
    }

    pub(super) fn row_mut(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows);
        // SAFETY: the row is within the view's slice (checked there, and above), and the view is
        // borrowed mutably for as long as the row.
        #[allow(unsafe_code)]
        unsafe {
            std::slice::from_raw_parts_mut(self.start.add(row * self.row_stride), self.columns)
        }
    }

    /// Copies the addend into the matrix; returns whether the matmul must accumulate.
    pub(super) fn prepare(&mut self) -> bool {
        if let Destination::AddTo(addend) = self.destination {
            for row in 0..self.rows {
                self.row_mut(row).copy_from_slice(addend.row(row));
            }
        }
        !matches!(self.destination, Destination::Overwrite)
    }
}

/// The effect of a matmul on its destination.
#[derive(Clone, Copy)]
pub(crate) enum Destination<'a, T> {
    /// Overwrites the elements.
    Overwrite,
    /// Accumulates into the elements.
    Accumulate,
    /// Overwrites the elements with the sum of the result and this row-major matrix of the same
    /// shape.
    AddTo(Matrix<'a, T>),
}

impl<T> From<Accumulation> for Destination<'_, T> {
    fn from(accumulation: Accumulation) -> Self {
        match accumulation {
            Accumulation::Overwrite => Destination::Overwrite,
            Accumulation::Add => Destination::Accumulate,
        }
    }
}

fn cast<T: Element, U: Element>(data: &[T]) -> Option<&[U]> {
    fn checked<T: Pod, U: Pod>(data: &[T]) -> Option<&[U]> {
        bytemuck::try_cast_slice(data).ok()
    }
    if T::DTYPE == U::DTYPE { checked(data) } else { None }
}

/// Returns whether rows of `columns` elements, `row_stride` apart and not overlapping, fit in `len`
/// elements.
fn fits(len: usize, rows: usize, columns: usize, row_stride: usize) -> bool {
    if rows == 0 || columns == 0 {
        return true;
    }
    let end = (rows - 1).checked_mul(row_stride).and_then(|start| start.checked_add(columns));
    (rows == 1 || row_stride >= columns) && end.is_some_and(|end| end <= len)
}
