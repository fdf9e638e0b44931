//! Copies from packed buffers to the factors of attention's matmuls.

use std::ops::Range;

use super::KvHead;
use super::factor::Factor;
use super::rows::Row;
use crate::attention::{AttentionShape, KeyValues};
use crate::matmul::{Matrix, to_row_major};
use crate::simd::vectorized;
use crate::{Cpu, Element};

/// Copies `count` rows as factors with terms along the columns: `[rows, width / TERMS]`. Padding, and
/// the rows after them, are set to zero.
pub(super) fn gather_rows<'a, T: Element, F: Factor>(
    count: usize,
    row: impl Fn(usize) -> &'a [T],
    width: usize,
    out: &mut [F],
) {
    let (rows, rest) = out.split_at_mut(count * (width / F::TERMS));
    vectorized!({
        for (i, out) in rows.chunks_exact_mut(width / F::TERMS).enumerate() {
            let terms = row(i).chunks_exact(F::TERMS);
            let (out, padding) = out.split_at_mut(terms.len());
            for (slot, terms) in out.iter_mut().zip(terms) {
                *slot = F::of(|term| terms[term]);
            }
            padding.fill(F::zeroed());
        }
    });
    rest.fill(F::zeroed());
}

/// Copies `count` rows as factors with terms along the rows: `[rows / TERMS, width]`. Padding, and
/// the rows after them, are set to zero.
pub(super) fn gather_along_rows<'a, T: Element, F: Factor>(
    count: usize,
    row: impl Fn(usize) -> &'a [T],
    width: usize,
    out: &mut [F],
) {
    let (whole, rest) = out.split_at_mut(count / F::TERMS * width);
    vectorized!({
        for (i, out) in whole.chunks_exact_mut(width).enumerate() {
            let (first, last) = (row(i * F::TERMS), row(i * F::TERMS + F::TERMS - 1));
            let (out, padding) = out.split_at_mut(first.len());
            for ((slot, &first), &last) in out.iter_mut().zip(first).zip(last) {
                *slot = F::of(|term| if term == 0 { first } else { last });
            }
            padding.fill(F::zeroed());
        }
    });
    rest.fill(F::zeroed());
    if !count.is_multiple_of(F::TERMS) {
        for (slot, &element) in rest.iter_mut().zip(row(count - 1)) {
            *slot = F::of(|term| if term == 0 { element } else { T::zeroed() });
        }
    }
}

/// Copies a tile's rows as columns of factors: `[width / TERMS, lanes]`. Padding, and lanes without a
/// row, are set to zero. `scratch` has the same length.
pub(super) fn gather_columns<'a, T: Element, F: Factor>(
    count: usize,
    row: impl Fn(usize) -> &'a [T],
    lanes: usize,
    scratch: &mut [F],
    out: &mut [F],
) {
    let factors = out.len() / lanes;
    gather_rows(count, row, factors * F::TERMS, scratch);
    let rows = Matrix::new(bytemuck::cast_slice(scratch), lanes, factors);
    to_row_major(rows.transposed(), bytemuck::cast_slice_mut(out), lanes);
}

/// Writes a tile's columns `[width, lanes]`, times a factor for each lane, as rows. `scratch` has the
/// same length.
pub(super) fn scatter_columns<'a, T: Element>(
    columns: &[f32],
    factors: &[f32],
    scratch: &mut [f32],
    rows: impl Iterator<Item = &'a mut [T]>,
) {
    let lanes = factors.len();
    let width = columns.len() / lanes;
    to_row_major(Matrix::new(columns, width, lanes).transposed(), scratch, width);
    vectorized!({
        for ((row, elements), factor) in rows.zip(scratch.chunks_exact(width)).zip(factors) {
            for (slot, element) in row.iter_mut().zip(elements) {
                *slot = T::from_f32(element * factor);
            }
        }
    });
}

