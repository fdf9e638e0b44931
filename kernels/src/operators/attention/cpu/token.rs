//! Attention of one token per sequence, as in generation: its few rows read keys and values in
//! place. A tile would copy all keys and values for rows that fill few of a vector's lanes.

use std::ops::Range;

use pulp::{Arch, Simd, WithSimd};

use super::KvHead;
use super::forward::Outputs;
use super::gather::{HeadRows, Run};
use super::rows::Row;
use crate::attention::{AttentionArgs, AttentionShape, KeyValues};
use crate::math::{exp, largest, sum};
use crate::matmul::{join, prefetch, products, separate, vector_of_two};
use crate::scratch::with_scratch;
use crate::{Cpu, DType, Element};

/// Interleaved parts of a short inner product's sum.
const PARTS: usize = 8;
/// Keys that are multiplied at a time.
const KEYS: usize = 4;
/// Values that are summed at a time.
const VALUES: usize = 4;

pub(super) fn scratch(shape: &AttentionShape) -> [usize; 3] {
    let group = shape.group_size();
    [group * shape.head_dim, group * shape.key_length, group * shape.head_dim]
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
    let mut rows = Vec::with_capacity(shape.group_size());
    args.for_each_row(kv_head, |row| rows.push(row), |row| outputs.skip(row, head_dim));
    let Some(&first) = rows.first() else { return };
    let query =
        |row: &Row| &queries[row.token * shape.query_stride + row.head * head_dim..][..head_dim];
    with_scratch(scratch(shape), |[factors, scores, sums]| {
        let totals = arch.dispatch(Weighted {
            source: &HeadRows::new(*shape, key_values, kv_head),
            queries: &rows.iter().map(query).collect::<Vec<_>>(),
            head_dim,
            scale: args.scale(),
            // The rows belong to one token.
            visible: args.visible(first),
            factors,
            scores,
            sums: &mut *sums,
        });
        for ((&row, (maximum, sum)), sums) in
            rows.iter().zip(totals).zip(sums.chunks_exact(head_dim))
        {
            let (out, log_sum_exp) = outputs.row(row, head_dim);
            *log_sum_exp = maximum + sum.ln();
            let factor = args.weight(row) / sum;
            for (slot, sum) in out.iter_mut().zip(sums) {
                *slot = T::from_f32(sum * factor);
            }
        }
    });
}

/// The values that a token's rows see, weighted by the exponentials of their scores. Each run of keys, and of values,
/// is read for all rows while it is in the cache.
struct Weighted<'a, 'v, T: Element> {
    source: &'a HeadRows<'v, T>,
    queries: &'a [&'a [T]],
    head_dim: usize,
    scale: f32,
    visible: Range<usize>,
    /// Space for the queries in f32.
    factors: &'a mut [f32],
    scores: &'a mut [f32],
    sums: &'a mut [f32],
}

impl<T: Element> WithSimd for Weighted<'_, '_, T> {
    type Output = Vec<(f32, f32)>;

    /// Overwrites the scores and the sums; returns the largest score of each row and the sum of its exponentials.
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Self::Output {
        let Weighted { source, queries, head_dim, scale, visible, factors, scores, sums } = self;
        let (rows, length) = (queries.len(), visible.len());
        let (factors, scores) = (&mut factors[..rows * head_dim], &mut scores[..rows * length]);
        let is_wide = head_dim >= 2 * S::F32_LANES;
        for (query, elements) in factors.chunks_exact_mut(head_dim).zip(queries) {
            for (slot, element) in query.iter_mut().zip(*elements) {
                *slot = element.to_f32();
            }
            if is_wide && T::DTYPE == DType::BF16 {
                separate::<S>(elements, query);
            }
            query.iter_mut().for_each(|element| *element *= scale);
        }
        let mut before = 0;
        for mut run in source.runs(visible.clone()) {
            let seen = before..before + run.count;
            let mut rows = factors
                .chunks_exact(head_dim)
                .zip(scores.chunks_exact_mut(length).map(|scores| &mut scores[seen.clone()]));
            while let Some((query, scores)) = rows.next() {
                match is_wide {
                    false => narrow_products(query, &run, scores),
                    // Two rows and their keys fill the registers.
                    true if S::REGISTER_COUNT >= 32
                        && let Some((other, others)) = rows.next() =>
                    {
                        wide_products(simd, [query, other], &run, [scores, others]);
                    }
                    true => wide_products(simd, [query], &run, [scores]),
                }
                // The first rows have prefetched for all rows.
                run.ahead = 0;
            }
            before = seen.end;
        }
        let mut totals = Vec::with_capacity(rows);
        // A loop, because its body is compiled here, for these vectors.
        for scores in scores.chunks_exact_mut(length) {
            totals.push(exponentials(scores));
        }
        let sums = &mut sums[..rows * head_dim];
        sums.fill(0.0);
        let mut before = 0;
        for mut run in source.runs(visible) {
            let seen = before..before + run.count;
            let mut rows = sums
                .chunks_exact_mut(head_dim)
                .zip(scores.chunks_exact(length).map(|scores| &scores[seen.clone()]));
            while let Some((sums, scores)) = rows.next() {
                match is_wide {
                    false => add_narrow_values(scores, &run, sums, 0),
                    true if let Some((others, other)) = rows.next() => {
                        add_values(simd, [scores, other], &run, [sums, others]);
                    }
                    true => add_values(simd, [scores], &run, [sums]),
                }
                // The first rows have prefetched for all rows.
                run.ahead = 0;
            }
            before = seen.end;
        }
        if is_wide && T::DTYPE == DType::BF16 {
            sums.chunks_exact_mut(head_dim).for_each(join::<S>);
        }
        totals
    }
}

