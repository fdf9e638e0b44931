//! The pass over queries and keys on a GPU.

use bytemuck::{Pod, Zeroable};

use super::{QkvShape, RopeTable, check};
use crate::backend::Backend;
use crate::cuda::{Cuda, CudaView, CudaViewMut, address_or_null, name};
use crate::error::{Result, check_len};
use crate::ranks::AllReduce;
use crate::router::cuda::{CudaRouting, Tables, count_selected};
use crate::router::{RouterGradient, RouterRanks, exchange};
use crate::scalar::Element;

/// `Parameters` of rope.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Parameters {
    qkv: u64,
    d_qkv: u64,
    cos: u64,
    sin: u64,
    delta: u64,
    deltas: u64,
    first_position: u64,
    length: u64,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    balance_weight: f32,
    tables: Tables,
}

impl Parameters {
    fn new(shape: &QkvShape, table: RopeTable<'_, Cuda>, first_position: usize) -> Self {
        Parameters {
            cos: table.cos.address,
            sin: table.sin.address,
            first_position: first_position as u64,
            length: shape.length as u64,
            heads: shape.heads as u32,
            kv_heads: shape.kv_heads as u32,
            head_dim: shape.head_dim as u32,
            ..Self::zeroed()
        }
    }

    /// Room for three f64 of each routed head: what forward needs, backward needs two.
    fn shared_bytes(&self) -> usize {
        3 * self.tables.routed as usize * size_of::<f64>()
    }
}

pub(crate) fn forward<T: Element>(
    cuda: &Cuda,
    shape: &QkvShape,
    table: RopeTable<'_, Cuda>,
    first_position: usize,
    qkv: CudaViewMut<'_, T>,
    mut routing: Option<&mut CudaRouting>,
    all_reduce: Option<AllReduce<'_, Cuda>>,
) -> Result<()> {
    const OPERATOR: &str = "rope_route_forward";
    let lens = [table.cos.len, table.sin.len];
    check(OPERATOR, shape, lens, first_position, qkv.len)?;
    let mut parameters = Parameters::new(shape, table, first_position);
    parameters.qkv = qkv.address;
    if let Some(routing) = &mut routing {
        routing.start(shape.tokens(), shape.heads)?;
        parameters.tables = routing.tables();
        let all_reduce = exchange(OPERATOR, routing.heads(), all_reduce)?;
        if let Some(all_reduce) = all_reduce.filter(|_| routing.pairs() > 0) {
            cuda.zero(routing.squares())?;
            cuda.launch(&name::<T>("router_squares"), [shape.tokens(), 1], 0, &parameters)?;
            all_reduce(routing.squares())?;
        }
    }
    let (kernel, shared) = (name::<T>("rope_route_forward"), parameters.shared_bytes());
    cuda.launch(&kernel, [shape.tokens(), 1], shared, &parameters)?;
    routing.map_or(Ok(()), |routing| count_selected(cuda, routing))
}

pub(crate) fn backward<T: Element>(
    cuda: &Cuda,
    shape: &QkvShape,
    table: RopeTable<'_, Cuda>,
    first_position: usize,
    qkv: CudaView<'_, T>,
    d_qkv: CudaViewMut<'_, T>,
    gradient: Option<RouterGradient<'_, Cuda>>,
) -> Result<()> {
    const OPERATOR: &str = "rope_route_backward";
    let lens = [table.cos.len, table.sin.len];
    check(OPERATOR, shape, lens, first_position, d_qkv.len)?;
    check_len(OPERATOR, "qkv", qkv.len, d_qkv.len)?;
    let mut parameters = Parameters::new(shape, table, first_position);
    (parameters.qkv, parameters.d_qkv) = (qkv.address, d_qkv.address);
    if let Some(RouterGradient { routing, delta, balance_weight, ranks }) = gradient {
        routing.check(OPERATOR, shape.tokens(), shape.heads)?;
        if let Some(delta) = delta {
            check_len(OPERATOR, "delta", delta.len, shape.tokens() * shape.heads)?;
        }
        parameters.tables = routing.tables();
        parameters.balance_weight = balance_weight;
        parameters.delta = address_or_null(delta);
        let ranks = delta.map_or(Ok(None), |_| exchange(OPERATOR, routing.heads(), ranks))?;
        let ranks = ranks.filter(|_| routing.pairs() > 0);
        if let Some(RouterRanks { mut table, all_reduce }) = ranks {
            check_len(OPERATOR, "table", table.len, routing.pairs())?;
            parameters.deltas = table.address;
            cuda.zero(table.first(table.len))?;
            cuda.launch("router_spread", [shape.tokens(), 1], 0, &parameters)?;
            all_reduce(table)?;
        }
    }
    let (kernel, shared) = (name::<T>("rope_route_backward"), parameters.shared_bytes());
    cuda.launch(&kernel, [shape.tokens(), 1], shared, &parameters)
}
