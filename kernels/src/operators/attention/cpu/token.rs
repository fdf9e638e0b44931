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
const PARTS: usize = 16;
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
    let mut rest = &mut *scores;
    for rows in source.runs(first..first + rest.len()) {
        let (scores, others) = rest.split_at_mut(rows.count);
        rest = others;
        for (score, key) in scores.iter_mut().zip(rows.keys()) {
            *score = inner_product(query, key);
        }
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
            parts[i] = query[i].mul_add(key[i].to_f32(), parts[i]);
        }
    }
    for ((part, query), key) in parts.iter_mut().zip(few_queries).zip(few_keys) {
        *part += query * key.to_f32();
    }
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            parts[i] += parts[i + half];
        }
    }
    parts[0]
}

/// `sums = probabilities values`, row by row, [`VALUES`] of them at a time.
#[inline(always)]
fn add_values<T: Element>(
    probabilities: &[f32],
    source: &HeadRows<'_, T>,
    first: usize,
    sums: &mut [f32],
) {
    sums.fill(0.0);
    let mut rest = probabilities;
    for rows in source.runs(first..first + rest.len()) {
        let (own, others) = rest.split_at(rows.count);
        rest = others;
        let (whole, few) = own.as_chunks::<VALUES>();
        for (at, p) in whole.iter().enumerate() {
            let [a, b, c, d] = [0, 1, 2, 3].map(|i| rows.value(VALUES * at + i));
            for ((((sum, a), b), c), d) in sums.iter_mut().zip(a).zip(b).zip(c).zip(d) {
                let sum_of_two = p[1].mul_add(b.to_f32(), p[0].mul_add(a.to_f32(), *sum));
                *sum = p[3].mul_add(d.to_f32(), p[2].mul_add(c.to_f32(), sum_of_two));
            }
        }
        for (&p, at) in few.iter().zip(VALUES * whole.len()..) {
            for (sum, value) in sums.iter_mut().zip(rows.value(at)) {
                *sum = p.mul_add(value.to_f32(), *sum);
            }
        }
    }
}
