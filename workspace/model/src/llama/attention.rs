//! The attention half of a block, `residual = x + O attention(norm(x))`, forward and backward.
//!
//! A Mixture-of-Head block differs from a dense one in two ways: a router reads the queries
//! (`routing.rs`), and attention skips the (token, head) pairs that were not selected.

use moh_kernels::attention::{
    AttentionArgs, AttentionBackward, AttentionForward, AttentionShape, KeyValues,
};
use moh_kernels::key_value_cache::KeyValueAppend;
use moh_kernels::linear::LinearForward;
use moh_kernels::router::Routing;
use moh_kernels::{Backend, Element, span};

use super::block::{LayerCache, RouterScale, Tokens};
use super::linear::Linear;
use crate::Error;
use crate::activations::{Backward, BlockBuffers};
use crate::model::Model;
use crate::parameters::FlatBuffers;
use crate::sequence::Projection;

impl<B: Backend> Tokens<'_, B> {
    /// Causal attention of the heads that `routing` selected, or of all heads without a routing.
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
    /// `residual = x + O attention(norm(x))`: fills `saved` up to `residual`.
    pub(super) fn attention_forward(
        &self,
        tokens: &Tokens<'_, B>,
        input: &B::Buffer<T>,
        block: &mut BlockBuffers<'_, B, T>,
        mut cache: Option<&mut LayerCache<B, T>>,
    ) -> Result<(), Error> {
        let _span = span::enter("attention");
        let BlockBuffers { layer, saved, recomputable, gathered, .. } = block;
        let layer = *layer;
        let (backend, config, ranges) = (&self.backend, &self.config, &self.layout.block);
        let flat = self.layout.block_index(layer);
        let (n, row) = (tokens.shape.tokens(), tokens.shape.row());
        let queries = tokens.shape.heads * tokens.shape.head_dim;
        self.normalize_input(layer, n, input, recomputable)?;
        backend.linear_forward(LinearForward {
            inputs: config.hidden_size,
            x: self.gather(n, &recomputable.input_normed, gathered)?,
            weight: self.weights.view(flat, ranges.qkv.clone()),
            residual: None,
            y: B::view_mut(&mut saved.qkv, 0..n * row),
        })?;
        self.route_and_rotate(layer, tokens, saved, recomputable)?;
        let qkv = recomputable.rotated(&saved.qkv);
        if let Some(cache) = &mut cache {
            self.append(tokens, qkv, cache)?;
        }
        let (key_length, key_values) = self.key_values(tokens, qkv, cache.as_deref());
        let routing = saved.routing.as_ref().filter(|_| self.routers[layer].is_some());
        backend.attention_forward(AttentionForward {
            args: tokens.attention(AttentionShape::of_qkv(&tokens.shape, key_length), routing),
            queries: B::view(qkv, 0..n * row),
            key_values,
            out: B::view_mut(&mut saved.attended, 0..n * queries),
            log_sum_exp: B::view_mut(&mut saved.log_sum_exp, 0..n * tokens.shape.heads),
        })?;
        let projection = Projection {
            tokens: n,
            inputs: queries,
            x: B::view(&saved.attended, 0..n * queries),
            weight: self.weights.view(flat, ranges.output.clone()),
        };
        self.project_to_stream(projection, input, &mut saved.residual, gathered)
    }

    /// The backward pass of [`Model::attention_forward`]: replaces the gradient of `residual` in
    /// `backward.d_stream` by the gradient of the block's input, and adds the weights' to
    /// `gradients`.
    pub(super) fn attention_backward<G: Element>(
        &self,
        tokens: &Tokens<'_, B>,
        input: &B::Buffer<T>,
        block: &mut BlockBuffers<'_, B, T>,
        backward: &mut Backward<B, T>,
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
        let attended = B::view(&block.saved.attended, 0..n * queries);
        let d_output = self.gather(n, &backward.d_stream, block.gathered)?;
        self.linear_backward_weight(output, attended, d_output, gradients)?;
        self.linear_backward_input(output, d_output, &mut backward.d_branch)?;
        self.scores_backward(tokens, block, backward, gradients, router)?;
        let qkv = linear(&ranges.qkv, width);
        let d_qkv = B::view(block.scratch, 0..n * tokens.shape.row());
        let normed = self.gather(n, &block.recomputable.input_normed, block.gathered)?;
        self.linear_backward_weight(qkv, normed, d_qkv, gradients)?;
        self.linear_backward_input(qkv, d_qkv, &mut backward.d_branch)?;
        let inv_rms = &block.recomputable.input_inv_rms;
        self.norm_backward((flat, &ranges.input_norm, n), input, inv_rms, backward, gradients)
    }

    /// From the gradient of attention's output in `d_branch`, computes the gradient of the
    /// projected queries, keys and values in `scratch`, including the router's.
    fn scores_backward<G: Element>(
        &self,
        tokens: &Tokens<'_, B>,
        block: &mut BlockBuffers<'_, B, T>,
        backward: &mut Backward<B, T>,
        gradients: &mut FlatBuffers<B, G>,
        router: RouterScale,
    ) -> Result<(), Error> {
        let BlockBuffers { layer, saved, recomputable, scratch, .. } = block;
        let (n, shape) = (tokens.shape.tokens(), &tokens.shape);
        let routing = saved.routing.as_ref().filter(|_| self.routers[*layer].is_some());
        self.backend.attention_backward(AttentionBackward {
            args: tokens.attention(AttentionShape::of_qkv(shape, shape.length), routing),
            qkv: B::whole(recomputable.rotated(&saved.qkv)),
            out: B::whole(&saved.attended),
            log_sum_exp: B::whole(&saved.log_sum_exp),
            d_out: B::view(&backward.d_branch, 0..n * shape.heads * shape.head_dim),
            d_qkv: B::view_mut(scratch, 0..n * shape.row()),
            delta: routing.is_some().then(|| B::whole_mut(&mut backward.delta)),
        })?;
        self.route_and_rotate_backward(tokens, block, backward, gradients, router)
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

    /// The number of keys and their location: the cache, or the packed projection.
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
