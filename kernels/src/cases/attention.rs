//! Cases of attention, RoPE, query and key norms, and the router.

use super::{Case, Sizes, Work, random_elements, upload};
use crate::attention::{
    AttentionArgs, AttentionBackward, AttentionForward, AttentionShape, KeyValues,
};
use crate::qk_norm::{QkNormBackward, QkNormForward};
use crate::rope::{RopeArgs, RopeTable};
use crate::router::query_norm::{QueryNormBackward, QueryNormForward, QueryNormRouter, Selects};
use crate::router::{RouterGradient, Routing, SharedHeads};
use crate::{Backend, Element, Heads, QkvShape, Result};

/// Causal attention over random queries, keys and values, of all heads or of the heads that the
/// router selects.
pub struct AttentionCase<B: Backend, T: Element> {
    shape: QkvShape,
    router: Option<(QueryNormRouter, Routing<B>)>,
    qkv: B::Buffer<T>,
    cos: B::Buffer<f32>,
    sin: B::Buffer<f32>,
    out: B::Buffer<T>,
    log_sum_exp: B::Buffer<f32>,
    d_out: B::Buffer<T>,
    d_qkv: B::Buffer<T>,
    delta: B::Buffer<f32>,
}

impl<B: Backend, T: Element> AttentionCase<B, T> {
    /// Allocates the buffers, rotates queries and keys, selects heads if there is a router, and
    /// runs a forward pass.
    ///
    /// # Errors
    /// Fails if the shape's heads do not fit each other, or if the device lacks memory.
    pub fn new(backend: &B, shape: QkvShape, router: Option<QueryNormRouter>) -> Result<Self> {
        let QkvShape { length, heads, head_dim, .. } = shape;
        let (tokens, width) = (shape.tokens(), heads * head_dim);
        // Any rotation is valid, since rotations preserve norms.
        let angles = length * head_dim / 2;
        let routed = |router: QueryNormRouter| {
            let group_size = heads / shape.kv_heads;
            let all = Heads { group_size, ..Heads::all(heads) };
            let shape = router.routing_shape(tokens, all)?;
            Ok((router, Routing::new(backend, shape)?))
        };
        let mut case = AttentionCase {
            shape,
            router: router.map(routed).transpose()?,
            qkv: random_elements::<B, T>(backend, tokens * shape.row())?,
            cos: upload(backend, &vec![0.6f32; angles])?,
            sin: upload(backend, &vec![0.8f32; angles])?,
            out: backend.allocate(tokens * width)?,
            log_sum_exp: backend.allocate(tokens * heads)?,
            d_out: random_elements::<B, T>(backend, tokens * width)?,
            d_qkv: random_elements::<B, T>(backend, tokens * shape.row())?,
            delta: backend.allocate(tokens * heads)?,
        };
        case.route(backend)?;
        case.forward(backend)?;
        Ok(case)
    }

    /// Returns the operations of the forward pass: the matmuls of scores and outputs, for the active heads
    /// and the causal half of the (query, key) pairs.
    pub fn forward_operations(&self) -> u64 {
        let active_heads = match &self.router {
            Some((router, _)) => router.shared.len() + router.top_k,
            None => self.shape.heads,
        };
        forward_operations(self.shape, active_heads)
    }

    /// Returns the operations of the backward pass, which has five matmuls (scores, dP, dq, dk and dv);
    /// the forward pass has two.
    pub fn backward_operations(&self) -> u64 {
        self.forward_operations() * 5 / 2
    }

    /// Rotates queries and keys again, and selects heads if there is a router.
    pub fn route(&mut self, backend: &B) -> Result<()> {
        let table = table::<B>(&self.cos, &self.sin);
        let (shape, qkv) = (&self.shape, B::whole_mut(&mut self.qkv));
        let Some((router, routing)) = &mut self.router else {
            return backend.rope_forward(RopeArgs { shape, table, qkv });
        };
        let (router, rope, all_reduce) = (*router, Some(table), None);
        let args = QueryNormForward { router, shape, qkv, rope, routing, all_reduce };
        backend.query_norm_forward(args)
    }

