//! The CPU bodies of the pass over queries and keys.

use rayon::prelude::*;

use super::{QkvShape, RopeTable};
use crate::cpu::Cpu;
use crate::error::{Result, check_len, ensure};
use crate::router::RouterGradient;
use crate::router::cpu::{self as router, CpuRouting};
use crate::scalar::Element;

/// Tokens of one task.
const ROWS: usize = 32;

pub(crate) fn forward<T: Element>(
    shape: &QkvShape,
    table: RopeTable<'_, Cpu>,
    first_position: usize,
    qkv: &mut [T],
    routing: Option<&mut CpuRouting>,
) -> Result<()> {
    check("rope_route_forward", shape, table, first_position, qkv.len())?;
    if let Some(routing) = routing {
        router::forward(shape, qkv, routing)?;
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
    check("rope_route_backward", shape, table, first_position, d_qkv.len())?;
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
    let sign = if direction == Direction::Forward { 1.0 } else { -1.0 };
    qkv.par_chunks_mut(ROWS * shape.row()).enumerate().for_each(|(part, rows)| {
        for (row, token) in rows.chunks_exact_mut(shape.row()).zip(part * ROWS..) {
            let position = first_position + token % shape.length;
            let cos = &table.cos[position * half..][..half];
            let sin = &table.sin[position * half..][..half];
            for head in row[..rotated].chunks_exact_mut(shape.head_dim) {
                let (low, high) = head.split_at_mut(half);
                for (((low, high), &cos), &sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
                    let (a, b, sin) = (low.to_f32(), high.to_f32(), sign * sin);
                    *low = T::from_f32(a * cos - b * sin);
                    *high = T::from_f32(b * cos + a * sin);
                }
            }
        }
    });
}

fn check(
    operator: &'static str,
    shape: &QkvShape,
    table: RopeTable<'_, Cpu>,
    first_position: usize,
    qkv: usize,
) -> Result<()> {
    shape.check(operator)?;
    check_len(operator, "qkv", qkv, shape.tokens() * shape.row())?;
    let end = first_position.saturating_add(shape.length);
    let needed = end.saturating_mul(shape.head_dim / 2);
    ensure(operator, table.cos.len() >= needed && table.sin.len() == table.cos.len(), || {
        format!(
            "the table holds {} cosines and {} sines, expected {needed} for {end} positions",
            table.cos.len(),
            table.sin.len()
        )
    })
}
