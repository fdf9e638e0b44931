//! The query-norm router on a GPU (query_norm.cu). With a rotation, the pass over the queries also
//! applies RoPE.

use bytemuck::{Pod, Zeroable};

use super::{
    BackwardLens, QueryNorm, QueryNormBackward, QueryNormForward, QueryNormRopeBackward,
    QueryNormRopeForward, QueryNormRouter, begin, check_backward,
};
use crate::cuda::{Cuda, CudaView, address_or_null, mirrored, name};
use crate::error::{Result, check_len};
use crate::memory::Memory;
use crate::ranks::AllReduce;
use crate::rope::{self, QkvShape};
use crate::router::cuda::Tables;
use crate::router::{RouterGradient, RouterRanks, Routers, Routing, WORDS, exchange};
use crate::scalar::Element;

/// Tokens of a block, as in query_norm.cu.
const TOKENS: usize = 2;

/// `Parameters` of query_norm.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Parameters {
    qkv: u64,
    d_qkv: u64,
    delta: u64,
    deltas: u64,
    norms: u64,
    inv_std: u64,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    top_k: u32,
    balance_weight: f32,
    padding: u32,
    tables: Tables,
    shared: [u64; WORDS],
    rope: rope::cuda::Parameters,
}

mirrored!(
    Parameters, 232,
    qkv 0, d_qkv 8, delta 16, deltas 24, norms 32, inv_std 40, heads 48, kv_heads 52, head_dim 56,
    top_k 60, balance_weight 64, padding 68, tables 72, shared 144, rope 176,
);

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
            tables: Tables::new(routing),
            shared: routing.shared().column_bits(),
            ..Self::zeroed()
        }
    }

    /// Shared memory of a block: an f64 per token and column.
    fn shared_bytes(routing: &Routing<Cuda>) -> usize {
        TOKENS * routing.columns() * size_of::<f64>()
    }
}

/// A forward pass, with a rotation if `rope` has an address.
struct Forward<'a> {
    router: QueryNormRouter,
    shape: &'a QkvShape,
    qkv: u64,
    qkv_len: usize,
    rope: rope::cuda::Parameters,
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
        parameters.top_k = router.top_k as u32;
        if let Some(all_reduce) = all_reduce.filter(|_| columns > 0) {
            let squares = 0..tokens * columns;
            cuda.zero(routing.saved.view_mut(squares.clone()))?;
            cuda.launch(&name::<T>("query_norm_squares"), blocks, 0, &parameters)?;
            all_reduce(routing.saved.view_mut(squares))?;
        }
        let shared = Parameters::shared_bytes(routing);
        cuda.launch(&name::<T>("query_norm_forward"), blocks, shared, &parameters)?;
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
        let none = rope::cuda::Parameters::zeroed();
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
        let rope = rope::cuda::Parameters::new("query_norm_rope_forward", &rope)?;
        let forward = Forward { router, shape, qkv: rope.address(), qkv_len, rope };
        forward.run::<T>(self, routing, all_reduce)
    }

    fn query_norm_backward<T: Element>(&self, args: QueryNormBackward<'_, Self, T>) -> Result<()> {
        let QueryNormBackward { shape, qkv, d_qkv, gradient } = args;
        let none = rope::cuda::Parameters::zeroed();
        let backward = Backward { shape, qkv, d_qkv: (d_qkv.address, d_qkv.len), rope: none };
        backward.run(self, gradient)
    }

    fn query_norm_rope_backward<T: Element>(
        &self,
        args: QueryNormRopeBackward<'_, Self, T>,
    ) -> Result<()> {
        let QueryNormRopeBackward { qkv, gradient, rope } = args;
        let (shape, d_qkv_len) = (rope.shape, rope.qkv.len);
        let rope = rope::cuda::Parameters::new("query_norm_rope_backward", &rope)?;
        let backward = Backward { shape, qkv, d_qkv: (rope.address(), d_qkv_len), rope };
        backward.run(self, gradient)
    }
}

/// A backward pass, with a rotation if `rope` has an address.
struct Backward<'a, T> {
    shape: &'a QkvShape,
    qkv: CudaView<'a, T>,
    /// Address and length.
    d_qkv: (u64, usize),
    rope: rope::cuda::Parameters,
}

impl<T: Element> Backward<'_, T> {
    fn run(&self, cuda: &Cuda, gradient: RouterGradient<'_, Cuda>) -> Result<()> {
        const OPERATOR: &str = "query_norm_backward";
        let Backward { shape, qkv, d_qkv: (d_qkv, d_qkv_len), rope } = *self;
        let RouterGradient { routing, delta, balance_weight, ranks } = gradient;
        let tokens = shape.tokens();
        let delta_len = delta.map(|delta| delta.len);
        let lens = BackwardLens { qkv: qkv.len, d_qkv: d_qkv_len, delta: delta_len };
        check_backward(OPERATOR, shape, &lens, routing)?;
        let mut parameters = Parameters::new(shape, routing);
        (parameters.qkv, parameters.d_qkv, parameters.rope) = (qkv.address, d_qkv, rope);
        parameters.balance_weight = balance_weight;
        parameters.delta = address_or_null(delta);
        let ranks = delta.map_or(Ok(None), |_| exchange(OPERATOR, routing.heads(), ranks))?;
        if let Some(RouterRanks { mut table, all_reduce }) = ranks.filter(|_| routing.columns() > 0)
        {
            check_len(OPERATOR, "table", table.len, tokens * routing.columns())?;
            parameters.deltas = table.address;
            cuda.zero(table.first(table.len))?;
            cuda.launch("query_norm_spread", [tokens, 1], 0, &parameters)?;
            all_reduce(table)?;
        }
        let shared = Parameters::shared_bytes(routing);
        let blocks = [tokens.div_ceil(TOKENS), 1];
        cuda.launch(&name::<T>("query_norm_backward"), blocks, shared, &parameters)
    }
}
