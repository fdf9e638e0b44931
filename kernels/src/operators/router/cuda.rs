//! The operators that all routers share, on a GPU: the end of a selection, and the balance loss.

use super::{Routers, Routing, SharedHeads};
use crate::cuda::parameters::router::{Balance, Routing as Tables, Shared};
use crate::cuda::{Cuda, CudaViewMut, blocks};
use crate::workspace::gpu::balance_loss_bytes;
use crate::{Result, adamw, check_len};

impl Tables {
    /// Returns the tables of a routing as a kernel's parameters.
    pub(crate) fn new(routing: &Routing<Cuda>) -> Self {
        let heads = routing.heads();
        Tables {
            gates: routing.gates.address(),
            selected: routing.selected.address(),
            counts: routing.counts.address(),
            local_selected: routing.local_selected.address(),
            tokens: routing.tokens() as u64,
            leading: routing.shared().leading() as u32,
            columns: routing.columns() as u32,
            local_heads: heads.local() as u32,
            local_leading: routing.local_leading() as u32,
            group_size: heads.group_size as u32,
            rank: heads.rank as u32,
            ranks: heads.ranks as u32,
            routed: routing.routed() as u32,
        }
    }
}

impl Routers for Cuda {
    fn complete_routing(&self, routing: &mut Routing<Self>) -> Result<()> {
        let tables = Tables::new(routing);
        self.launch("router_count_selected", [routing.columns(), 1], 0, &tables)?;
        if routing.heads().ranks > 1 && routing.columns() > 0 {
            self.launch("router_select_local", [routing.tokens(), 1], 0, &tables)?;
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
        let elements = tokens * routing.columns();
        let parameters = Shared { routing: Tables::new(routing), shared: shared.column_bits() };
        self.launch("router_to_shared", [blocks(elements), 1], 0, &parameters)?;
        self.complete_routing(routing)
    }

    fn balance_loss(
        &self,
        routing: &Routing<Self>,
        scale: f64,
        out: CudaViewMut<'_, f64>,
    ) -> Result<()> {
        check_len("balance_loss", "out", out.len, 1)?;
        let columns = routing.columns();
        if columns == 0 || routing.tokens() == 0 {
            return Ok(());
        }
        let products = self.scratch(balance_loss_bytes(columns))?;
        let parameters = Balance { products, routing: Tables::new(routing) };
        self.launch("router_balance", [columns, 1], 0, &parameters)?;
        adamw::cuda::sum(self, products, columns, scale, out)
    }
}
