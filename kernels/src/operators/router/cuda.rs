//! The operators that all routers share, on a GPU.

use bytemuck::{Pod, Zeroable};

use super::{Routers, Routing};
use crate::adamw;
use crate::cuda::{Cuda, CudaViewMut, mirrored};
use crate::error::{Result, check_len};
use crate::workspace::gpu::balance_loss_bytes;

/// `Routing` of routing.cuh.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(crate) struct Tables {
    gates: u64,
    selected: u64,
    counts: u64,
    local_selected: u64,
    tokens: u64,
    leading: u32,
    columns: u32,
    local_heads: u32,
    local_leading: u32,
    group_size: u32,
    rank: u32,
    ranks: u32,
    routed: u32,
}

mirrored!(
    Tables, 72,
    gates 0, selected 8, counts 16, local_selected 24, tokens 32, leading 40, columns 44,
    local_heads 48, local_leading 52, group_size 56, rank 60, ranks 64, routed 68,
);

/// `Balance` of router.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Balance {
    products: u64,
    tables: Tables,
}

mirrored!(Balance, 80, products 0, tables 8);

impl Tables {
    /// The tables of a routing as a kernel's parameters.
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
        let parameters = Balance { products, tables: Tables::new(routing) };
        self.launch("router_balance", [columns, 1], 0, &parameters)?;
        adamw::cuda::sum(self, products, columns, scale, out)
    }
}
