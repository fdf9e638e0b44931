//! The CPU bodies of attention: one task for each (sequence, key/value head), which takes the
//! packed rows in tiles and forms a tile's scores by one matrix product.

use std::ops::Range;

use rayon::prelude::*;

use super::{AttentionShape, KeyValues};
use crate::cpu::Cpu;
use crate::disjoint::DisjointColumns;
use crate::error::{Result, check_len, ensure};
use crate::math::{dot, exp, max, sum};
use crate::matmul::{Destination, Matrix, MatrixMut, matmul};
use crate::router::cpu::CpuRouting;
use crate::scalar::Element;

/// Packed rows of a tile.
const TILE: usize = 64;

/// What forward and backward share: the problem and who takes part in it.
#[derive(Clone, Copy)]
pub(crate) struct Problem<'a> {
    pub shape: AttentionShape,
    pub causal: bool,
    pub query_offset: usize,
    pub first_key: Option<&'a [u32]>,
    pub selection: Option<&'a CpuRouting>,
    pub weights: Option<&'a [f32]>,
}

/// A selected (token, query head) pair.
#[derive(Clone, Copy)]
struct Row {
    /// Token among all sequences.
    token: usize,
    /// Query head among all heads.
    head: usize,
}

impl Problem<'_> {
    fn check(&self, operator: &'static str) -> Result<()> {
        let tokens = self.shape.tokens();
        if let Some(selection) = self.selection {
            selection.check(operator, tokens, self.shape.heads)?;
        }
        if let Some(weights) = self.weights {
            check_len(operator, "weights", weights.len(), tokens * self.shape.heads)?;
        }
        if let Some(first_key) = self.first_key {
            check_len(operator, "first_key", first_key.len(), tokens)?;
        }
        let end = self.query_offset.saturating_add(self.shape.query_length);
        ensure(operator, !self.causal || end <= self.shape.key_length, || {
            format!("queries up to position {end} of {} keys", self.shape.key_length)
        })?;
        self.check_visible(operator)
    }

    /// Refuses a query that sees no key, whose softmax would be 0 / 0, and bounds that decrease.
    fn check_visible(&self, operator: &'static str) -> Result<()> {
        let length = self.shape.query_length;
        for token in 0..self.shape.tokens() {
            let visible = self.visible(token);
            ensure(operator, !visible.is_empty(), || format!("query {token} sees no key"))?;
            ensure(
                operator,
                token % length == 0 || self.visible(token - 1).start <= visible.start,
                || format!("first_key of query {token} is less than that of the one before"),
            )?;
        }
        Ok(())
    }

    /// The tasks: every sequence with every key/value head.
    fn tasks(&self) -> impl IndexedParallelIterator<Item = (usize, usize)> + use<> {
        let kv_heads = self.shape.kv_heads;
        (0..self.shape.batch * kv_heads)
            .into_par_iter()
            .map(move |task| (task / kv_heads, task % kv_heads))
    }

    /// The selected rows of one key/value head in one sequence, in token order.
    fn packed_rows(&self, sequence: usize, kv_head: usize) -> Vec<Row> {
        let AttentionShape { query_length, .. } = self.shape;
        let group = self.shape.group_size();
        let tokens = sequence * query_length..(sequence + 1) * query_length;
        let rows = tokens.flat_map(|token| {
            (kv_head * group..(kv_head + 1) * group).map(move |head| Row { token, head })
        });
        match self.selection {
            None => rows.collect(),
            Some(selection) => rows.filter(|row| selection.serves(row.token, row.head)).collect(),
        }
    }

    /// Keys that the token sees.
    fn visible(&self, token: usize) -> Range<usize> {
        let first = self.first_key.map_or(0, |first_key| first_key[token] as usize);
        let end = if self.causal {
            self.query_offset + token % self.shape.query_length + 1
        } else {
            self.shape.key_length
        };
        first.min(end)..end
    }

    /// Keys that some row of the tile sees; `first_key` and the causal bound never decrease.
    fn tile_keys(&self, tile: &[Row]) -> Range<usize> {
        match (tile.first(), tile.last()) {
            (Some(first), Some(last)) => {
                self.visible(first.token).start..self.visible(last.token).end
            }
            _ => 0..0,
        }
    }

    fn weight(&self, row: Row) -> f32 {
        self.weights.map_or(1.0, |weights| weights[row.token * self.shape.heads + row.head])
    }

    fn scale(&self) -> f32 {
        (self.shape.head_dim as f32).sqrt().recip()
    }
}