    /// Runs the forward pass of attention.
    pub fn forward(&mut self, backend: &B) -> Result<()> {
        let QkvShape { heads, kv_heads, head_dim, .. } = self.shape;
        let (first, end) = (heads * head_dim, B::len(&self.qkv));
        let key_values = KeyValues::Contiguous {
            keys: B::view(&self.qkv, first..end),
            values: B::view(&self.qkv, first + kv_heads * head_dim..end),
            row_stride: self.shape.row(),
        };
        backend.attention_forward(AttentionForward {
            args: attention_args(self.shape, self.router.as_ref()),
            queries: B::whole(&self.qkv),
            key_values,
            out: B::whole_mut(&mut self.out),
            log_sum_exp: B::whole_mut(&mut self.log_sum_exp),
        })
    }

    /// Runs the backward pass of attention.
    pub fn backward(&mut self, backend: &B) -> Result<()> {
        backend.attention_backward(AttentionBackward {
            args: attention_args(self.shape, self.router.as_ref()),
            qkv: B::whole(&self.qkv),
            out: B::whole(&self.out),
            log_sum_exp: B::whole(&self.log_sum_exp),
            d_out: B::whole(&self.d_out),
            d_qkv: B::whole_mut(&mut self.d_qkv),
            delta: Some(B::whole_mut(&mut self.delta)),
        })
    }

    /// Computes the gradients of [`Self::route`], from the outputs of attention's backward pass.
    pub fn route_backward(&mut self, backend: &B) -> Result<()> {
        let table = table::<B>(&self.cos, &self.sin);
        let (shape, d_qkv) = (&self.shape, B::whole_mut(&mut self.d_qkv));
        let Some((router, routing)) = &self.router else {
            return backend.rope_backward(RopeArgs { shape, table, qkv: d_qkv });
        };
        let gradient = RouterGradient {
            routing,
            delta: Some(B::whole(&self.delta)),
            balance_weight: 0.01,
            ranks: None,
        };
        let (router, qkv, rope) = (*router, B::whole(&self.qkv), Some(table));
        let backward = QueryNormBackward { router, shape, qkv, d_qkv, rope, gradient };
        backend.query_norm_backward(backward)
    }
}

fn table<'a, B: Backend>(cos: &'a B::Buffer<f32>, sin: &'a B::Buffer<f32>) -> RopeTable<'a, B> {
    RopeTable { cos: B::whole(cos), sin: B::whole(sin), first_position: 0 }
}

fn forward_operations(shape: QkvShape, active_heads: usize) -> u64 {
    (2 * shape.tokens() * shape.length * active_heads * shape.head_dim) as u64
}

fn attention_args<B: Backend>(
    shape: QkvShape,
    router: Option<&(QueryNormRouter, Routing<B>)>,
) -> AttentionArgs<'_, B> {
    let selection = router.map(|(_, routing)| routing.selection());
    let shape = AttentionShape::of_qkv(&shape, shape.length);
    AttentionArgs { selection, ..AttentionArgs::causal(shape) }
}

const TINY: QkvShape = QkvShape { batch: 8, length: 256, heads: 8, kv_heads: 4, head_dim: 8 };
const LARGE: QkvShape = QkvShape { batch: 1, length: 512, heads: 32, kv_heads: 8, head_dim: 128 };

/// Returns a router with a quarter of the heads shared and `active` percent of the heads active.
fn router(shape: QkvShape, active: usize) -> QueryNormRouter {
    let shared = SharedHeads::first(shape.heads / 4);
    let top_k = shape.heads * active / 100 - shared.len();
    QueryNormRouter { shared, top_k, selects: Selects::Heads }
}

