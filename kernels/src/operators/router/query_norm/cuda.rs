//! The routers by norms of queries on a GPU (query_norm.cu). With a rotation (if its parameters have an
//! address), the pass over the queries also applies RoPE.

use bytemuck::Zeroable;

use super::{
    QueryNorm, QueryNormBackward, QueryNormForward, QueryNormRouter, Selects, begin, check_backward,
};
use crate::cuda::parameters::query_norm::Parameters;
use crate::cuda::parameters::{rope, router};
use crate::cuda::{Cuda, address_or_null, name};
use crate::rope::RopeArgs;
use crate::router::{RouterGradient, RouterRanks, Routers, Routing, exchange};
use crate::{Element, Memory, QkvShape, Result, check_len};

/// Tokens of a block, as in query_norm.cu.
const TOKENS: usize = 2;

impl Parameters {
    fn new(shape: &QkvShape, routing: &Routing<Cuda>) -> Self {
        let pairs = routing.tokens() * routing.columns();
        let norms = routing.saved.address();
        Parameters {
            norms,
            inv_std: norms + (pairs * size_of::<f64>()) as u64,
            heads: shape.heads as u32,
            kv_heads: shape.kv_heads as u32,
            head_dim: shape.head_dim as u32,
            routing: router::Routing::new(routing),
            shared: routing.shared().column_bits(),
            ..Self::zeroed()
        }
    }

    /// Returns the bytes of shared memory of a block: an f64 per token and column.
    fn shared_bytes(routing: &Routing<Cuda>) -> usize {
        TOKENS * routing.columns() * size_of::<f64>()
    }
}

/// Returns the prefix of the names of a router's kernels.
fn kernels(router: QueryNormRouter) -> &'static str {
    match router.selects {
        Selects::Heads => "query_norm",
        Selects::Groups => "group_norm",
    }
}

impl QueryNorm for Cuda {
    fn query_norm_forward<T: Element>(&self, args: QueryNormForward<'_, Self, T>) -> Result<()> {
        const OPERATOR: &str = "query_norm_forward";
        let QueryNormForward { router, shape, qkv, rope, routing, all_reduce } = args;
        let (tokens, heads) = (shape.tokens(), routing.heads());
        let blocks = [tokens.div_ceil(TOKENS), 1];
        let columns = begin(OPERATOR, router, shape, qkv.len, routing)?;
        let all_reduce = exchange(OPERATOR, heads, all_reduce)?;
        let mut parameters = Parameters::new(shape, routing);
        parameters.qkv = qkv.address;
        parameters.top_k = router.top_k as u32;
        if let Some(table) = rope {
            parameters.rope = rope::Parameters::new(OPERATOR, &RopeArgs { shape, table, qkv })?;
        }
        if let Some(all_reduce) = all_reduce.filter(|_| columns > 0) {
            let squares = 0..tokens * columns;
            self.zero(routing.saved.view_mut(squares.clone()))?;
            self.launch(&name::<T>("query_norm_squares"), blocks, 0, &parameters)?;
            all_reduce(routing.saved.view_mut(squares))?;
        }
        let kernel = name::<T>(&format!("{}_forward", kernels(router)));
        self.launch(&kernel, blocks, Parameters::shared_bytes(routing), &parameters)?;
        self.complete_routing(routing)
    }

    fn query_norm_backward<T: Element>(&self, args: QueryNormBackward<'_, Self, T>) -> Result<()> {
        const OPERATOR: &str = "query_norm_backward";
        let QueryNormBackward { router, shape, qkv, d_qkv, rope, gradient } = args;
        check_backward(OPERATOR, router, shape, [qkv.len, d_qkv.len], &gradient)?;
        let RouterGradient { routing, delta, balance_weight, ranks } = gradient;
        let tokens = shape.tokens();
        let mut parameters = Parameters::new(shape, routing);
        (parameters.qkv, parameters.d_qkv) = (qkv.address, d_qkv.address);
        parameters.balance_weight = balance_weight;
        parameters.delta = address_or_null(delta);
        if let Some(table) = rope {
            let args = RopeArgs { shape, table, qkv: d_qkv };
            parameters.rope = rope::Parameters::new(OPERATOR, &args)?;
        }
        let ranks = delta.map_or(Ok(None), |_| exchange(OPERATOR, routing.heads(), ranks))?;
        if let Some(RouterRanks { mut table, all_reduce }) = ranks.filter(|_| routing.columns() > 0)
        {
            check_len(OPERATOR, "table", table.len, tokens * routing.columns())?;
            parameters.deltas = table.address;
            self.zero(table.part(0..table.len))?;
            self.launch("query_norm_spread", [tokens, 1], 0, &parameters)?;
            all_reduce(table)?;
        }
        let kernel = name::<T>(&format!("{}_backward", kernels(router)));
        let blocks = [tokens.div_ceil(TOKENS), 1];
        self.launch(&kernel, blocks, Parameters::shared_bytes(routing), &parameters)
    }
}
