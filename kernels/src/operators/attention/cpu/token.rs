//! Attention of one token per sequence, as in generation: its few rows read keys and values in
//! place. A tile would copy all of them for rows that fill few of a vector's lanes.

use pulp::{Arch, Simd, WithSimd};

use super::KvHead;
use super::forward::Outputs;
use super::gather::{HeadRows, Run};
use super::rows::Row;
use crate::attention::{AttentionArgs, AttentionShape, KeyValues};
use crate::cpu::Cpu;
use crate::math::{exp, largest, sum};
use crate::matmul::{products, separate};
use crate::scalar::{DType, Element};
use crate::scratch::with_scratch;

/// Interleaved parts of a short inner product's sum.
const PARTS: usize = 8;
/// Keys that are multiplied at a time.
const KEYS: usize = 4;
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
            let visible = args.visible(row);
            let (maximum, sum) = arch.dispatch(Weighted {
                source: &source,
                elements: &elements[..head_dim],
                scale: args.scale(),
                first: visible.start,
                query: &mut *query,
                scores: &mut scores[..visible.len()],
                sums: &mut *sums,
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

/// The values that a row sees, weighted by the exponentials of its scores.
struct Weighted<'a, 'v, T: Element> {
    source: &'a HeadRows<'v, T>,
    /// The query.
    elements: &'a [T],
    scale: f32,
    /// Position of the first key.
    first: usize,
    /// Room for the query in f32.
    query: &'a mut [f32],
    scores: &'a mut [f32],
    sums: &'a mut [f32],
}

impl<T: Element> WithSimd for Weighted<'_, '_, T> {
    type Output = (f32, f32);

    /// Overwrites the scores and the sums; returns the largest score and the sum of the exponentials.
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> (f32, f32) {
        let Weighted { source, elements, scale, first, query, scores, sums } = self;
        for (slot, element) in query.iter_mut().zip(elements) {
            *slot = element.to_f32();
        }
        let is_wide = elements.len() >= 2 * S::F32_LANES;
        if is_wide && T::DTYPE == DType::BF16 {
            separate::<S>(elements, query);
        }
        query.iter_mut().for_each(|element| *element *= scale);
        let mut rest = &mut *scores;
        for rows in source.runs(first..first + rest.len()) {
            let (scores, others) = rest.split_at_mut(rows.count);
            rest = others;
            match is_wide {
                true => wide_products(simd, query, &rows, scores),
                false => narrow_products(query, &rows, scores),
            }
        }
        let maximum = largest(scores);
        for score in &mut *scores {
            *score = exp(*score - maximum);
        }
        let sum = sum(scores);
        add_values(scores, source, first, sums);
        (maximum, sum)
    }
}

/// The inner products of a query with the keys of a run, [`KEYS`] of them at a time.
#[inline(always)]
fn wide_products<S: Simd, T: Element>(
    simd: S,
    query: &[f32],
    rows: &Run<'_, T>,
    scores: &mut [f32],
) {
    let (whole, few) = scores.as_chunks_mut::<KEYS>();
    let first = KEYS * whole.len();
    for (at, scores) in whole.iter_mut().enumerate() {
        let keys = [0, 1, 2, 3].map(|i| rows.key(KEYS * at + i));
        [*scores] = products(simd, [query], keys);
    }
    for (at, score) in few.iter_mut().enumerate() {
        [[*score]] = products(simd, [query], [rows.key(first + at)]);
    }
}

/// The same of heads that fill no two vectors.
#[inline(always)]
fn narrow_products<T: Element>(query: &[f32], rows: &Run<'_, T>, scores: &mut [f32]) {
    for (at, score) in scores.iter_mut().enumerate() {
        let mut parts = [0f32; PARTS];
        for (query, key) in query.chunks(PARTS).zip(rows.key(at).chunks(PARTS)) {
            for ((part, query), key) in parts.iter_mut().zip(query).zip(key) {
                *part = query.mul_add(key.to_f32(), *part);
            }
        }
        *score = parts.iter().sum();
    }
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
