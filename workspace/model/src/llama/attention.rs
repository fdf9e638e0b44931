//! Attention's half of a block, `middle = x + O attention(norm(x))`, forward and backward.
//!
//! A Mixture-of-Head block differs from a Llama's only in that a router reads the queries, and that
//! attention skips the (token, head) pairs which were not selected.

use moh_kernels::attention::{
    AttentionArgs, AttentionBackward, AttentionForward, AttentionShape, KeyValues,
};
use moh_kernels::key_value_cache::KeyValueAppend;
use moh_kernels::linear::LinearForward;
use moh_kernels::ranks::AllReduce;
use moh_kernels::rope::{RopeArgs, RopeTable};
use moh_kernels::router::{
    RouterGradient, RouterRanks, RouterRopeBackward, RouterRopeForward, Routing,
};
use moh_kernels::{Backend, Element, span};

use super::block::{LayerCache, RouterScale, Tokens};
use super::linear::Linear;
use crate::Error;
use crate::activations::{Backward, BlockBuffers, Kept};
use crate::model::Model;
use crate::parameters::FlatBuffers;
use crate::sequence::Projection;

impl<B: Backend> Tokens<'_, B> {
    /// Causal attention of the heads that `routing` selected, all of them without one.
    fn attention<'v>(
        &'v self,
        shape: AttentionShape,
        routing: Option<&'v Routing<B>>,
    ) -> AttentionArgs<'v, B> {
        AttentionArgs {
            query_offset: self.first_position,
            document_start: self.document_start.map(|starts| B::whole(starts)),
            selection: routing.map(Routing::selection),
            ..AttentionArgs::causal(shape)
        }
    }
}

impl<B: Backend, T: Element> Model<B, T> {
    /// `middle = x + O attention(norm(x))`: fills `kept` up to `middle`.
    pub(super) fn attention_forward(
        &self,
        tokens: &Tokens<'_, B>,
        input: &B::Buffer<T>,
        block: &mut BlockBuffers<'_, B, T>,
        mut cache: Option<&mut LayerCache<B, T>>,
    ) -> Result<(), Error> {
        let _span = span::enter("attention");
        let BlockBuffers { layer, kept, cheap, gathered, .. } = block;
        let layer = *layer;
        let (backend, config, ranges) = (&self.backend, &self.config, &self.layout.block);
        let flat = self.layout.block_index(layer);
        let (n, row) = (tokens.shape.tokens(), tokens.shape.row());
        let queries = tokens.shape.heads * tokens.shape.head_dim;
        self.normalize_input(layer, n, input, cheap)?;
        backend.linear_forward(LinearForward {
            inputs: config.hidden_size,
            x: self.gather(n, &cheap.input_normed, gathered)?,
            weight: self.weights.view(flat, ranges.qkv.clone()),
            residual: None,
            y: B::view_mut(&mut kept.qkv, 0..n * row),
        })?;
        self.route_and_rotate(layer, tokens, kept)?;
        if let Some(cache) = &mut cache {
            self.append(tokens, &kept.qkv, cache)?;
        }
        let (key_length, key_values) = self.key_values(tokens, &kept.qkv, cache.as_deref());
        let routing = kept.routing.as_ref().filter(|_| self.routers[layer].is_some());
        backend.attention_forward(AttentionForward {
            args: tokens.attention(AttentionShape::of_qkv(&tokens.shape, key_length), routing),
            queries: B::view(&kept.qkv, 0..n * row),
            key_values,
            out: B::view_mut(&mut kept.attended, 0..n * queries),
            log_sum_exp: B::view_mut(&mut kept.log_sum_exp, 0..n * tokens.shape.heads),
        })?;
        let projection = Projection {
            tokens: n,
            inputs: queries,
            x: B::view(&kept.attended, 0..n * queries),
            weight: self.weights.view(flat, ranges.output.clone()),
        };
        self.project_to_stream(projection, input, &mut kept.middle, gathered)
    }

    /// The gradient of [`Model::attention_forward`]: turns `scratch.d_stream` from the gradient of `middle`
    /// into that of the block's input, and adds those of the weights to `gradients`.
    pub(super) fn attention_backward<G: Element>(
        &self,
        tokens: &Tokens<'_, B>,
        input: &B::Buffer<T>,
        block: &mut BlockBuffers<'_, B, T>,
        scratch: &mut Backward<B, T>,
        gradients: &mut FlatBuffers<B, G>,
        router: RouterScale,
    ) -> Result<(), Error> {
        let _span = span::enter("attention");
        let n = tokens.shape.tokens();
        let flat = self.layout.block_index(block.layer);
        let (width, ranges) = (self.config.hidden_size, &self.layout.block);
        let linear = |range, inputs| Linear { flat, range, tokens: n, inputs };
        let queries = tokens.shape.heads * tokens.shape.head_dim;
        let output = linear(&ranges.output, queries);
        let attended = B::view(&block.kept.attended, 0..n * queries);
        let d_output = self.gather(n, &scratch.d_stream, block.gathered)?;
        self.linear_backward_weight(output, attended, d_output, gradients)?;
        self.linear_backward_input(output, d_output, &mut scratch.d_branch)?;
        self.scores_backward(tokens, block, scratch, router)?;
        let qkv = linear(&ranges.qkv, width);
        let d_qkv = B::view(block.wide, 0..n * tokens.shape.row());
        let normed = self.gather(n, &block.cheap.input_normed, block.gathered)?;
        self.linear_backward_weight(qkv, normed, d_qkv, gradients)?;
        self.linear_backward_input(qkv, d_qkv, &mut scratch.d_branch)?;
        let inv_rms = &block.cheap.input_inv_rms;
        self.norm_backward((flat, &ranges.input_norm, n), input, inv_rms, scratch, gradients)
    }

