//! Every implementation of matmul against plain sums in f64.

use half::bf16;
use proptest::prelude::*;
use proptest::test_runner::Config;

use super::*;
use crate::scalar::DType;

/// Relative L2 error of sums in f32.
const F32_TOLERANCE: f64 = 2e-6;
/// Relative L2 error of one rounding to bf16, at most 2^-8.
const BF16_TOLERANCE: f64 = 1.0 / 256.0;

#[derive(Debug, Clone, Copy)]
struct Case {
    shape: [usize; 3],
    left_transposed: bool,
    right_transposed: bool,
    /// 0: overwrite, 1: accumulate, 2: add another matrix.
    destination: u8,
    /// Elements between the end of a row and the start of the next.
    gap: usize,
    seed: u32,
}

#[derive(Debug, Clone, Copy)]
enum Path {
    Serial,
    Parallel,
    Rows,
    Packed,
    Vector,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// Returns elements between -1 and 1 that bf16 represents.
pub(super) fn elements<T: Element>(len: usize, seed: u32) -> Vec<T> {
    let mut state = seed ^ 0x9e37_79b9;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        bf16::from_f32((state >> 8) as f32 / 8_388_608.0 - 1.0)
    };
    (0..len).map(|_| T::from_f32(next().to_f32())).collect()
}

/// Returns a row-major view of this shape, or the transpose of a row-major view.
pub(super) fn view<T>(
    data: &[T],
    rows: usize,
    columns: usize,
    gap: usize,
    transposed: bool,
) -> Matrix<'_, T> {
    if transposed {
        Matrix::with_stride(data, columns, rows, rows + gap).transposed()
    } else {
        Matrix::with_stride(data, rows, columns, columns + gap)
    }
}

fn at<T: Element>(matrix: &Matrix<'_, T>, row: usize, column: usize) -> f64 {
    let element = matrix.data[row * matrix.row_stride + column * matrix.column_stride];
    f64::from(element.to_f32())
}

/// Multiplies by a right matrix that is packed before.
fn by_packed<O: Element, A: Element, B: Element>(
    out: MatrixMut<'_, O>,
    left: Matrix<'_, A>,
    right: Matrix<'_, B>,
) {
    let mut packed = vec![0; packed_len::<B>(right.rows, right.columns)];
    pack(right, &mut packed);
    let right = Packed::new::<B>(&packed, right.rows, right.columns);
    matmul_packed(out, left, right);
}

/// Compares a matmul with sums in f64.
fn agrees<O: Element, A: Element, B: Element>(case: Case, path: Path) {
    let Case { shape: [m, n, k], gap, seed, .. } = case;
    let left = elements::<A>((m + gap) * (k + gap), seed);
    let right = elements::<B>((k + gap) * (n + gap), seed + 1);
    let left = view(&left, m, k, gap, case.left_transposed);
    let right = view(&right, k, n, gap, case.right_transposed);
    let before = elements::<O>(m * (n + gap), seed + 2);
    let addend = elements::<O>(m * (n + gap), seed + 3);
    let mut out = before.clone();
    let added = match case.destination {
        0 => None,
        1 => Some(&before),
        _ => Some(&addend),
    };
    let destination = match case.destination {
        0 => Destination::Overwrite,
        1 => Destination::Accumulate,
        _ => Destination::AddTo(view(&addend, m, n, gap, false)),
    };
    let view_mut = MatrixMut::with_stride(&mut out, m, n, n + gap).with(destination);
    match path {
        Path::Serial => matmul(view_mut, left, right),
        Path::Parallel => matmul_parallel(view_mut, left, right),
        Path::Rows => matmul_of_rows(view_mut, left, right),
        Path::Packed => by_packed(view_mut, left, right),
        Path::Vector => blocked::multiply::<Vector, _, _, _>(view_mut, left, right, 1),
        #[cfg(target_arch = "x86_64")]
        Path::Avx512 => blocked::multiply::<Avx512, _, _, _>(view_mut, left, right, 1),
    }
    let (mut squares, mut error) = (1e-12, 0.0);
    for row in 0..m {
        for column in 0..n + gap {
            let index = row * (n + gap) + column;
            if column >= n {
                assert_eq!(out[index], before[index], "between the rows of {case:?}");
                continue;
            }
            let sum: f64 = (0..k).map(|i| at(&left, row, i) * at(&right, i, column)).sum();
            let added = added.map_or(0.0, |elements| f64::from(elements[index].to_f32()));
            let expected = added + sum;
            squares += expected * expected;
            error += (expected - f64::from(out[index].to_f32())).powi(2);
        }
    }
    let bound = if O::DTYPE == DType::F32 { F32_TOLERANCE } else { BF16_TOLERANCE };
    let relative = (error / squares).sqrt();
    assert!(relative <= bound, "{path:?} {case:?}: relative error {relative:e} above {bound:e}");
}

