//! The steps between the query, key and value projections and attention: routing and RoPE, forward
//! and backward.
//!
//! A router reads the projection's output, before query norms: normed queries have nearly equal
//! norms, which carry no information about a head.

use moh_kernels::ranks::AllReduce;
use moh_kernels::rope::{RopeArgs, RopeTable};
use moh_kernels::router::{
    RouterBackward, RouterForward, RouterGradient, RouterRanks, RouterRopeBackward,
    RouterRopeForward, Routing,
};
use moh_kernels::{Backend, Element};

use super::block::{RouterScale, Tokens};
use crate::Error;
use crate::activations::{Backward, BlockBuffers, Recomputable, Saved};
use crate::model::Model;
use crate::parameters::FlatBuffers;

impl<B: Backend, T: Element> Model<B, T> {
    /// Selects each token's heads by its queries, in a layer with a router, and rotates queries and
    /// keys; norms them first in architectures with query and key norms.
    pub(super) fn route_and_rotate(
        &self,
        layer: usize,
        tokens: &Tokens<'_, B>,
        saved: &mut Saved<B, T>,
        recomputable: &mut Recomputable<B, T>,
    ) -> Result<(), Error> {
        let Some(rotated) = &mut recomputable.rotated else {
            return self.route_and_rotate_in_place(layer, tokens, saved);
        };
        self.route(layer, tokens, saved)?;
        self.norm_and_rotate(layer, tokens, &saved.qkv, rotated)
    }

    /// Replaces the gradients of queries and keys in `scratch`, as attention reads them, by the
    /// gradients of the projection's output, including the router's.
    pub(super) fn route_and_rotate_backward<G: Element>(
        &self,
        tokens: &Tokens<'_, B>,
        block: &mut BlockBuffers<'_, B, T>,
        backward: &mut Backward<B, T>,
        gradients: &mut FlatBuffers<B, G>,
        scale: RouterScale,
    ) -> Result<(), Error> {
        let BlockBuffers { layer, saved, recomputable, scratch, .. } = block;
        let (layer, shape) = (*layer, &tokens.shape);
        let len = shape.tokens() * shape.row();
        let norms = recomputable.rotated.is_some();
        if norms {
            let d_qkv = B::view_mut(scratch, 0..len);
            self.norm_and_rotate_backward(layer, tokens, &saved.qkv, d_qkv, gradients)?;
        }
        let (all_reduce, d_qkv) = (&self.sum_over_ranks(), B::view_mut(scratch, 0..len));
        let rope = RopeArgs { shape, table: self.rope_table(tokens.first_position), qkv: d_qkv };
        let (Some(router), Some(routing)) = (&self.routers[layer], &saved.routing) else {
            return if norms { Ok(()) } else { Ok(self.backend.rope_backward(rope)?) };
        };
        let qkv = B::view(&saved.qkv, 0..len);
        let gradient = self.router_gradient(tokens, routing, backward, scale, all_reduce);
        if norms {
            let args = RouterBackward { shape, qkv, d_qkv: rope.qkv, gradient };
            return Ok(router.backward(&self.backend, args)?);
        }
        let args = RouterRopeBackward { qkv, rope, gradient };
        Ok(router.backward_and_rotate(&self.backend, args)?)
    }

    /// The gradients that reach a layer's router.
    fn router_gradient<'v>(
        &self,
        tokens: &Tokens<'_, B>,
        routing: &'v Routing<B>,
        backward: &'v mut Backward<B, T>,
        scale: RouterScale,
        all_reduce: AllReduce<'v, B>,
    ) -> RouterGradient<'v, B> {
        let table = 0..tokens.shape.tokens() * routing.routed();
        RouterGradient {
            routing,
            delta: scale.straight_through.then(|| B::whole(&backward.delta)),
            balance_weight: scale.balance_weight,
            ranks: self.is_tensor_parallel().then(|| RouterRanks {
                table: B::view_mut(&mut backward.deltas, table),
                all_reduce,
            }),
        }
    }

    /// Selects each token's heads, in a layer with a router.
    fn route(
        &self,
        layer: usize,
        tokens: &Tokens<'_, B>,
        saved: &mut Saved<B, T>,
    ) -> Result<(), Error> {
        let (shape, sum) = (&tokens.shape, self.sum_over_ranks());
        if let (Some(router), Some(routing)) = (&self.routers[layer], &mut saved.routing) {
            let qkv = B::view(&saved.qkv, 0..shape.tokens() * shape.row());
            let all_reduce = self.is_tensor_parallel().then_some(&sum as AllReduce<'_, B>);
            router.forward(&self.backend, RouterForward { shape, qkv, routing, all_reduce })?;
        }
        Ok(())
    }

    /// Selects each token's heads, in a layer with a router, and rotates queries and keys.
    fn route_and_rotate_in_place(
        &self,
        layer: usize,
        tokens: &Tokens<'_, B>,
        saved: &mut Saved<B, T>,
    ) -> Result<(), Error> {
        let len = tokens.shape.tokens() * tokens.shape.row();
        let sum = self.sum_over_ranks();
        let rope = RopeArgs {
            shape: &tokens.shape,
            table: self.rope_table(tokens.first_position),
            qkv: B::view_mut(&mut saved.qkv, 0..len),
        };
        match (&self.routers[layer], &mut saved.routing) {
            (Some(router), Some(routing)) => {
                let all_reduce = self.is_tensor_parallel().then_some(&sum as AllReduce<'_, B>);
                let args = RouterRopeForward { rope, routing, all_reduce };
                router.forward_and_rotate(&self.backend, args)?;
            }
            _ => self.backend.rope_forward(rope)?,
        }
        Ok(())
    }

    /// Cosines and sines of tokens, from a position on.
    pub(crate) fn rope_table(&self, first_position: usize) -> RopeTable<'_, B> {
        let (cos, sin) = (B::whole(&self.rope_cos), B::whole(&self.rope_sin));
        RopeTable { cos, sin, first_position }
    }
}
