//! The CPU bodies of the operators that all routers share: the end of a selection, and the balance loss.

use super::{Routers, Routing, SharedHeads};
use crate::{Cpu, Result, check_len};

impl Routers for Cpu {
    fn complete_routing(&self, routing: &mut Routing<Self>) -> Result<()> {
        let (tokens, columns) = (routing.tokens(), routing.columns());
        let local = routing.local_columns();
        if columns == 0 {
            return Ok(());
        }
        let selected = &routing.selected[..tokens * columns];
        routing.counts.fill(0);
        for row in selected.chunks_exact(columns) {
            for (count, &selected) in routing.counts.iter_mut().zip(row) {
                *count += u32::from(selected);
            }
        }
        if routing.shape.heads.ranks > 1 && !local.is_empty() {
            let rows = routing.local_selected.chunks_exact_mut(local.len());
            for (to, from) in rows.zip(selected.chunks_exact(columns)) {
                for (to, &index) in to.iter_mut().zip(&local) {
                    *to = from[index];
                }
            }
        }
        Ok(())
    }

    fn route_to_shared(
        &self,
        tokens: usize,
        shared: SharedHeads,
        routing: &mut Routing<Self>,
    ) -> Result<()> {
        routing.begin(tokens, shared)?;
        let columns = routing.columns();
        let mark = |column| u8::from(shared.contains(shared.leading() + column));
        let row: Vec<u8> = (0..columns).map(mark).collect();
        for marks in routing.selected_mut().chunks_exact_mut(columns.max(1)) {
            marks.copy_from_slice(&row);
        }
        routing.gates_mut().fill(0.0);
        self.complete_routing(routing)
    }

    fn balance_loss(&self, routing: &Routing<Self>, scale: f64, out: &mut [f64]) -> Result<()> {
        check_len("balance_loss", "out", out.len(), 1)?;
        let (tokens, columns) = (routing.tokens().max(1) as f64, routing.columns());
        let mut mean_gate = vec![0f64; columns];
        for row in routing.gates().chunks_exact(columns.max(1)) {
            for (sum, &gate) in mean_gate.iter_mut().zip(row) {
                *sum += f64::from(gate);
            }
        }
        let products = load(routing).zip(&mean_gate).map(|(share, sum)| share * sum / tokens);
        out[0] += scale * products.sum::<f64>();
        Ok(())
    }
}

/// Returns the share of tokens that selected each column's head.
pub(crate) fn load(routing: &Routing<Cpu>) -> impl Iterator<Item = f64> {
    let tokens = routing.tokens().max(1) as f64;
    routing.counts[..routing.columns()].iter().map(move |&count| f64::from(count) / tokens)
}