    /// From the gradient of attention's output in `d_branch` to that of the unrotated queries, keys
    /// and values in `wide`, the router's part included.
    fn scores_backward(
        &self,
        tokens: &Tokens<'_, B>,
        block: &mut BlockBuffers<'_, B, T>,
        scratch: &mut Backward<B, T>,
        router: RouterScale,
    ) -> Result<(), Error> {
        let BlockBuffers { layer, kept, wide, .. } = block;
        let (n, shape) = (tokens.shape.tokens(), &tokens.shape);
        let routing = kept.routing.as_ref().filter(|_| self.routers[*layer].is_some());
        self.backend.attention_backward(AttentionBackward {
            args: tokens.attention(AttentionShape::of_qkv(shape, shape.length), routing),
            qkv: B::whole(&kept.qkv),
            out: B::whole(&kept.attended),
            log_sum_exp: B::whole(&kept.log_sum_exp),
            d_out: B::view(&scratch.d_branch, 0..n * shape.heads * shape.head_dim),
            d_qkv: B::view_mut(wide, 0..n * shape.row()),
            delta: routing.is_some().then(|| B::whole_mut(&mut scratch.delta)),
        })?;
        let all_reduce = &self.sum_over_ranks();
        let rope = RopeArgs {
            shape,
            table: self.rope_table(tokens.first_position),
            qkv: B::view_mut(wide, 0..n * shape.row()),
        };
        let (Some(of_layer), Some(routing)) = (&self.routers[*layer], routing) else {
            return Ok(self.backend.rope_backward(rope)?);
        };
        let table = 0..n * routing.routed();
        let gradient = RouterGradient {
            routing,
            delta: router.straight_through.then(|| B::whole(&scratch.delta)),
            balance_weight: router.balance_weight,
            ranks: self.is_shared().then(|| RouterRanks {
                table: B::view_mut(&mut scratch.deltas, table),
                all_reduce,
            }),
        };
        let args = RouterRopeBackward { qkv: B::whole(&kept.qkv), rope, gradient };
        Ok(of_layer.backward_and_rotate(&self.backend, args)?)
    }

    /// Chooses each token's heads by its queries, in a layer with a router, and rotates queries and keys.
    fn route_and_rotate(
        &self,
        layer: usize,
        tokens: &Tokens<'_, B>,
        kept: &mut Kept<B, T>,
    ) -> Result<(), Error> {
        let len = tokens.shape.tokens() * tokens.shape.row();
        let sum = self.sum_over_ranks();
        let rope = RopeArgs {
            shape: &tokens.shape,
            table: self.rope_table(tokens.first_position),
            qkv: B::view_mut(&mut kept.qkv, 0..len),
        };
        match (&self.routers[layer], &mut kept.routing) {
            (Some(router), Some(routing)) => {
                let all_reduce = self.is_shared().then_some(&sum as AllReduce<'_, B>);
                let args = RouterRopeForward { rope, routing, all_reduce };
                router.forward_and_rotate(&self.backend, args)?;
            }
            _ => self.backend.rope_forward(rope)?,
        }
        Ok(())
    }

    fn rope_table(&self, first_position: usize) -> RopeTable<'_, B> {
        let (cos, sin) = (B::whole(&self.rope_cos), B::whole(&self.rope_sin));
        RopeTable { cos, sin, first_position }
    }

    /// Appends the tokens' keys and values to the cache.
    fn append(
        &self,
        tokens: &Tokens<'_, B>,
        qkv: &B::Buffer<T>,
        cache: &mut LayerCache<B, T>,
    ) -> Result<(), Error> {
        let end = tokens.first_position + tokens.shape.length;
        let len = end * tokens.shape.kv_heads * tokens.shape.head_dim;
        self.backend.key_value_append(KeyValueAppend {
            shape: &tokens.shape,
            first_position: tokens.first_position,
            qkv: B::view(qkv, 0..tokens.shape.tokens() * tokens.shape.row()),
            keys: B::view_mut(&mut cache.keys, 0..len),
            values: B::view_mut(&mut cache.values, 0..len),
        })?;
        Ok(())
    }

    /// How many keys there are and where they lie: in the cache, or beside the queries.
    fn key_values<'k>(
        &self,
        tokens: &Tokens<'_, B>,
        qkv: &'k B::Buffer<T>,
        cache: Option<&'k LayerCache<B, T>>,
    ) -> (usize, KeyValues<'k, B, T>) {
        let width = tokens.shape.kv_heads * tokens.shape.head_dim;
        let (row, end) = (tokens.shape.row(), tokens.shape.tokens() * tokens.shape.row());
        let keys = tokens.shape.heads * tokens.shape.head_dim;
        match cache {
            None => (
                tokens.shape.length,
                KeyValues::Contiguous {
                    keys: B::view(qkv, keys..end),
                    values: B::view(qkv, keys + width..end),
                    row_stride: row,
                },
            ),
            Some(cache) => {
                let length = tokens.first_position + tokens.shape.length;
                let cached = KeyValues::Contiguous {
                    keys: B::view(&cache.keys, 0..length * width),
                    values: B::view(&cache.values, 0..length * width),
                    row_stride: width,
                };
                (length, cached)
            }
        }
    }
}
