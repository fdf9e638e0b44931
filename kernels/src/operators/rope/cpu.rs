//! The CPU body of rotary position embedding.

use rayon::prelude::*;

use super::{Rope, RopeArgs, RopeTable, check};
use crate::compiled::compiled;
use crate::simd::vectorized;
use crate::{Cpu, Element, Result};

/// Tokens of one task.
const ROWS: usize = 32;

impl Rope for Cpu {
    fn rope_forward<T: Element>(&self, args: RopeArgs<'_, Self, T>) -> Result<()> {
        rotate_in("rope_forward", args, Direction::Forward)
    }

    fn rope_backward<T: Element>(&self, args: RopeArgs<'_, Self, T>) -> Result<()> {
        rotate_in("rope_backward", args, Direction::Inverse)
    }
}

fn rotate_in<T: Element>(
    operator: &'static str,
    args: RopeArgs<'_, Cpu, T>,
    direction: Direction,
) -> Result<()> {
    compiled!(rotate::<T>(operator: &'static str, args: RopeArgs<'_, Cpu, T>, direction: Direction))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Forward,
    Inverse,
}

fn rotate<T: Element>(
    operator: &'static str,
    args: RopeArgs<'_, Cpu, T>,
    direction: Direction,
) -> Result<()> {
    let RopeArgs { shape, table: RopeTable { cos, sin, first_position }, qkv } = args;
    check(operator, shape, first_position, [qkv.len(), cos.len(), sin.len()])?;
    let half = shape.head_dim / 2;
    let rotated = (shape.heads + shape.kv_heads) * shape.head_dim;
    qkv.par_chunks_mut(ROWS * shape.row()).enumerate().for_each(|(part, rows)| {
        vectorized!({
            for (row, token) in rows.chunks_exact_mut(shape.row()).zip(part * ROWS..) {
                let angles = (first_position + token % shape.length) * half;
                let cos = &cos[angles..angles + half];
                let sin = &sin[angles..angles + half];
                rotate_heads(&mut row[..rotated], cos, sin, direction);
            }
        });
    });
    Ok(())
}

/// Rotates every head of a row; small head dimensions are compile-time constants.
#[inline(always)]
fn rotate_heads<T: Element>(row: &mut [T], cos: &[f32], sin: &[f32], direction: Direction) {
    match cos.len() {
        4 => rotate_fixed::<T, 4>(row, cos, sin, direction),
        8 => rotate_fixed::<T, 8>(row, cos, sin, direction),
        half => {
            for head in row.chunks_exact_mut(2 * half) {
                let (low, high) = head.split_at_mut(half);
                rotate_head(low, high, cos, sin, direction);
            }
        }
    }
}

#[inline(always)]
fn rotate_fixed<T: Element, const HALF: usize>(
    row: &mut [T],
    cos: &[f32],
    sin: &[f32],
    direction: Direction,
) {
    let ((cos, _), (sin, _)) = (cos.as_chunks::<HALF>(), sin.as_chunks::<HALF>());
    for head in row.as_chunks_mut::<HALF>().0.as_chunks_mut::<2>().0 {
        let [low, high] = head;
        rotate_head(low, high, &cos[0], &sin[0], direction);
    }
}

#[inline(always)]
fn rotate_head<T: Element>(
    low: &mut [T],
    high: &mut [T],
    cos: &[f32],
    sin: &[f32],
    direction: Direction,
) {
    let sign = if direction == Direction::Forward { 1.0 } else { -1.0 };
    for (((low, high), &cos), &sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        let (a, b, sin) = (low.to_f32(), high.to_f32(), sign * sin);
        *low = T::from_f32(a * cos - b * sin);
        *high = T::from_f32(b * cos + a * sin);
    }
}