/// Overwrites the scores of a row with their exponentials; returns the largest score and the sum of the exponentials.
#[inline(always)]
fn exponentials(scores: &mut [f32]) -> (f32, f32) {
    let maximum = largest(scores);
    for score in &mut *scores {
        *score = exp(*score - maximum);
    }
    (maximum, sum(scores))
}

/// Computes the inner products of R queries with the keys of a run, [`KEYS`] keys at a time.
#[inline(always)]
fn wide_products<S: Simd, T: Element, const R: usize>(
    simd: S,
    queries: [&[f32]; R],
    run: &Run<'_, T>,
    mut scores: [&mut [f32]; R],
) {
    let whole = run.count / KEYS * KEYS;
    for at in (0..whole).step_by(KEYS) {
        let keys = [0, 1, 2, 3].map(|i| run.key(at + i));
        let products = products(simd, queries, keys, run.ahead);
        for (scores, products) in scores.iter_mut().zip(products) {
            scores[at..at + KEYS].copy_from_slice(&products);
        }
    }
    for at in whole..run.count {
        let products = products(simd, queries, [run.key(at)], run.ahead);
        for (scores, [product]) in scores.iter_mut().zip(products) {
            scores[at] = product;
        }
    }
}

/// Computes the products for heads that do not fill two vectors. The parts of a sum are added in pairs, as vectors do.
#[inline(always)]
fn narrow_products<T: Element>(query: &[f32], run: &Run<'_, T>, scores: &mut [f32]) {
    let (whole_query, rest_of_query) = query.as_chunks::<PARTS>();
    for (at, score) in scores.iter_mut().enumerate() {
        prefetch(run.key(at), run.ahead);
        let (whole_key, rest_of_key) = run.key(at).as_chunks::<PARTS>();
        let mut parts = [0f32; PARTS];
        for (query, key) in whole_query.iter().zip(whole_key) {
            parts = std::array::from_fn(|i| query[i].mul_add(key[i].to_f32(), parts[i]));
        }
        for ((part, query), key) in parts.iter_mut().zip(rest_of_query).zip(rest_of_key) {
            *part = query.mul_add(key.to_f32(), *part);
        }
        let four: [f32; PARTS / 2] = std::array::from_fn(|i| parts[i] + parts[i + PARTS / 2]);
        let two: [f32; PARTS / 4] = std::array::from_fn(|i| four[i] + four[i + PARTS / 4]);
        *score = two[0] + two[1];
    }
}

/// Adds a run's values to the sums of R rows, each times its probability; [separated](separate) if they are bf16. The
/// sums of two vectors of columns stay in registers.
#[inline(always)]
fn add_values<S: Simd, T: Element, const R: usize>(
    simd: S,
    probabilities: [&[f32]; R],
    run: &Run<'_, T>,
    mut sums: [&mut [f32]; R],
) {
    let two = 2 * S::F32_LANES;
    let whole = sums[0].len() / two * two;
    for at in (0..whole).step_by(two) {
        let mut columns = [[simd.splat_f32s(0.0); 2]; R];
        for (columns, sums) in columns.iter_mut().zip(&sums) {
            columns.copy_from_slice(S::as_simd_f32s(&sums[at..at + two]).0);
        }
        for key in 0..run.count {
            let value = &run.value(key)[at..at + two];
            prefetch(value, run.ahead);
            let value = [vector_of_two(simd, value, 0), vector_of_two(simd, value, 1)];
            for (columns, probabilities) in columns.iter_mut().zip(&probabilities) {
                let probability = simd.splat_f32s(probabilities[key]);
                for (column, value) in columns.iter_mut().zip(value) {
                    *column = simd.mul_add_e_f32s(probability, value, *column);
                }
            }
        }
        for (columns, sums) in columns.iter().zip(&mut sums) {
            S::as_mut_simd_f32s(&mut sums[at..at + two]).0.copy_from_slice(columns);
        }
    }
    for (sums, probabilities) in sums.into_iter().zip(probabilities) {
        add_narrow_values(probabilities, run, sums, whole);
    }
}

/// Adds values to a row's sums, starting at a column: [`VALUES`] values at a time.
#[inline(always)]
fn add_narrow_values<T: Element>(
    probabilities: &[f32],
    run: &Run<'_, T>,
    sums: &mut [f32],
    first: usize,
) {
    let sums = &mut sums[first..];
    let (whole, few) = probabilities.as_chunks::<VALUES>();
    for (at, p) in whole.iter().enumerate() {
        let [a, b, c, d] = [0, 1, 2, 3].map(|i| &run.value(VALUES * at + i)[first..]);
        [a, b, c, d].iter().for_each(|value| prefetch(value, run.ahead));
        for ((((sum, a), b), c), d) in sums.iter_mut().zip(a).zip(b).zip(c).zip(d) {
            let sum_of_two = p[1].mul_add(b.to_f32(), p[0].mul_add(a.to_f32(), *sum));
            *sum = p[3].mul_add(d.to_f32(), p[2].mul_add(c.to_f32(), sum_of_two));
        }
    }
    for (&p, at) in few.iter().zip(VALUES * whole.len()..) {
        for (sum, value) in sums.iter_mut().zip(&run.value(at)[first..]) {
            *sum = p.mul_add(value.to_f32(), *sum);
        }
    }
}