/// Copies one head's rows out of a packed buffer.
fn gather_rows<T: Element>(
    source: &[T],
    stride: usize,
    head_dim: usize,
    tile: &[Row],
    out: &mut Vec<f32>,
) {
    out.clear();
    for row in tile {
        let start = row.token * stride + row.head * head_dim;
        out.extend(source[start..start + head_dim].iter().map(|value| value.to_f32()));
    }
}

/// Copies one key/value head of a sequence, `[key_length, D]`, as f32.
fn gather_keys<T: Element>(
    shape: &AttentionShape,
    source: &[T],
    row_start: impl Fn(usize) -> usize,
    kv_head: usize,
) -> Vec<f32> {
    let mut out = Vec::with_capacity(shape.key_length * shape.head_dim);
    for position in 0..shape.key_length {
        let start = row_start(position) + kv_head * shape.head_dim;
        out.extend(source[start..start + shape.head_dim].iter().map(|value| value.to_f32()));
    }
    out
}

fn gather_key_values<T: Element>(
    shape: &AttentionShape,
    key_values: KeyValues<'_, Cpu, T>,
    sequence: usize,
    kv_head: usize,
) -> (Vec<f32>, Vec<f32>) {
    match key_values {
        KeyValues::Contiguous { keys, values, row_stride } => {
            let row = |position| (sequence * shape.key_length + position) * row_stride;
            (gather_keys(shape, keys, row, kv_head), gather_keys(shape, values, row, kv_head))
        }
        KeyValues::Paged { keys, values, block_table, block_length } => {
            let blocks = shape.key_length.div_ceil(block_length);
            let row = |position: usize| {
                let block = block_table[sequence * blocks + position / block_length] as usize;
                (block * block_length + position % block_length) * shape.kv_heads * shape.head_dim
            };
            (gather_keys(shape, keys, row, kv_head), gather_keys(shape, values, row, kv_head))
        }
    }
}

fn check_key_values<T: Element>(
    operator: &'static str,
    shape: &AttentionShape,
    key_values: KeyValues<'_, Cpu, T>,
) -> Result<()> {
    let width = shape.kv_heads * shape.head_dim;
    match key_values {
        KeyValues::Contiguous { keys, values, row_stride } => {
            let rows = shape.batch * shape.key_length;
            let needed = if rows == 0 { 0 } else { (rows - 1) * row_stride + width };
            ensure(operator, keys.len() >= needed && values.len() >= needed, || {
                format!("{} keys and {} values, expected {needed}", keys.len(), values.len())
            })
        }
        KeyValues::Paged { keys, values, block_table, block_length } => {
            ensure(operator, block_length > 0, || "blocks of no token".into())?;
            let blocks = shape.batch * shape.key_length.div_ceil(block_length);
            check_len(operator, "block_table", block_table.len(), blocks)?;
            let needed = block_table.iter().max().map_or(0, |&block| block as usize + 1)
                * block_length
                * width;
            ensure(operator, keys.len() >= needed && values.len() >= needed, || {
                format!("{} keys and {} values, expected {needed}", keys.len(), values.len())
            })
        }
    }
}

