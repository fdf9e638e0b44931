//! The routers by norms of queries on a GPU (query_norm.cu). With a rotation, the pass over the
//! queries also applies RoPE.

use bytemuck::Zeroable;

use super::{
    QueryNorm, QueryNormBackward, QueryNormForward, QueryNormRopeBackward, QueryNormRopeForward,
    QueryNormRouter, Selects, begin, check_backward,
};
use crate::cuda::parameters::query_norm::Parameters;
use crate::cuda::parameters::{rope, router};
use crate::cuda::{Cuda, CudaView, address_or_null, name};
use crate::error::{Result, check_len};
use crate::memory::Memory;
use crate::ranks::AllReduce;
use crate::rope::QkvShape;
use crate::router::{RouterGradient, RouterRanks, Routers, Routing, exchange};
use crate::scalar::Element;

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

    /// Shared memory of a block: an f64 per token and column.
    fn shared_bytes(routing: &Routing<Cuda>) -> usize {
        TOKENS * routing.columns() * size_of::<f64>()
    }
}

/// The first words of the names of a router's kernels.
fn kernels(router: QueryNormRouter) -> &'static str {
    match router.selects {
        Selects::Heads => "query_norm",
        Selects::Groups => "group_norm",
        Selects::WithinGroups => "within_groups",
    }
}

/// A forward pass, with a rotation if `rope` has an address.
struct Forward<'a> {
    router: QueryNormRouter,
    shape: &'a QkvShape,
    qkv: u64,
    qkv_len: usize,
    rope: rope::Parameters,
}

impl Forward<'_> {
    fn run<T: Element>(
        &self,
        cuda: &Cuda,
        routing: &mut Routing<Cuda>,
        all_reduce: Option<AllReduce<'_, Cuda>>,
    ) -> Result<()> {
        const OPERATOR: &str = "query_norm_forward";
        let &Forward { router, shape, .. } = self;
        let (tokens, heads) = (shape.tokens(), routing.heads());
        let blocks = [tokens.div_ceil(TOKENS), 1];
        let columns = begin(OPERATOR, router, shape, self.qkv_len, routing)?;
        let all_reduce = exchange(OPERATOR, heads, all_reduce)?;
        let mut parameters = Parameters::new(shape, routing);
        (parameters.qkv, parameters.rope) = (self.qkv, self.rope);
        parameters.top_k = (router.top_k / router.pools(heads)) as u32;
        if let Some(all_reduce) = all_reduce.filter(|_| columns > 0) {
            let squares = 0..tokens * columns;
            cuda.zero(routing.saved.view_mut(squares.clone()))?;
            cuda.launch(&name::<T>("query_norm_squares"), blocks, 0, &parameters)?;
            all_reduce(routing.saved.view_mut(squares))?;
        }
        let kernel = name::<T>(&format!("{}_forward", kernels(router)));
        cuda.launch(&kernel, blocks, Parameters::shared_bytes(routing), &parameters)?;
        cuda.complete_routing(routing)
    }
}

impl QueryNorm for Cuda {
    fn query_norm_forward<T: Element>(
        &self,
        router: QueryNormRouter,
        args: QueryNormForward<'_, Self, T>,
    ) -> Result<()> {
        let QueryNormForward { shape, qkv, routing, all_reduce } = args;
        let none = rope::Parameters::zeroed();
        let (qkv, qkv_len) = (qkv.address, qkv.len);
        let forward = Forward { router, shape, qkv, qkv_len, rope: none };
        forward.run::<T>(self, routing, all_reduce)
    }

    fn query_norm_rope_forward<T: Element>(
        &self,
        router: QueryNormRouter,
        args: QueryNormRopeForward<'_, Self, T>,
    ) -> Result<()> {
        let QueryNormRopeForward { rope, routing, all_reduce } = args;
        let (shape, qkv_len) = (rope.shape, rope.qkv.len);
        let rope = rope::Parameters::new("query_norm_rope_forward", &rope)?;
        let forward = Forward { router, shape, qkv: rope.qkv, qkv_len, rope };
        forward.run::<T>(self, routing, all_reduce)
    }

    fn query_norm_backward<T: Element>(
        &self,
        router: QueryNormRouter,
        args: QueryNormBackward<'_, Self, T>,
    ) -> Result<()> {
        let QueryNormBackward { shape, qkv, d_qkv, gradient } = args;
        let none = rope::Parameters::zeroed();
        let d_qkv = (d_qkv.address, d_qkv.len);
        let backward = Backward { router, shape, qkv, d_qkv, rope: none };
        backward.run(self, gradient)
    }

    fn query_norm_rope_backward<T: Element>(
        &self,
        router: QueryNormRouter,
        args: QueryNormRopeBackward<'_, Self, T>,
    ) -> Result<()> {
        let QueryNormRopeBackward { qkv, gradient, rope } = args;
        let (shape, d_qkv_len) = (rope.shape, rope.qkv.len);
        let rope = rope::Parameters::new("query_norm_rope_backward", &rope)?;
        let backward = Backward { router, shape, qkv, d_qkv: (rope.qkv, d_qkv_len), rope };
        backward.run(self, gradient)
    }
}

/// A backward pass, with a rotation if `rope` has an address.
struct Backward<'a, T> {
    router: QueryNormRouter,
    shape: &'a QkvShape,
    qkv: CudaView<'a, T>,
    /// Address and length.
    d_qkv: (u64, usize),
    rope: rope::Parameters,
}

impl<T: Element> Backward<'_, T> {
    fn run(&self, cuda: &Cuda, gradient: RouterGradient<'_, Cuda>) -> Result<()> {
        const OPERATOR: &str = "query_norm_backward";
        let Backward { router, shape, qkv, d_qkv: (d_qkv, d_qkv_len), rope } = *self;
        check_backward(OPERATOR, router, shape, [qkv.len, d_qkv_len], &gradient)?;
        let RouterGradient { routing, delta, balance_weight, ranks } = gradient;
        let tokens = shape.tokens();
        let mut parameters = Parameters::new(shape, routing);
        (parameters.qkv, parameters.d_qkv, parameters.rope) = (qkv.address, d_qkv, rope);
        parameters.balance_weight = balance_weight;
        parameters.delta = address_or_null(delta);
        let ranks = delta.map_or(Ok(None), |_| exchange(OPERATOR, routing.heads(), ranks))?;
        if let Some(RouterRanks { mut table, all_reduce }) = ranks.filter(|_| routing.columns() > 0)
        {
            check_len(OPERATOR, "table", table.len, tokens * routing.columns())?;
            parameters.deltas = table.address;
            cuda.zero(table.part(0..table.len))?;
            cuda.launch("query_norm_spread", [tokens, 1], 0, &parameters)?;
            all_reduce(table)?;
        }
        let kernel = name::<T>(&format!("{}_backward", kernels(router)));
        let blocks = [tokens.div_ceil(TOKENS), 1];
        cuda.launch(&kernel, blocks, Parameters::shared_bytes(routing), &parameters)
    }
}