/// Compares every combination of types on every implementation that supports it.
fn all_agree(case: Case) {
    let mut paths = vec![Path::Serial, Path::Parallel];
    if case.right_transposed && !case.left_transposed {
        paths.push(Path::Rows);
    }
    for &path in &paths {
        agrees::<f32, f32, f32>(case, path);
        agrees::<bf16, f32, f32>(case, path);
    }
    paths.push(Path::Vector);
    if packed_len::<f32>(1, 1) > 0 {
        agrees::<f32, f32, f32>(case, Path::Packed);
        agrees::<bf16, f32, f32>(case, Path::Packed);
    }
    if packed_len::<bf16>(1, 1) > 0 {
        agrees::<f32, bf16, bf16>(case, Path::Packed);
        agrees::<bf16, bf16, bf16>(case, Path::Packed);
    }
    #[cfg(target_arch = "x86_64")]
    if avx512::available() {
        paths.push(Path::Avx512);
    }
    for path in paths {
        agrees::<f32, bf16, bf16>(case, path);
        agrees::<bf16, bf16, bf16>(case, path);
        agrees::<f32, f32, bf16>(case, path);
        agrees::<bf16, f32, bf16>(case, path);
        agrees::<f32, bf16, f32>(case, path);
        agrees::<bf16, bf16, f32>(case, path);
    }
}

#[test]
fn matmuls_of_several_blocks_agree() {
    for (left_transposed, right_transposed) in [(false, true), (false, false), (true, false)] {
        for (destination, shape) in [
            (0, [205, 100, 301]),
            (0, [14, 530, 30]),
            (1, [30, 1061, 33]),
            (1, [37, 20, 2101]),
            (2, [13, 70, 4130]),
            (1, [530, 300, 4]),
            (2, [2, 300, 300]),
        ] {
            let (gap, seed) = (0, 1);
            all_agree(Case { shape, left_transposed, right_transposed, destination, gap, seed });
        }
    }
}

/// Compares the bits of a matmul on thread pools of several sizes.
fn same_bits<A: Element>([m, n, k]: [usize; 3], transposed: [bool; 2]) {
    let (left, right) = (elements::<A>(m * k, 1), elements::<A>(k * n, 2));
    let left = view(&left, m, k, 0, transposed[0]);
    let right = view(&right, k, n, 0, transposed[1]);
    let [one, two, five] = [1, 2, 5].map(|threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let mut out = vec![0f32; m * n];
        let view = MatrixMut::new(&mut out, m, n);
        pool.install(|| matmul_parallel(view, left, right));
        out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    });
    assert!(one == two && one == five, "{m} x {n} x {k}");
}

#[test]
fn threads_do_not_change_a_bit() {
    for shape in [[146, 100, 300], [97, 50, 2100], [3, 900, 200], [1, 4000, 130], [300, 300, 100]] {
        for transposed in [[false, true], [false, false], [true, false]] {
            same_bits::<f32>(shape, transposed);
            same_bits::<bf16>(shape, transposed);
        }
    }
}