/// Turns a tile's scaled scores into exponentials less the row's maximum and returns, for each
/// row, (maximum, sum); keys outside the row's range get 0.
fn exponentials(
    problem: &Problem<'_>,
    tile: &[Row],
    keys: &Range<usize>,
    scores: &mut [f32],
    statistics: &mut Vec<(f32, f32)>,
) {
    statistics.clear();
    for (row, scores) in tile.iter().zip(scores.chunks_exact_mut(keys.len().max(1))) {
        let visible = problem.visible(row.token);
        let (before, rest) = scores.split_at_mut(visible.start - keys.start);
        let (seen, after) = rest.split_at_mut(visible.len());
        before.fill(0.0);
        after.fill(0.0);
        let largest = max(seen);
        for score in seen.iter_mut() {
            *score = exp(*score - largest);
        }
        statistics.push((largest, sum(seen)));
    }
}

pub(crate) fn forward<T: Element>(
    problem: Problem<'_>,
    queries: &[T],
    key_values: KeyValues<'_, Cpu, T>,
    out: &mut [T],
    log_sum_exp: &mut [f32],
) -> Result<()> {
    const OPERATOR: &str = "attention_forward";
    let shape = problem.shape;
    shape.check(OPERATOR, out.len(), log_sum_exp.len())?;
    problem.check(OPERATOR)?;
    check_key_values(OPERATOR, &shape, key_values)?;
    check_queries(OPERATOR, &shape, queries.len())?;
    let head_dim = shape.head_dim;
    out.fill(T::from_f32(0.0));
    log_sum_exp.fill(0.0);
    let out = DisjointColumns::new(out, shape.heads * head_dim);
    let log_sum_exp = DisjointColumns::new(log_sum_exp, shape.heads);
    problem.tasks().for_each(|(sequence, kv_head)| {
        let (keys, values) = gather_key_values(&shape, key_values, sequence, kv_head);
        let rows = problem.packed_rows(sequence, kv_head);
        let (mut q, mut scores, mut statistics) = (Vec::new(), Vec::new(), Vec::new());
        let mut o = vec![0f32; TILE * head_dim];
        for tile in rows.chunks(TILE) {
            let seen = problem.tile_keys(tile);
            let part = seen.start * head_dim..seen.end * head_dim;
            gather_rows(queries, shape.query_stride, head_dim, tile, &mut q);
            scores.resize(tile.len() * seen.len(), 0.0);
            let q = Matrix::new(&q, tile.len(), head_dim);
            let k = Matrix::new(&keys[part.clone()], seen.len(), head_dim);
            let v = Matrix::new(&values[part], seen.len(), head_dim);
            let scale = problem.scale();
            let to_scores = MatrixMut::new(&mut scores, tile.len(), seen.len());
            matmul(to_scores, Destination::Overwrite, scale, q, k.transposed());
            exponentials(&problem, tile, &seen, &mut scores, &mut statistics);
            let p = Matrix::new(&scores, tile.len(), seen.len());
            let to_o = MatrixMut::new(&mut o, tile.len(), head_dim);
            matmul(to_o, Destination::Overwrite, 1.0, p, v);
            for ((&row, o), &(largest, total)) in
                tile.iter().zip(o.chunks_exact(head_dim)).zip(&statistics)
            {
                let columns = row.head * head_dim..(row.head + 1) * head_dim;
                // SAFETY: a (token, head) pair is in the packed rows of one task only.
                #[allow(unsafe_code)]
                let (slot, lse) = unsafe {
                    (
                        out.block_mut(row.token, columns),
                        log_sum_exp.block_mut(row.token, row.head..row.head + 1),
                    )
                };
                lse[0] = largest + total.ln();
                let factor = problem.weight(row) / total;
                for (slot, &value) in slot.iter_mut().zip(o) {
                    *slot = T::from_f32(value * factor);
                }
            }
        }
    });
    Ok(())
}

/// The saved tensors and gradients that the backward pass reads.
#[derive(Clone, Copy)]
pub(crate) struct Saved<'a, T> {
    pub qkv: &'a [T],
    pub out: &'a [T],
    pub log_sum_exp: &'a [f32],
    pub d_out: &'a [T],
}