/// Returns each router with the name of its operators: a quarter of the heads shared and 75% active.
fn routers(shape: QkvShape) -> [(&'static str, QueryNormRouter); 2] {
    let any = router(shape, 75);
    [
        ("query_norm_rope", any),
        ("group_norm_rope", QueryNormRouter { selects: Selects::Groups, ..any }),
    ]
}

fn qk_norm<B: Backend, T: Element>(shape: QkvShape) -> [Case<B>; 2] {
    let (elements, weights, eps) = (shape.tokens() * shape.row(), 2 * shape.head_dim, 1e-6);
    let forward = case!("qk_norm_forward", Work::moved::<T>(2 * elements), |backend| [
        read qkv = random_elements::<B, T>(backend, elements),
        read weight = random_elements::<B, T>(backend, weights),
        write normed = backend.allocate::<T>(elements),
    ] backend.qk_norm_forward(QkNormForward { shape: &shape, eps, qkv, weight, normed }));
    let backward = case!("qk_norm_backward", Work::moved::<T>(3 * elements), |backend| [
        read qkv = random_elements::<B, T>(backend, elements),
        read weight = random_elements::<B, T>(backend, weights),
        write d_qkv = random_elements::<B, T>(backend, elements),
        write d_weight = backend.allocate::<f32>(weights),
    ] backend.qk_norm_backward(QkNormBackward { shape: &shape, eps, qkv, weight, d_qkv, d_weight }));
    [forward, backward]
}

pub(super) fn cases<B: Backend, T: Element>(sizes: Sizes) -> Vec<Case<B>> {
    let mut cases = Vec::new();
    let own = sizes.attention;
    // A large model has heads like LARGE.
    let shapes = if sizes == Sizes::SMALL { vec![own, TINY, LARGE] } else { vec![own] };
    for shape in shapes {
        for active in [100, 75, 50] {
            let QkvShape { heads, head_dim, .. } = shape;
            let router = router(shape, active);
            let heads_of = format!("{heads}_heads_of_{head_dim}");
            let forward = forward_operations(shape, router.shared.len() + router.top_k);
            let name = |pass: &str| format!("attention_{pass} {heads_of}, {active}% active");
            cases.push(Case::new(name("forward"), Work::Operations(forward), move |b: &B| {
                let mut case = AttentionCase::<B, T>::new(b, shape, Some(router))?;
                Ok(move |backend: &B| case.forward(backend))
            }));
            let backward = Work::Operations(forward * 5 / 2);
            cases.push(Case::new(name("backward"), backward, move |b: &B| {
                let mut case = AttentionCase::<B, T>::new(b, shape, Some(router))?;
                Ok(move |backend: &B| case.backward(backend))
            }));
        }
    }
    let elements = own.tokens() * own.row();
    let routed = move |backend: &B| AttentionCase::<B, T>::new(backend, own, Some(router(own, 75)));
    cases.push(Case::new("rope_forward", Work::moved::<T>(2 * elements), move |b: &B| {
        let mut case = AttentionCase::<B, T>::new(b, own, None)?;
        Ok(move |backend: &B| case.route(backend))
    }));
    cases.extend(qk_norm::<B, T>(own));
    for (name, router) in routers(own) {
        let routed = move |backend: &B| AttentionCase::<B, T>::new(backend, own, Some(router));
        let forward = move |b: &B| {
            let mut case = routed(b)?;
            Ok(move |backend: &B| case.route(backend))
        };
        let backward = move |b: &B| {
            let mut case = routed(b)?;
            case.backward(b)?;
            Ok(move |backend: &B| case.route_backward(backend))
        };
        let (moved, added) = (Work::moved::<T>(2 * elements), Work::moved::<T>(3 * elements));
        cases.push(Case::new(format!("{name}_forward"), moved, forward));
        cases.push(Case::new(format!("{name}_backward"), added, backward));
    }
    let gates = own.tokens() * (own.heads - router(own, 75).shared.leading());
    cases.push(Case::new("balance_loss", Work::moved::<f32>(gates), move |b: &B| {
        let case = routed(b)?;
        let mut out = b.allocate::<f64>(1)?;
        Ok(move |backend: &B| match &case.router {
            Some((_, routing)) => backend.balance_loss(routing, 1.0, B::whole_mut(&mut out)),
            None => Ok(()),
        })
    }));
    cases
}
