//! Attention of one token per sequence, as in generation: its few rows read keys and values in
//! place. A tile would copy all of them for rows that fill few of a vector's lanes.

use pulp::Arch;

use super::KvHead;
use super::forward::Outputs;
use super::gather::HeadRows;
use super::rows::Row;
use crate::attention::{AttentionArgs, AttentionShape, KeyValues};
use crate::cpu::Cpu;
use crate::math::{exp, largest, sum};
use crate::scalar::Element;
use crate::scratch::with_scratch;
use crate::simd::vectorized;

/// Interleaved parts of an inner product's sum.
const PARTS: usize = 8;
/// Values that are summed at a time.
const VALUES: usize = 4;

/// Lengths of a task's scratch.
pub(super) fn scratch(shape: &AttentionShape) -> [usize; 3] {
    [shape.head_dim, shape.key_length, shape.head_dim]
}

pub(super) fn forward_task<T: Element>(
    arch: Arch,
    args: &AttentionArgs<'_, Cpu>,
    queries: &[T],
    key_values: KeyValues<'_, Cpu, T>,
    outputs: &Outputs<'_, T>,
    kv_head: KvHead,
) {
    let (shape, head_dim) = (&args.shape, args.shape.head_dim);
    let source = HeadRows::new(*shape, key_values, kv_head);
    with_scratch(scratch(shape), |[query, scores, sums]| {
        let attend = |row: Row| {
            let elements = &queries[row.token * shape.query_stride + row.head * head_dim..];
            for (slot, element) in query.iter_mut().zip(elements) {
                *slot = element.to_f32() * args.scale();
            }
            let visible = args.visible(row);
            let (first, scores) = (visible.start, &mut scores[..visible.len()]);
            let (maximum, sum) = vectorized!(arch, {
                let softmax = exponentials(query, &source, first, scores);
                add_values(scores, &source, first, sums);
                softmax
            });
            let (out, log_sum_exp) = outputs.row(row, head_dim);
            *log_sum_exp = maximum + sum.ln();
            let factor = args.weight(row) / sum;
            for (slot, sum) in out.iter_mut().zip(&*sums) {
                *slot = T::from_f32(sum * factor);
            }
        };
        args.for_each_row(kv_head, attend, |row| outputs.skip(row, head_dim));
    });
}

/// Writes the exponentials of the scores relative to the largest, and returns the largest score and
/// their sum. The keys start at position `first`.
#[inline(always)]
fn exponentials<T: Element>(
    query: &[f32],
    source: &HeadRows<'_, T>,
    first: usize,
    scores: &mut [f32],
) -> (f32, f32) {
    for (i, score) in scores.iter_mut().enumerate() {
        *score = inner_product(query, source.key(first + i));
    }
    let maximum = largest(scores);
    for score in &mut *scores {
        *score = exp(*score - maximum);
    }
    (maximum, sum(scores))
}

#[inline(always)]
fn inner_product<T: Element>(query: &[f32], key: &[T]) -> f32 {
    let (queries, few_queries) = query.as_chunks::<PARTS>();
    let (keys, few_keys) = key.as_chunks::<PARTS>();
    let mut parts = [0f32; PARTS];
    for (query, key) in queries.iter().zip(keys) {
        for i in 0..PARTS {
            parts[i] += query[i] * key[i].to_f32();
        }
    }
    for ((part, query), key) in parts.iter_mut().zip(few_queries).zip(few_keys) {
        *part += query * key.to_f32();
    }
    for half in [4, 2, 1] {
        for i in 0..half {
            parts[i] += parts[i + half];
        }
    }
    parts[0]
}

/// `sums = probabilities values`, in blocks of columns that stay in registers.
#[inline(always)]
fn add_values<T: Element>(
    probabilities: &[f32],
    source: &HeadRows<'_, T>,
    first: usize,
    sums: &mut [f32],
) {
    let (blocks, rest) = sums.as_chunks_mut::<PARTS>();
    let first_of_rest = blocks.len() * PARTS;
    for (block, sums) in blocks.iter_mut().enumerate() {
        *sums = sum_of_values(probabilities, source, first, block * PARTS);
    }
    for (i, sum) in rest.iter_mut().enumerate() {
        [*sum] = sum_of_values(probabilities, source, first, first_of_rest + i);
    }
}

/// `WIDTH` columns from `column` on, in [`VALUES`] interleaved sums.
#[inline(always)]
fn sum_of_values<T: Element, const WIDTH: usize>(
    probabilities: &[f32],
    source: &HeadRows<'_, T>,
    first: usize,
    column: usize,
) -> [f32; WIDTH] {
    let mut sums = [[0f32; WIDTH]; VALUES];
    for (chunk, probabilities) in probabilities.chunks(VALUES).enumerate() {
        let positions = first + chunk * VALUES..;
        for ((sums, &probability), position) in sums.iter_mut().zip(probabilities).zip(positions) {
            let values = &source.value(position)[column..column + WIDTH];
            for i in 0..WIDTH {
                sums[i] += probability * values[i].to_f32();
            }
        }
    }
    let [a, b, c, d] = sums;
    let mut sum = [0f32; WIDTH];
    for i in 0..WIDTH {
        sum[i] = (a[i] + b[i]) + (c[i] + d[i]);
    }
    sum
}
