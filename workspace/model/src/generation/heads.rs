//! The heads that a pass of a [`BatchGenerator`](super::BatchGenerator) computed for each token.

use moh_kernels::Memory;
use moh_kernels::router::Routing;

use crate::{LayerHeads, Result};

/// The heads of the tokens of a pass, in the order of its chunks.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PassHeads {
    layers: Vec<LayerSelection>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct LayerSelection {
    heads: LayerHeads,
    /// Query heads, H.
    count: usize,
    /// 1 where a token selected a head, `[tokens, columns]`, for the last `columns` heads; empty in a layer that does
    /// not route.
    selected: Vec<u8>,
    columns: usize,
}

impl PassHeads {
    /// Adds the next layer, with `count` query heads, and its routing if tokens select heads.
    pub(super) fn push<M: Memory>(
        &mut self,
        memory: &M,
        heads: LayerHeads,
        count: usize,
        routing: Option<&Routing<M>>,
    ) -> Result<()> {
        let (mut selected, mut columns) = (Vec::new(), 0);
        if let Some(routing) = routing.filter(|_| heads.top_k > 0) {
            columns = routing.columns();
            selected.resize(routing.tokens() * columns, 0);
            memory.download(routing.selected(), &mut selected)?;
        }
        self.layers.push(LayerSelection { heads, count, selected, columns });
        Ok(())
    }

    /// Returns the query heads of each layer that token `row` of the pass computed, in ascending order.
    ///
    /// # Panics
    /// Panics if the pass has no such token.
    pub fn of_token(&self, row: usize) -> Vec<Vec<usize>> {
        self.layers.iter().map(|layer| layer.of_token(row)).collect()
    }
}

impl LayerSelection {
    fn of_token(&self, row: usize) -> Vec<usize> {
        let first = self.count - self.columns;
        let selected = match self.columns {
            0 => &[][..],
            columns => &self.selected[row * columns..(row + 1) * columns],
        };
        let is_selected = |head: usize| head >= first && selected.get(head - first) == Some(&1);
        (0..self.count)
            .filter(|&head| self.heads.shared.contains(head) || is_selected(head))
            .collect()
    }
}
