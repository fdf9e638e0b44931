//! Statistics of routings: the number of tokens that select each routed head, and the mean entropy of the gates.
//!
//! All sums are of integers, so that neither the order of the tokens nor their distribution over ranks changes them.

use moh_kernels::Memory;
use moh_kernels::router::{Routing, SharedHeads};

use crate::Result;

/// The unit of each token's entropy, in nats. With this unit, f64 stores the sum over 2^30 tokens exactly.
const ENTROPY_UNIT: f64 = 1.0 / (1u64 << 20) as f64;

/// The statistics of the layers that route.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RoutingStatistics {
    /// Each layer with a router, in order.
    pub layers: Vec<LayerRouting>,
}

/// The statistics of one layer's routings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerRouting {
    /// The layer, from 0.
    pub layer: usize,
    /// The layer's shared heads.
    pub shared_heads: SharedHeads,
    /// Number of tokens.
    pub tokens: u64,
    /// Number of tokens that selected each routed head. The routed heads are the heads that are not shared, in
    /// ascending order.
    pub selected: Vec<u64>,
    /// Sum of the entropies of the tokens' gates, in units of 2^-20 nats.
    pub entropy: u64,
}

impl RoutingStatistics {
    /// Adds the first `tokens` tokens of a layer's routing.
    pub fn add<M: Memory>(
        &mut self,
        memory: &M,
        layer: usize,
        routing: &Routing<M>,
        tokens: usize,
    ) -> Result<()> {
        match self.layers.iter_mut().find(|known| known.layer == layer) {
            Some(statistics) => statistics.add(memory, routing, tokens),
            None => Ok(()),
        }
    }

    /// Returns all sums in a fixed order, as the addends of a sum over ranks. Sums that a rank has not counted are
    /// zero.
    pub fn sums(&self) -> Vec<u64> {
        let of = |layer: &LayerRouting| {
            let LayerRouting { tokens, entropy, selected, .. } = layer;
            [&[*tokens, *entropy], selected.as_slice()].concat()
        };
        self.layers.iter().flat_map(of).collect()
    }

    /// Replaces all sums, in the order of [`Self::sums`]; sums that are missing in `sums` stay.
    pub fn set_sums(&mut self, sums: impl IntoIterator<Item = u64>) {
        let mut sums = sums.into_iter();
        for LayerRouting { tokens, entropy, selected, .. } in &mut self.layers {
            for sum in [tokens, entropy].into_iter().chain(selected) {
                let Some(value) = sums.next() else { return };
                *sum = value;
            }
        }
    }
}

impl LayerRouting {
    /// Creates statistics without tokens, of a layer with `heads` heads.
    pub fn new(layer: usize, shared_heads: SharedHeads, heads: usize) -> Self {
        let selected = vec![0; heads.saturating_sub(shared_heads.len())];
        LayerRouting { layer, shared_heads, tokens: 0, selected, entropy: 0 }
    }

    /// Returns the routed heads, in ascending order.
    pub fn routed_heads(&self) -> impl Iterator<Item = usize> {
        let shared = self.shared_heads;
        (0..shared.len() + self.selected.len()).filter(move |&head| !shared.contains(head))
    }

    /// Adds the first `tokens` tokens of a routing, or all tokens if it has fewer.
    pub fn add<M: Memory>(
        &mut self,
        memory: &M,
        routing: &Routing<M>,
        tokens: usize,
    ) -> Result<()> {
        let len = routing.tokens() * routing.columns();
        let (mut selected, mut gates) = (vec![0u8; len], vec![0f32; len]);
        memory.download(routing.selected(), &mut selected)?;
        memory.download(routing.gates(), &mut gates)?;
        self.add_rows(&selected, &gates, tokens.min(routing.tokens()));
        Ok(())
    }

    /// Adds `tokens` rows of the tables of a routing, which have a column for each head from the first routed head on.
    fn add_rows(&mut self, selected: &[u8], gates: &[f32], tokens: usize) {
        self.tokens += tokens as u64;
        let leading = self.shared_heads.leading();
        let columns: Vec<usize> = self.routed_heads().map(|head| head - leading).collect();
        if columns.is_empty() {
            return;
        }
        let width = self.selected.len() + self.shared_heads.len() - leading;
        for row in selected.chunks_exact(width).take(tokens) {
            for (count, &column) in self.selected.iter_mut().zip(&columns) {
                *count += u64::from(row[column]);
            }
        }
        for row in gates.chunks_exact(width).take(tokens) {
            self.entropy += (entropy(row) / ENTROPY_UNIT).round() as u64;
        }
    }

    /// Returns the load of each routed head: the share of tokens that selected it.
    pub fn loads(&self) -> impl Iterator<Item = f64> {
        let tokens = self.tokens.max(1) as f64;
        self.selected.iter().map(move |&count| count as f64 / tokens)
    }