pub(crate) fn backward<T: Element>(
    problem: Problem<'_>,
    saved: Saved<'_, T>,
    d_qkv: &mut [T],
    delta: Option<&mut [f32]>,
) -> Result<()> {
    const OPERATOR: &str = "attention_backward";
    let shape = problem.shape;
    let AttentionShape { heads, kv_heads, head_dim, query_stride, .. } = shape;
    shape.check(OPERATOR, saved.out.len(), saved.log_sum_exp.len())?;
    problem.check(OPERATOR)?;
    check_len(OPERATOR, "d_out", saved.d_out.len(), saved.out.len())?;
    check_len(OPERATOR, "qkv", saved.qkv.len(), shape.tokens() * query_stride)?;
    check_len(OPERATOR, "d_qkv", d_qkv.len(), saved.qkv.len())?;
    ensure(OPERATOR, query_stride == (heads + 2 * kv_heads) * head_dim, || {
        format!("rows of {query_stride} numbers are not packed queries, keys and values")
    })?;
    ensure(OPERATOR, shape.key_length == shape.query_length, || {
        format!("{} queries of {} keys", shape.query_length, shape.key_length)
    })?;
    let mut no_delta = Vec::new();
    let delta = match delta {
        Some(delta) => {
            check_len(OPERATOR, "delta", delta.len(), shape.tokens() * heads)?;
            delta
        }
        None => {
            no_delta.resize(shape.tokens() * heads, 0.0);
            &mut no_delta
        }
    };
    delta.fill(0.0);
    d_qkv.fill(T::from_f32(0.0));
    if d_qkv.is_empty() {
        return Ok(());
    }
    let targets = Targets {
        d_qkv: DisjointColumns::new(d_qkv, query_stride),
        delta: DisjointColumns::new(delta, heads),
    };
    problem.tasks().for_each(|(sequence, kv_head)| {
        backward_task(&problem, saved, &targets, sequence, kv_head)
    });
    Ok(())
}

/// What the tasks of the backward pass write.
struct Targets<'a, T> {
    d_qkv: DisjointColumns<'a, T>,
    delta: DisjointColumns<'a, f32>,
}

