//! The CPU bodies of the pass over queries and keys.

use rayon::prelude::*;

use super::{QkvShape, RopeTable, check};
use crate::cpu::Cpu;
use crate::error::{Result, check_len};
use crate::ranks::AllReduce;
use crate::router::RouterGradient;
use crate::router::cpu::{self as router, CpuRouting};
use crate::scalar::Element;
use crate::simd::vectorized;

/// Tokens of one task.
const ROWS: usize = 32;

pub(crate) fn forward<T: Element>(
    shape: &QkvShape,
    table: RopeTable<'_, Cpu>,
    first_position: usize,
    qkv: &mut [T],
    routing: Option<&mut CpuRouting>,
    all_reduce: Option<AllReduce<'_, Cpu>>,
) -> Result<()> {
    check("rope_route_forward", shape, table_lens(table), first_position, qkv.len())?;
    if let Some(routing) = routing {
        router::forward(shape, qkv, routing, all_reduce)?;
    }
    rotate(shape, table, first_position, qkv, Direction::Forward);
    Ok(())
}

pub(crate) fn backward<T: Element>(
    shape: &QkvShape,
    table: RopeTable<'_, Cpu>,
    first_position: usize,
    qkv: &[T],
    d_qkv: &mut [T],
    gradient: Option<RouterGradient<'_, Cpu>>,
) -> Result<()> {
    check("rope_route_backward", shape, table_lens(table), first_position, d_qkv.len())?;
    check_len("rope_route_backward", "qkv", qkv.len(), d_qkv.len())?;
    // A rotation keeps norms, so the router's gradient may be added in rotated coordinates.
    if let Some(gradient) = gradient {
        router::backward(shape, qkv, d_qkv, gradient)?;
    }
    rotate(shape, table, first_position, d_qkv, Direction::Inverse);
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Forward,
    Inverse,
}

fn rotate<T: Element>(
    shape: &QkvShape,
    table: RopeTable<'_, Cpu>,
    first_position: usize,
    qkv: &mut [T],
    direction: Direction,
) {
    let half = shape.head_dim / 2;
    let rotated = (shape.heads + shape.kv_heads) * shape.head_dim;
    qkv.par_chunks_mut(ROWS * shape.row()).enumerate().for_each(|(part, rows)| {
        vectorized!({
            for (row, token) in rows.chunks_exact_mut(shape.row()).zip(part * ROWS..) {
                let angles = (first_position + token % shape.length) * half;
                let cos = &table.cos[angles..angles + half];
                let sin = &table.sin[angles..angles + half];
                rotate_heads(&mut row[..rotated], cos, sin, direction);
            }
        });
    });
}

/// Turns every head of a row; the widths of small heads are compiled in.
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

/// Cosines and sines.
fn table_lens(table: RopeTable<'_, Cpu>) -> [usize; 2] {
    [table.cos.len(), table.sin.len()]
}
