//! Tiles by every set of vector instructions against plain sums. Other tests use only the machine's best set.

use half::bf16;
use pulp::Arch;

use super::*;
use crate::matmul::output::{Addend, Target};
use crate::matmul::tests::{elements, view};
use crate::simd::tests::kinds;

/// Checks `left right + addend` of sizes that end within tiles and panels.
fn agrees<T: Element>(arch: Arch, [rows, columns, terms]: [usize; 3], transposed: bool) {
    let left_elements = elements::<T>(rows * terms, 1);
    let right_elements = elements::<T>(terms * columns, 2);
    let addend = elements::<f32>(rows * columns, 3);
    let left = view(&left_elements, rows, terms, 0, transposed);
    let right = view(&right_elements, terms, columns, 0, !transposed);
    let mut panels = vec![0f32; columns.div_ceil(PANEL) * terms * PANEL];
    pack::right(right, &mut panels);
    let mut packed = vec![0f32; pack::most_left_len(rows.min(ROWS), terms)];
    let mut out = vec![0f32; rows * columns];
    let output = Output {
        addend: Addend::F32(addend.as_ptr(), columns),
        target: Target::F32(out.as_mut_ptr(), columns),
    };
    arch.dispatch(Rows { left, packed: &mut packed, right: &panels, columns, output });
    for row in 0..rows {
        for column in 0..columns {
            let at = |data: &[T], index: usize| f64::from(data[index].to_f32());
            let terms = (0..terms).map(|k| {
                let [a, b] = match transposed {
                    true => [k * rows + row, k * columns + column],
                    false => [row * terms + k, column * terms + k],
                };
                at(&left_elements, a) * at(&right_elements, b)
            });
            let index = row * columns + column;
            let expected = terms.sum::<f64>() + f64::from(addend[index]);
            let error = (f64::from(out[index]) - expected).abs();
            assert!(error < 1e-4, "{arch:?} at ({row}, {column}): off by {error:e}");
        }
    }
}

#[test]
fn every_set_of_instructions_agrees() {
    for arch in kinds() {
        for shape in [[1, 1, 1], [13, 45, 70], [100, 33, 130], [5, 16, 512], [12, 32, 0]] {
            for transposed in [false, true] {
                agrees::<f32>(arch, shape, transposed);
                agrees::<bf16>(arch, shape, transposed);
            }
        }
    }
}

#[test]
fn rows_that_share_cache_sets_are_packed() {
    let data = vec![0f32; 24 * 1024];
    for (width, in_place) in [(1024, false), (1000, true), (512, true)] {
        let block = Matrix::new(&data, 24, width);
        assert_eq!(pack::left_len(block) == 0, in_place, "{width}");
    }
}
