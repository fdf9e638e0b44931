//! Copies between packed buffers and the f32 scratch of attention's tasks.

use super::problem::Row;
use crate::attention::{AttentionShape, KeyValues};
use crate::cpu::Cpu;
use crate::scalar::Element;
use crate::simd::vectorized;

/// Copies one key/value head of a sequence; what pads becomes zero.
fn gather_keys<T: Element>(
    shape: &AttentionShape,
    source: &[T],
    row_start: impl Fn(usize) -> usize,
    kv_head: usize,
    padded: usize,
    out: &mut [f32],
) {
    let head_dim = shape.head_dim;
    let (rows, rest) = out.split_at_mut(shape.key_length * padded);
    vectorized!({
        for (position, out) in rows.chunks_exact_mut(padded).enumerate() {
            let start = row_start(position) + kv_head * head_dim;
            let (out, padding) = out.split_at_mut(head_dim);
            for (slot, value) in out.iter_mut().zip(&source[start..start + head_dim]) {
                *slot = value.to_f32();
            }
            padding.fill(0.0);
        }
    });
    rest.fill(0.0);
}

pub(super) fn gather_key_values<T: Element>(
    shape: &AttentionShape,
    key_values: KeyValues<'_, Cpu, T>,
    (sequence, kv_head): (usize, usize),
    padded: usize,
    out: [&mut [f32]; 2],
) {
    match key_values {
        KeyValues::Contiguous { keys, values, row_stride } => {
            let row = |position| (sequence * shape.key_length + position) * row_stride;
            for (source, out) in [keys, values].into_iter().zip(out) {
                gather_keys(shape, source, row, kv_head, padded, out);
            }
        }
        KeyValues::Paged { keys, values, block_table, block_length } => {
            let blocks = shape.key_length.div_ceil(block_length);
            let row = |position: usize| {
                let block = block_table[sequence * blocks + position / block_length] as usize;
                (block * block_length + position % block_length) * shape.kv_heads * shape.head_dim
            };
            for (source, out) in [keys, values].into_iter().zip(out) {
                gather_keys(shape, source, row, kv_head, padded, out);
            }
        }
    }
}

/// Copies a tile's rows, times `scale`, as columns: `[D, rows]`. Lanes without a row become zero.
pub(super) fn gather_columns<T: Element>(
    source: &[T],
    (stride, head_dim): (usize, usize),
    tile: &[Row],
    scale: f32,
    lanes: usize,
    out: &mut [f32],
) {
    let out = &mut out[..head_dim * lanes];
    if tile.len() < lanes {
        out.fill(0.0);
    }
    for (lane, row) in tile.iter().enumerate() {
        let start = row.token * stride + row.head * head_dim;
        for (slots, value) in out.chunks_exact_mut(lanes).zip(&source[start..start + head_dim]) {
            slots[lane] = value.to_f32() * scale;
        }
    }
}

/// Copies a tile's rows: `[rows, width]`, what pads being zero.
pub(super) fn gather_rows<T: Element>(
    source: &[T],
    (stride, head_dim): (usize, usize),
    tile: &[Row],
    scale: f32,
    width: usize,
    out: &mut [f32],
) {
    vectorized!({
        for (out, row) in out.chunks_exact_mut(width).zip(tile) {
            let start = row.token * stride + row.head * head_dim;
            let (out, padding) = out.split_at_mut(head_dim);
            for (slot, value) in out.iter_mut().zip(&source[start..start + head_dim]) {
                *slot = value.to_f32() * scale;
            }
            padding.fill(0.0);
        }
    });
    out[tile.len() * width..].fill(0.0);
}