fn backward_task<T: Element>(
    problem: &Problem<'_>,
    saved: Saved<'_, T>,
    targets: &Targets<'_, T>,
    sequence: usize,
    kv_head: usize,
) {
    let shape = &problem.shape;
    let AttentionShape { heads, kv_heads, head_dim, query_stride, .. } = *shape;
    let key_values = KeyValues::Contiguous {
        keys: &saved.qkv[heads * head_dim..],
        values: &saved.qkv[(heads + kv_heads) * head_dim..],
        row_stride: query_stride,
    };
    let (keys, values) = gather_key_values(shape, key_values, sequence, kv_head);
    let (mut d_keys, mut d_values) = (vec![0f32; keys.len()], vec![0f32; values.len()]);
    let (mut q, mut d_o) = (Vec::new(), Vec::new());
    let (mut p, mut d_p) = (Vec::new(), Vec::new());
    let mut d_q = vec![0f32; TILE * head_dim];
    let scale = problem.scale();
    for tile in problem.packed_rows(sequence, kv_head).chunks(TILE) {
        let seen = problem.tile_keys(tile);
        let part = seen.start * head_dim..seen.end * head_dim;
        let (rows, columns) = (tile.len(), seen.len());
        gather_rows(saved.qkv, query_stride, head_dim, tile, &mut q);
        gather_rows(saved.d_out, heads * head_dim, head_dim, tile, &mut d_o);
        p.resize(rows * columns, 0.0);
        d_p.resize(rows * columns, 0.0);
        let k = Matrix::new(&keys[part.clone()], columns, head_dim);
        let v = Matrix::new(&values[part.clone()], columns, head_dim);
        let queries = Matrix::new(&q, rows, head_dim);
        let to_p = MatrixMut::new(&mut p, rows, columns);
        matmul(to_p, Destination::Overwrite, scale, queries, k.transposed());
        probabilities(problem, tile, &seen, saved.log_sum_exp, &mut p);
        let d_rows = Matrix::new(&d_o, rows, head_dim);
        let to_d_p = MatrixMut::new(&mut d_p, rows, columns);
        matmul(to_d_p, Destination::Overwrite, 1.0, d_rows, v.transposed());
        // dP becomes dS and, for the values' gradient, P takes the heads' weights on.
        for ((&row, p), d_p) in
            tile.iter().zip(p.chunks_exact_mut(columns)).zip(d_p.chunks_exact_mut(columns))
        {
            let delta = dot(p, d_p);
            let weight = problem.weight(row);
            // SAFETY: a (token, head) pair is in the packed rows of one task only.
            #[allow(unsafe_code)]
            unsafe {
                targets.delta.block_mut(row.token, row.head..row.head + 1)[0] = delta;
            }
            for (p, d_p) in p.iter_mut().zip(d_p) {
                *p *= weight;
                *d_p = *p * (*d_p - delta);
            }
        }
        let p = Matrix::new(&p, rows, columns);
        let d_s = Matrix::new(&d_p, rows, columns);
        let accumulate = Destination::Accumulate;
        let to_values = MatrixMut::new(&mut d_values[part.clone()], columns, head_dim);
        matmul(to_values, accumulate, 1.0, p.transposed(), d_rows);
        let to_keys = MatrixMut::new(&mut d_keys[part], columns, head_dim);
        matmul(to_keys, accumulate, scale, d_s.transposed(), queries);
        let to_q = MatrixMut::new(&mut d_q, rows, head_dim);
        matmul(to_q, Destination::Overwrite, scale, d_s, k);
        for (row, d_q) in tile.iter().zip(d_q.chunks_exact(head_dim)) {
            write(&targets.d_qkv, row.token, row.head * head_dim, d_q);
        }
    }
    let tokens = sequence * shape.query_length..(sequence + 1) * shape.query_length;
    for (column, gradient) in [(heads + kv_head, &d_keys), (heads + kv_heads + kv_head, &d_values)]
    {
        for (token, row) in tokens.clone().zip(gradient.chunks_exact(head_dim)) {
            write(&targets.d_qkv, token, column * head_dim, row);
        }
    }
}

/// Turns a tile's scaled scores into probabilities by the forward pass's log-sum-exp.
fn probabilities(
    problem: &Problem<'_>,
    tile: &[Row],
    keys: &Range<usize>,
    log_sum_exp: &[f32],
    scores: &mut [f32],
) {
    for (row, scores) in tile.iter().zip(scores.chunks_exact_mut(keys.len().max(1))) {
        let visible = problem.visible(row.token);
        let log_sum_exp = log_sum_exp[row.token * problem.shape.heads + row.head];
        let (before, rest) = scores.split_at_mut(visible.start - keys.start);
        let (seen, after) = rest.split_at_mut(visible.len());
        before.fill(0.0);
        after.fill(0.0);
        for score in seen {
            *score = exp(*score - log_sum_exp);
        }
    }
}

/// Writes one head's row of a task.
fn write<T: Element>(target: &DisjointColumns<'_, T>, token: usize, column: usize, row: &[f32]) {
    // SAFETY: a task writes the columns of its own key/value head and of its own query heads, of
    // its own sequence, and no slice outlives this function.
    #[allow(unsafe_code)]
    let slot = unsafe { target.block_mut(token, column..column + row.len()) };
    for (slot, &value) in slot.iter_mut().zip(row) {
        *slot = T::from_f32(value);
    }
}

fn check_queries(operator: &'static str, shape: &AttentionShape, queries: usize) -> Result<()> {
    let tokens = shape.tokens();
    let needed = if tokens == 0 {
        0
    } else {
        (tokens - 1) * shape.query_stride + shape.heads * shape.head_dim
    };
    ensure(operator, queries >= needed, || {
        format!("queries hold {queries} numbers, expected {needed}")
    })
}
