//! What attention's forward and backward passes share on the CPU: the problem, its checks, and
//! which (token, head) pairs take part.

use std::ops::Range;

use crate::attention::{AttentionShape, KeyValues};
use crate::cpu::Cpu;
use crate::error::{Result, check_len, ensure};
use crate::router::cpu::CpuRouting;
use crate::scalar::Element;

/// The problem and who takes part in it.
#[derive(Clone, Copy)]
pub(crate) struct Problem<'a> {
    pub shape: AttentionShape,
    pub causal: bool,
    pub query_offset: usize,
    pub first_key: Option<&'a [u32]>,
    pub selection: Option<&'a CpuRouting>,
    pub weights: Option<&'a [f32]>,
}

/// A (token, query head) pair.
#[derive(Clone, Copy)]
pub(super) struct Row {
    /// Token among all sequences.
    pub token: usize,
    /// Its number among the queries of its sequence.
    pub position: usize,
    /// Query head among all heads.
    pub head: usize,
}

impl Problem<'_> {
    pub(super) fn check(&self, operator: &'static str) -> Result<()> {
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
        let checked = if self.first_key.is_some() { self.shape.tokens() } else { length.min(1) };
        let mut before = 0;
        for token in 0..checked {
            let position = token % length;
            let visible = self.visible(Row { token, position, head: 0 });
            ensure(operator, !visible.is_empty(), || format!("query {token} sees no key"))?;
            ensure(operator, position == 0 || before <= visible.start, || {
                format!("first_key of query {token} is less than that of the one before")
            })?;
            before = visible.start;
        }
        Ok(())
    }

    /// Calls `selected` or `skipped` with every row of one key/value head in one sequence, in
    /// token order.
    pub(super) fn for_each_row(
        &self,
        sequence: usize,
        kv_head: usize,
        mut selected: impl FnMut(Row),
        mut skipped: impl FnMut(Row),
    ) {
        let (length, group) = (self.shape.query_length, self.shape.group_size());
        for position in 0..length {
            let token = sequence * length + position;
            for head in kv_head * group..(kv_head + 1) * group {
                let row = Row { token, position, head };
                match self.selection {
                    Some(selection) if !selection.serves(token, head) => skipped(row),
                    _ => selected(row),
                }
            }
        }
    }

    /// Keys that the row's token sees.
    pub(super) fn visible(&self, row: Row) -> Range<usize> {
        let first = self.first_key.map_or(0, |first_key| first_key[row.token] as usize);
        let end =
            if self.causal { self.query_offset + row.position + 1 } else { self.shape.key_length };
        first.min(end)..end
    }

    /// Keys that some row of the tile sees; `first_key` and the causal bound never decrease.
    pub(super) fn tile_keys(&self, tile: &[Row]) -> Range<usize> {
        match (tile.first(), tile.last()) {
            (Some(&first), Some(&last)) => self.visible(first).start..self.visible(last).end,
            _ => 0..0,
        }
    }

    pub(super) fn weight(&self, row: Row) -> f32 {
        self.weights.map_or(1.0, |weights| weights[row.token * self.shape.heads + row.head])
    }

    /// What scores are multiplied by.
    pub(super) fn scale(&self) -> f32 {
        (self.shape.head_dim as f32).sqrt().recip()
    }

    /// The same where their exponentials are powers of 2.
    pub(super) fn base2_scale(&self) -> f32 {
        self.scale() * std::f32::consts::LOG2_E
    }
}

pub(super) fn check_key_values<T: Element>(
    operator: &'static str,
    shape: &AttentionShape,
    key_values: KeyValues<'_, Cpu, T>,
) -> Result<()> {
    match key_values {
        KeyValues::Contiguous { keys, values, row_stride } => {
            shape.check_contiguous(operator, keys.len(), values.len(), row_stride)
        }
        KeyValues::Paged { keys, values, block_table, block_length } => {
            ensure(operator, block_length > 0, || "blocks of no token".into())?;
            let blocks = shape.batch * shape.key_length.div_ceil(block_length);
            check_len(operator, "block_table", block_table.len(), blocks)?;
            let blocks = block_table.iter().max().map_or(0, |&block| block as usize + 1);
            let needed = blocks * block_length * shape.kv_heads * shape.head_dim;
            ensure(operator, keys.len() >= needed && values.len() >= needed, || {
                format!("{} keys and {} values, expected {needed}", keys.len(), values.len())
            })
        }
    }
}
