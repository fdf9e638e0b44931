//! f32 matrix products of the crate `gemm`, behind bounds-checked views.

/// A read-only matrix with strides, in numbers.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    data: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// A row-major matrix that starts at the slice's start.
    pub(crate) fn new(data: &'a [f32], rows: usize, columns: usize) -> Self {
        assert!(data.len() >= rows * columns);
        Matrix { data, rows, columns, row_stride: columns, column_stride: 1 }
    }

    /// Some of the columns.
    pub(crate) fn columns(self, columns: std::ops::Range<usize>) -> Self {
        assert!(columns.start <= columns.end && columns.end <= self.columns);
        // A matrix without rows holds no number to start at.
        let start = if self.rows == 0 { 0 } else { columns.start * self.column_stride };
        Matrix { data: &self.data[start..], columns: columns.len(), ..self }
    }

    /// The transpose, without moving a number.
    pub(crate) fn transposed(self) -> Self {
        Matrix {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }
}

/// What becomes of the numbers that the destination held.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Destination {
    /// They are replaced.
    Overwrite,
    /// The product is added to them.
    Accumulate,
}

/// `out (+)= scale * left right`, on the calling thread; `out` is row-major.
pub(crate) fn matmul(
    out: &mut [f32],
    destination: Destination,
    scale: f32,
    left: Matrix<'_>,
    right: Matrix<'_>,
) {
    let (m, n, k) = (left.rows, right.columns, left.columns);
    assert_eq!(k, right.rows);
    assert!(out.len() >= m * n);
    if m == 0 || n == 0 {
        return;
    }
    let accumulate = destination == Destination::Accumulate;
    // SAFETY: each matrix holds rows x columns numbers at its strides (checked when it was made;
    // transposing keeps the set of addresses and taking columns makes it smaller), out holds m x n (checked above) and cannot
    // overlap the inputs, being borrowed mutably.
    #[allow(unsafe_code)]
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            n as isize,
            accumulate,
            left.data.as_ptr(),
            left.column_stride as isize,
            left.row_stride as isize,
            right.data.as_ptr(),
            right.column_stride as isize,
            right.row_stride as isize,
            1.0,
            scale,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transposes_scales_and_accumulates() {
        let left = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]; // 2 x 3
        let right = [1.0, 0.0, 2.0, 0.0, 1.0, 1.0]; // 2 x 3
        let mut out = [10.0; 4];
        let product = Matrix::new(&right, 2, 3).transposed();
        matmul(&mut out, Destination::Accumulate, 2.0, Matrix::new(&left, 2, 3), product);
        assert_eq!(out, [24.0, 20.0, 42.0, 32.0]);
        matmul(&mut out, Destination::Overwrite, 1.0, Matrix::new(&left, 2, 3), product);
        assert_eq!(out, [7.0, 5.0, 16.0, 11.0]);
    }
}
