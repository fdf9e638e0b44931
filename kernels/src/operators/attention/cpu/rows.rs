//! Shared by attention's forward and backward passes on the CPU: checks of the arguments, and the
//! selected (token, head) pairs.

use std::ops::Range;

use super::KvHead;
use crate::attention::{AttentionArgs, KeyValues};
use crate::{Cpu, Element, Result, ensure};

/// A (token, query head) pair.
#[derive(Clone, Copy)]
pub(super) struct Row {
    /// Token among all sequences.
    pub token: usize,
    /// Index among the queries of the token's sequence.
    pub position: usize,
    /// Query head among all heads.
    pub head: usize,
}

impl AttentionArgs<'_, Cpu> {
    fn weights(&self) -> Option<&[f32]> {
        self.selection.and_then(|selection| selection.weights)
    }

    /// Returns whether outputs are multiplied by weights.
    pub(super) fn is_weighted(&self) -> bool {
        self.weights().is_some()
    }

    /// Rejects a query that sees no key (its softmax would be 0 / 0), and bounds that decrease.
    pub(super) fn check_visible(&self, operator: &'static str) -> Result<()> {
        let length = self.shape.query_length;
        let checked =
            if self.document_start.is_some() { self.shape.tokens() } else { length.min(1) };
        let mut before = 0;
        for token in 0..checked {
            let position = token % length;
            let visible = self.visible(Row { token, position, head: 0 });
            ensure(operator, !visible.is_empty(), || format!("query {token} sees no key"))?;
            ensure(operator, position == 0 || before <= visible.start, || {
                format!("document_start of query {token} is less than that of the one before")
            })?;
            before = visible.start;
        }
        Ok(())
    }

    /// Calls `selected` or `skipped` with every row of one key/value head in one sequence, in
    /// token order.
    pub(super) fn for_each_row(
        &self,
        KvHead { sequence, kv_head }: KvHead,
        mut selected: impl FnMut(Row),
        mut skipped: impl FnMut(Row),
    ) {
        let (length, group) = (self.shape.query_length, self.shape.group_size());
        for position in 0..length {
            let token = sequence * length + position;
            for head in kv_head * group..(kv_head + 1) * group {
                let row = Row { token, position, head };
                if self.is_selected(row) { selected(row) } else { skipped(row) }
            }
        }
    }

    /// Returns whether the row's token computes its head.
    #[inline]
    fn is_selected(&self, row: Row) -> bool {
        let Some(selection) = &self.selection else { return true };
        match row.head.checked_sub(selection.shared_heads) {
            None => true,
            Some(routed) => {
                let columns = self.shape.heads - selection.shared_heads;
                selection.routed[row.token * columns + routed] != 0
            }
        }
    }

    /// Returns the keys that the row's token sees.
    pub(super) fn visible(&self, row: Row) -> Range<usize> {
        let first = self.document_start.map_or(0, |starts| starts[row.token] as usize);
        let end =
            if self.causal { self.query_offset + row.position + 1 } else { self.shape.key_length };
        first.min(end)..end
    }

    /// Returns the keys that at least one row of the tile sees; `document_start` and the causal bound never decrease.
    pub(super) fn tile_keys(&self, tile: &[Row]) -> Range<usize> {
        match (tile.first(), tile.last()) {
            (Some(&first), Some(&last)) => self.visible(first).start..self.visible(last).end,
            _ => 0..0,
        }
    }

    pub(super) fn weight(&self, row: Row) -> f32 {
        self.weights().map_or(1.0, |weights| weights[row.token * self.shape.heads + row.head])
    }

    /// Returns the scale of scores for exponentials that are computed as powers of 2.
    pub(super) fn base2_scale(&self) -> f32 {
        self.scale() * std::f32::consts::LOG2_E
    }
}

/// Returns the number of blocks that a block table's entries refer to.
pub(super) fn blocks<T: Element>(key_values: KeyValues<'_, Cpu, T>) -> Option<usize> {
    let KeyValues::Paged { block_table, .. } = key_values else { return None };
    Some(block_table.iter().max().map_or(0, |&block| block as usize + 1))
}
