//! The query-norm router on a GPU: its tables. The pass over the queries is RoPE's (rope.cu).

use bytemuck::{Pod, Zeroable};

use super::QueryNormRouter;
use crate::adamw;
use crate::backend::Backend;
use crate::cuda::{Cuda, CudaBuffer, CudaView, CudaViewMut};
use crate::error::{Result, check_len, ensure};
use crate::ranks::Heads;

/// `Routing` of rope.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(crate) struct Tables {
    norms: u64,
    gates: u64,
    inv_std: u64,
    selected: u64,
    counts: u64,
    held_selected: u64,
    tokens: u64,
    shared_heads: u32,
    pub(crate) routed: u32,
    top_k: u32,
    held_shared: u32,
    group_size: u32,
    rank: u32,
    ranks: u32,
    padding: u32,
}

/// `Balance` of rope.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Balance {
    products: u64,
    tables: Tables,
}

/// The routing of one block and micro-batch; every table is `[tokens, routed]`.
pub struct CudaRouting {
    router: QueryNormRouter,
    heads: Heads,
    /// Routed heads of the layer.
    routed: usize,
    tokens: usize,
    norms: CudaBuffer<f64>,
    gates: CudaBuffer<f32>,
    /// 1 / std of a token's norms; 0 where they are all equal. `[tokens]`.
    inv_std: CudaBuffer<f64>,
    selected: CudaBuffer<u8>,
    /// Tokens that selected each routed head.
    counts: CudaBuffer<u32>,
    /// The columns of `selected` that are held here; of ranks that share the heads.
    held_selected: CudaBuffer<u8>,
}

impl CudaRouting {
    pub(crate) fn new(
        cuda: &Cuda,
        capacity: usize,
        heads: Heads,
        router: QueryNormRouter,
    ) -> Result<Self> {
        let routed = router.check("routing", heads)?;
        let held = heads.held() - heads.held_below(router.shared_heads);
        let apart = if heads.ranks > 1 { capacity * held } else { 0 };
        Ok(CudaRouting {
            router,
            heads,
            routed,
            tokens: 0,
            norms: cuda.allocate(capacity * routed)?,
            gates: cuda.allocate(capacity * routed)?,
            inv_std: cuda.allocate(capacity)?,
            selected: cuda.allocate(capacity * routed)?,
            counts: cuda.allocate(routed)?,
            held_selected: cuda.allocate(apart)?,
        })
    }

    /// Takes `tokens` tokens on, which are about to be routed.
    pub(crate) fn start(&mut self, tokens: usize, heads: usize) -> Result<()> {
        const OPERATOR: &str = "rope_route_forward";
        ensure(OPERATOR, tokens <= self.inv_std.len(), || {
            format!("the routing has room for {} tokens, not {tokens}", self.inv_std.len())
        })?;
        self.check_heads(OPERATOR, heads)?;
        self.tokens = tokens;
        Ok(())
    }

    /// Refuses tokens or heads other than those that were routed.
    pub(crate) fn check(&self, operator: &'static str, tokens: usize, heads: usize) -> Result<()> {
        check_len(operator, "routing", self.tokens, tokens)?;
        self.check_heads(operator, heads)
    }

    fn check_heads(&self, operator: &'static str, heads: usize) -> Result<()> {
        let held = self.heads.held();
        ensure(operator, heads == held, || {
            format!("the routing was made for {held} heads, not {heads}")
        })
    }

    /// What kernels are given; null tables where nothing is routed.
    pub(crate) fn tables(&self) -> Tables {
        if self.routed == 0 {
            return Tables::zeroed();
        }
        Tables {
            norms: self.norms.address(),
            gates: self.gates.address(),
            inv_std: self.inv_std.address(),
            selected: self.selected.address(),
            counts: self.counts.address(),
            held_selected: self.held_selected.address(),
            tokens: self.tokens as u64,
            shared_heads: self.router.shared_heads as u32,
            routed: self.routed as u32,
            top_k: self.router.top_k as u32,
            held_shared: self.held_shared() as u32,
            group_size: self.heads.group_size as u32,
            rank: self.heads.rank as u32,
            ranks: self.heads.ranks as u32,
            padding: 0,
        }
    }

    /// All heads, and which of them are held here.
    pub(crate) fn heads(&self) -> Heads {
        self.heads
    }

    /// Shared heads that are held here.
    pub(crate) fn held_shared(&self) -> usize {
        self.heads.held_below(self.router.shared_heads)
    }

    /// Which of the routed heads that are held here each token selected.
    pub(crate) fn held_mask(&self) -> CudaView<'_, u8> {
        match self.heads.ranks {
            1 => self.mask(),
            _ => {
                let held = self.heads.held() - self.held_shared();
                self.held_selected.view(0..self.tokens * held)
            }
        }
    }

    /// The squares of all heads' norms, before the tokens choose among them.
    pub(crate) fn squares(&mut self) -> CudaViewMut<'_, f64> {
        self.norms.view_mut(0..self.tokens * self.routed)
    }

    /// Numbers of every token and routed head.
    pub(crate) fn pairs(&self) -> usize {
        self.tokens * self.routed
    }

    pub(crate) fn mask(&self) -> CudaView<'_, u8> {
        self.selected.view(0..self.tokens * self.routed)
    }

    pub(crate) fn gates(&self) -> CudaView<'_, f32> {
        self.gates.view(0..self.tokens * self.routed)
    }
}

/// Counts the tokens that selected each routed head.
pub(crate) fn count_selected(cuda: &Cuda, routing: &CudaRouting) -> Result<()> {
    cuda.launch("router_count_selected", [routing.routed, 1], 0, &routing.tables())
}

/// Scratch of the balance loss.
pub(crate) fn scratch_bytes(routed: usize) -> usize {
    routed * size_of::<f64>()
}

pub(crate) fn balance_loss(
    cuda: &Cuda,
    routing: &CudaRouting,
    scale: f64,
    out: CudaViewMut<'_, f64>,
) -> Result<()> {
    check_len("balance_loss", "out", out.len, 1)?;
    if routing.routed == 0 || routing.tokens == 0 {
        return Ok(());
    }
    let products = cuda.scratch(scratch_bytes(routing.routed))?;
    let parameters = Balance { products, tables: routing.tables() };
    cuda.launch("router_balance", [routing.routed, 1], 0, &parameters)?;
    adamw::cuda::sum(cuda, products, routing.routed, scale, out)
}
