//! A model of the tile unit in plain Rust, with the same bits: tests run it on every machine.

use half::bf16;

use super::operand::{PAIR, ROWS, Role, SIDE, STEP, TILE, packed_len, steps};
use super::unit::{SUMS, Unit};
use crate::matmul::matrix::Matrix;
use crate::matmul::output::{Addend, Output, Target};
use crate::scalar::Element;

/// The model of a thread's unit.
pub(super) struct Model;

/// `tdpbf16ps`: adds the products of 32 terms to 16 x 16 sums, given as bits.
///
/// The products of even and of odd terms are summed apart, each by fused operations from zero; then
/// both sums are added to each other, and to the sum so far. Denormal numbers count as zero
/// everywhere (Intel, Instruction Set Extensions Programming Reference, TDPBF16PS).
pub(super) fn multiply_tiles(sums: &mut [u32; TILE], left: &[u32; TILE], right: &[u32; TILE]) {
    for row in 0..ROWS {
        for column in 0..ROWS {
            let (mut even, mut odd) = (0f32, 0f32);
            for pair in 0..ROWS {
                let (left, right) = (left[row * ROWS + pair], right[pair * ROWS + column]);
                let term =
                    |bits: u32, shift: u32| flushed(f32::from_bits(bits << shift & 0xffff_0000));
                even = flushed(term(left, 16).mul_add(term(right, 16), even));
                odd = flushed(term(left, 0).mul_add(term(right, 0), odd));
            }
            let sum = &mut sums[row * ROWS + column];
            let added = flushed(flushed(even + odd) + flushed(f32::from_bits(*sum)));
            *sum = added.to_bits();
        }
    }
}

/// A number, or zero of its sign if it is denormal.
fn flushed(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

/// Packs an operand element by element.
fn pack<T: Element>(matrix: Matrix<'_, T>, role: Role, out: &mut [u32]) {
    out.fill(0);
    let steps = steps(matrix.columns);
    for outer in 0..matrix.rows {
        for term in 0..matrix.columns {
            let element = matrix.data[outer * matrix.row_stride + term * matrix.column_stride];
            let bits = u32::from(bf16::from_f32(element.to_f32()).to_bits());
            let (lane, pair) = (outer % ROWS, term % STEP / 2);
            let place = match role {
                Role::Left => lane * ROWS + pair,
                Role::Right => pair * ROWS + lane,
            };
            let tile = (outer / SIDE * steps + term / STEP) * 2 + outer % SIDE / ROWS;
            out[tile * TILE + place] |= bits << (term % 2 * 16);
        }
    }
}

/// A tile's part of a block's sums, as bits.
fn tile_of(sums: &[f32], row: usize, column: usize) -> [u32; TILE] {
    std::array::from_fn(|i| sums[(row + i / ROWS) * SIDE + column + i % ROWS].to_bits())
}

impl Unit for Model {
    fn pack<T: Element>(matrix: Matrix<'_, T>, role: Role, out: &mut [u32]) {
        assert_eq!(out.len(), packed_len(matrix.rows, matrix.columns));
        pack(matrix, role, out);
    }

    fn configured() -> Self {
        Model
    }

    fn multiply(&self, left: &[u32], right: &[u32], columns: usize, adds: bool, sums: &mut [f32]) {
        assert_eq!((left.len(), sums.len()), (right.len(), SUMS));
        for (row, column) in [(0, 0), (0, ROWS), (ROWS, 0), (ROWS, ROWS)] {
            if column >= columns {
                continue;
            }
            let mut tile = if adds { tile_of(sums, row, column) } else { [0; TILE] };
            for (left, right) in left.chunks_exact(PAIR).zip(right.chunks_exact(PAIR)) {
                let (left, right) = (&left[row / ROWS * TILE..], &right[column / ROWS * TILE..]);
                let (Some(left), Some(right)) = (left.first_chunk(), right.first_chunk()) else {
                    unreachable!("a step has two tiles");
                };
                multiply_tiles(&mut tile, left, right);
            }
            for (i, bits) in tile.into_iter().enumerate() {
                sums[(row + i / ROWS) * SIDE + column + i % ROWS] = f32::from_bits(bits);
            }
        }
    }

    #[allow(unsafe_code)]
    unsafe fn finish(sums: &[f32], rows: usize, columns: usize, output: &Output) {
        for row in 0..rows {
            for column in 0..columns {
                // SAFETY: the caller's promise.
                unsafe {
                    let addend = match output.addend {
                        Addend::Nothing => 0.0,
                        Addend::F32(start, stride) => *start.add(row * stride + column),
                        Addend::Bf16(start, stride) => (*start.add(row * stride + column)).to_f32(),
                    };
                    let value = sums[row * SIDE + column] * output.scale + addend;
                    match output.target {
                        Target::F32(start, stride) => *start.add(row * stride + column) = value,
                        Target::Bf16(start, stride) => {
                            *start.add(row * stride + column) = bf16::from_f32(value);
                        }
                    }
                }
            }
        }
    }
}