/// Returns the rows of a tile in a buffer with `stride` elements per token.
pub(super) fn tile_rows<'a, T>(
    source: &'a [T],
    stride: usize,
    head_dim: usize,
    tile: &[Row],
) -> impl Fn(usize) -> &'a [T] {
    move |i| &source[tile[i].token * stride + tile[i].head * head_dim..][..head_dim]
}

/// Positions between the row that is read and the row that is prefetched.
const AHEAD: usize = 64;

/// Keys and values with equal distances.
pub(super) struct Run<'a, T> {
    keys: &'a [T],
    values: &'a [T],
    stride: usize,
    pub(super) count: usize,
    /// Distance in bytes from a row to the row of a later run that is prefetched with it; 0 to disable prefetching.
    pub(super) ahead: isize,
    head_dim: usize,
}

impl<'a, T> Run<'a, T> {
    #[inline(always)]
    pub(super) fn key(&self, row: usize) -> &'a [T] {
        &self.keys[row * self.stride..][..self.head_dim]
    }

    #[inline(always)]
    pub(super) fn value(&self, row: usize) -> &'a [T] {
        &self.values[row * self.stride..][..self.head_dim]
    }
}

/// The rows of one key/value head of a sequence.
#[derive(Clone, Copy)]
pub(super) struct HeadRows<'a, T: Element> {
    shape: AttentionShape,
    key_values: KeyValues<'a, Cpu, T>,
    kv_head: KvHead,
}

impl<'a, T: Element> HeadRows<'a, T> {
    pub(super) fn new(
        shape: AttentionShape,
        key_values: KeyValues<'a, Cpu, T>,
        kv_head: KvHead,
    ) -> Self {
        HeadRows { shape, key_values, kv_head }
    }

    #[inline(always)]
    pub(super) fn key(&self, position: usize) -> &'a [T] {
        match self.key_values {
            KeyValues::Contiguous { keys, .. } | KeyValues::Paged { keys, .. } => {
                &keys[self.start(position)..][..self.shape.head_dim]
            }
        }
    }

    #[inline(always)]
    pub(super) fn value(&self, position: usize) -> &'a [T] {
        match self.key_values {
            KeyValues::Contiguous { values, .. } | KeyValues::Paged { values, .. } => {
                &values[self.start(position)..][..self.shape.head_dim]
            }
        }
    }

    /// Returns the rows of a range of positions, in runs of rows with equal distances.
    #[inline(always)]
    pub(super) fn runs(&self, positions: Range<usize>) -> impl Iterator<Item = Run<'a, T>> {
        let (source, head_dim) = (*self, self.shape.head_dim);
        let mut next = positions.start;
        std::iter::from_fn(move || {
            if next >= positions.end {
                return None;
            }
            let left = positions.end - next;
            let (keys, values, stride, block_length) = match source.key_values {
                KeyValues::Contiguous { keys, values, row_stride } => {
                    (keys, values, row_stride, positions.end)
                }
                KeyValues::Paged { keys, values, block_length, .. } => {
                    (keys, values, head_dim, block_length)
                }
            };
            let count = left.min(block_length - next % block_length);
            let start = source.start(next);
            let later = next + AHEAD.next_multiple_of(block_length);
            let later = if later < positions.end { source.start(later) } else { start };
            let ahead = (later as isize - start as isize) * size_of::<T>() as isize;
            next += count;
            let (keys, values) = (&keys[start..], &values[start..]);
            Some(Run { keys, values, stride, count, ahead, head_dim })
        })
    }

    #[inline(always)]
    fn start(&self, position: usize) -> usize {
        let AttentionShape { key_length, kv_heads, head_dim, .. } = self.shape;
        let KvHead { sequence, kv_head } = self.kv_head;
        match self.key_values {
            KeyValues::Contiguous { row_stride, .. } => {
                (sequence * key_length + position) * row_stride + kv_head * head_dim
            }
            KeyValues::Paged { block_table, block_length, .. } => {
                let blocks = key_length.div_ceil(block_length);
                let block = block_table[sequence * blocks + position / block_length] as usize;
                let row = (block * kv_heads + kv_head) * block_length + position % block_length;
                row * head_dim
            }
        }
    }
}