    /// Returns the smallest and the largest load; zeros without routed heads.
    pub fn extreme_loads(&self) -> (f64, f64) {
        let smallest = self.loads().reduce(f64::min).unwrap_or(0.0);
        (smallest, self.loads().fold(0.0, f64::max))
    }

    /// Returns the largest load divided by the mean load: 1 if all heads have the same load, or if no head is selected.
    pub fn imbalance(&self) -> f64 {
        let mean = self.loads().sum::<f64>() / self.selected.len().max(1) as f64;
        if mean > 0.0 { self.extreme_loads().1 / mean } else { 1.0 }
    }

    /// Returns the mean over tokens of the entropy of a token's gates, in nats.
    pub fn mean_entropy(&self) -> f64 {
        self.entropy as f64 * ENTROPY_UNIT / self.tokens.max(1) as f64
    }

    /// Returns the entropy of equal gates, in nats: the logarithm of the number of routed heads.
    pub fn max_entropy(&self) -> f64 {
        (self.selected.len().max(1) as f64).ln()
    }
}

/// Returns the entropy of one token's gates, in nats.
pub fn entropy(gates: &[f32]) -> f64 {
    let term = |&gate: &f32| if gate > 0.0 { -f64::from(gate) * f64::from(gate).ln() } else { 0.0 };
    gates.iter().map(term).sum::<f64>().max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-6, "{found}, not {expected}");
    }

    #[test]
    fn loads_and_entropy_are_means_over_the_given_tokens() {
        let mut layer = LayerRouting::new(3, SharedHeads::first(2), 6);
        let selected = [1, 1, 0, 0, 1, 0, 1, 0, 0, 1, 1, 0, 1, 1, 1, 1];
        let gates = [0.25, 0.25, 0.25, 0.25, 1.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.0, 0.0];
        let gates = [&gates[..], &[0.25; 4]].concat();
        // The last row is padding.
        layer.add_rows(&selected, &gates, 3);
        assert_eq!((layer.tokens, layer.selected.as_slice()), (3, &[2, 2, 2, 0][..]));
        assert_eq!(layer.extreme_loads(), (0.0, 2.0 / 3.0));
        close(layer.imbalance(), 4.0 / 3.0);
        close(layer.mean_entropy(), (4f64.ln() + 2f64.ln()) / 3.0);
        close(layer.max_entropy(), 4f64.ln());
    }

    #[test]
    fn shared_heads_among_the_columns_are_not_counted() {
        // Heads 1 and 3 of 5 are shared; the tables have columns for all five heads.
        let shared = SharedHeads::from_heads([1, 3]).unwrap();
        let mut layer = LayerRouting::new(0, shared, 5);
        layer.add_rows(
            &[1, 1, 0, 1, 0, 0, 1, 0, 1, 1],
            &[0.5, 0.0, 0.25, 0.0, 0.25, 0.0, 0.0, 0.0, 0.0, 1.0],
            2,
        );
        assert_eq!(layer.routed_heads().collect::<Vec<_>>(), [0, 2, 4]);
        assert_eq!(layer.selected, [1, 0, 1]);
        close(layer.mean_entropy(), (0.5 * 2f64.ln() + 0.5 * 4f64.ln()) / 2.0);
    }

    #[test]
    fn sums_of_parts_are_those_of_the_whole() {
        let rows = [[1u8, 0, 1], [0, 1, 1], [1, 1, 0]];
        let gates = [[0.2f32, 0.5, 0.3], [0.7, 0.2, 0.1], [0.3, 0.3, 0.4]];
        let statistics =
            || RoutingStatistics { layers: vec![LayerRouting::new(0, SharedHeads::first(1), 4)] };
        let mut whole = statistics();
        whole.layers[0].add_rows(rows.as_flattened(), gates.as_flattened(), 3);
        let part = |rows: &[[u8; 3]], gates: &[[f32; 3]]| {
            let mut part = statistics();
            let (selected, gates) = (rows.as_flattened(), gates.as_flattened());
            part.layers[0].add_rows(selected, gates, rows.len());
            part.sums()
        };
        let (first, second) = (part(&rows[2..], &gates[2..]), part(&rows[..2], &gates[..2]));
        let mut summed = statistics();
        summed.set_sums(first.iter().zip(&second).map(|(a, b)| a + b));
        assert_eq!(summed, whole);
    }

    #[test]
    fn a_layer_without_tokens_or_selections_has_finite_statistics() {
        let empty = LayerRouting::new(0, SharedHeads::first(0), 0);
        assert_eq!((empty.imbalance(), empty.mean_entropy(), empty.max_entropy()), (1.0, 0.0, 0.0));
        assert_eq!(empty.extreme_loads(), (0.0, 0.0));
        let mut none = LayerRouting::new(0, SharedHeads::first(2), 4);
        none.add_rows(&[0; 4], &[0.5; 4], 2);
        assert_eq!((none.imbalance(), none.extreme_loads()), (1.0, (0.0, 0.0)));
        close(none.mean_entropy(), 2f64.ln());
    }
}