/// Checks that each row of a matmul of independent rows has the same bits as when it is multiplied alone.
fn rows_are_independent<A: Element>(
    [m, n, k]: [usize; 3],
    name: &str,
    multiply: impl Fn(MatrixMut<'_, A>, Matrix<'_, A>, Matrix<'_, A>),
) {
    let (left, right) = (elements::<A>(m * k, 1), elements::<A>(k * n, 2));
    let (left, right) = (view(&left, m, k, 0, false), view(&right, k, n, 0, true));
    let of = |rows: std::ops::Range<usize>| {
        let mut out = vec![A::from_f32(0.0); rows.len() * n];
        multiply(MatrixMut::new(&mut out, rows.len(), n), left.rows(rows), right);
        out.into_iter().map(|element| element.to_f32().to_bits()).collect::<Vec<_>>()
    };
    let all = of(0..m);
    for row in 0..m {
        let expected = &all[row * n..(row + 1) * n];
        for last in [row + 1, m.min(row + 4), m] {
            let found = of(row..last);
            assert!(found[..n] == *expected, "{name}: row {row} of {last}, {m} x {n} x {k}");
        }
    }
}

/// Checks the two implementations with independent rows, and the implementation for a few rows.
fn all_are_independent<A: Element>(shape: [usize; 3]) {
    rows_are_independent::<A>(shape, "rows", |out, left, right| match left.rows <= 4 {
        true => matmul_parallel(out, left, right),
        false => matmul_of_rows(out, left, right),
    });
    if packed_len::<A>(1, 1) == 0 {
        return;
    }
    rows_are_independent::<A>(shape, "packed", |out, left, right| {
        by_packed(out, left, right);
    });
    // The bits are the same as with a matmul that packs for itself.
    let [m, n, k] = shape;
    let (left, right) = (elements::<A>(m * k, 3), elements::<A>(k * n, 4));
    let (left, right) = (view(&left, m, k, 0, false), view(&right, k, n, 0, true));
    let [ours, theirs] = [true, false].map(|is_packed| {
        let mut out = vec![A::from_f32(0.0); m * n];
        let view = MatrixMut::new(&mut out, m, n);
        match is_packed {
            true => by_packed(view, left, right),
            false => multiply(view, left, right, 2),
        }
        out.into_iter().map(|element| element.to_f32().to_bits()).collect::<Vec<_>>()
    });
    assert!(ours == theirs, "{m} x {n} x {k}");
}

#[test]
fn a_row_alone_has_the_bits_that_it_has_among_others() {
    for shape in [[40, 70, 64], [9, 130, 47], [13, 300, 4300], [20, 3, 5], [8, 1, 96]] {
        all_are_independent::<f32>(shape);
        all_are_independent::<bf16>(shape);
    }
}

#[test]
fn sums_without_terms_are_the_addend() {
    for destination in 0..3 {
        for shape in [[5, 7, 0], [1, 7, 0], [0, 7, 3], [7, 0, 3], [0, 0, 0]] {
            let (left_transposed, right_transposed, gap, seed) = (false, true, 0, 2);
            all_agree(Case { shape, left_transposed, right_transposed, destination, gap, seed });
        }
    }
}

#[test]
fn bf16_results_are_rounded_once() {
    // 1 + 4191 / 4096 is just below the midpoint of two bf16 values. If the sum were also rounded after the first
    // third of the terms, it would reach the midpoint and round up.
    let terms = 4192;
    let left = vec![bf16::ONE; terms];
    let mut right = vec![bf16::from_f32(1.0 / 4096.0); terms];
    right[0] = bf16::ONE;
    for rows in [1, 5] {
        let left = left.repeat(rows);
        let mut out = vec![bf16::ZERO; rows];
        matmul(
            MatrixMut::new(&mut out, rows, 1),
            Matrix::new(&left, rows, terms),
            Matrix::new(&right, terms, 1),
        );
        assert_eq!(out, vec![bf16::from_f32(1.0 + 4191.0 / 4096.0); rows]);
    }
}

proptest! {
    #![proptest_config(Config { cases: 96, failure_persistence: None, ..Config::default() })]

    #[test]
    fn any_matmul_agrees(
        (m, n, k) in (1usize..60, 1usize..110, 0usize..90),
        left_transposed: bool,
        right_transposed: bool,
        destination in 0u8..3,
        gap in 0usize..3,
        seed in 0u32..1_000_000,
    ) {
        let shape = [m, n, k];
        all_agree(Case { shape, left_transposed, right_transposed, destination, gap, seed });
    }
}
