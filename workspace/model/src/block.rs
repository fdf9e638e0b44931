//! One block of the model: `middle = x + O attention(norm(x))`, `y = middle + down(SwiGLU(
//! gate_up(norm(middle))))`, and its backward pass, written by hand beneath it.
//!
//! A Mixture-of-Head block differs from a Llama's only in that the pass over queries and keys also
//! routes, and that attention skips the (token, head) pairs which were not selected. Training and
//! generation take the same path: `tokens` may be fewer than the buffers hold.

use std::ops::Range;

use moh_kernels::attention::{
    AttentionArgs, AttentionBackward, AttentionForward, AttentionShape, KeyValues,
};
use moh_kernels::key_value_cache::KeyValueAppend;
use moh_kernels::linear::{LinearBackwardInput, LinearBackwardWeight, LinearForward};
use moh_kernels::ranks::AllReduce;
use moh_kernels::rms_norm::{RmsNormBackward, RmsNormForward};
use moh_kernels::rope::{QkvShape, RopeArgs, RopeTable};
use moh_kernels::router::{
    RouterGradient, RouterRanks, RouterRopeBackward, RouterRopeForward, Routing,
};
use moh_kernels::{Backend, Element, View, span};

use crate::Error;
use crate::activations::{Backward, BlockBuffers, Cheap, Kept};
use crate::model::Model;
use crate::parameters::FlatBuffers;
use crate::sequence::Projection;

/// Keys and values of one block's past tokens, `[capacity, G D]` each.
pub(crate) struct LayerCache<B: Backend, T: Element> {
    pub keys: B::Buffer<T>,
    pub values: B::Buffer<T>,
}

/// Which tokens a block works on.
pub(crate) struct Tokens<'a, B: Backend> {
    pub shape: QkvShape,
    /// Position of each sequence's first token.
    pub first_position: usize,
    /// Start of each token's document; `[N]`.
    pub document_start: Option<&'a B::Buffer<u32>>,
}

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

/// A linear layer of a block's backward pass: its weight, `range` of the flat buffer `flat`, and
/// sizes. Buffers may be longer than the tensors in them.
#[derive(Clone, Copy)]
struct Linear<'a> {
    flat: usize,
    range: &'a Range<usize>,
    tokens: usize,
    inputs: usize,
}

/// What steers a block's backward pass beside the gradient from above.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct RouterScale {
    /// Gradient of the total loss with respect to one block's balance loss.
    pub balance_weight: f32,
    /// Whether the loss reaches the gates through the selection.
    pub straight_through: bool,
}

impl<B: Backend, T: Element> Model<B, T> {
    fn rope_table(&self, first_position: usize) -> RopeTable<'_, B> {
        let (cos, sin) = (B::whole(&self.rope_cos), B::whole(&self.rope_sin));
        RopeTable { cos, sin, first_position }
    }

    /// Attention's half of a block: fills `kept` up to `middle`.
    pub(crate) fn attend(
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
            args: tokens.attention(self.attention_shape(&tokens.shape, key_length), routing),
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

    /// The MLP's norm and its gate and up projections.
    pub(crate) fn project_up(
        &self,
        tokens: usize,
        block: &mut BlockBuffers<'_, B, T>,
    ) -> Result<(), Error> {
        let BlockBuffers { layer, kept, cheap, gathered, .. } = block;
        self.normalize_middle(*layer, tokens, kept, cheap)?;
        let flat = self.layout.block_index(*layer);
        self.backend.linear_forward(LinearForward {
            inputs: self.config.hidden_size,
            x: self.gather(tokens, &cheap.post_normed, gathered)?,
            weight: self.weights.view(flat, self.layout.block.gate_up.clone()),
            residual: None,
            y: B::view_mut(&mut kept.gate_up, 0..tokens * 2 * self.mlp_width()),
        })?;
        Ok(())
    }

    /// The MLP up to the input of its down projection.
    pub(crate) fn activate(
        &self,
        tokens: usize,
        block: &mut BlockBuffers<'_, B, T>,
    ) -> Result<(), Error> {
        self.project_up(tokens, block)?;
        let inner = self.mlp_width();
        self.backend.swiglu_forward(
            inner,
            B::view(&block.kept.gate_up, 0..tokens * 2 * inner),
            B::view_mut(block.wide, 0..tokens * inner),
        )?;
        Ok(())
    }

    /// The MLP's down projection, added to the residual stream.
    pub(crate) fn project_down(
        &self,
        tokens: usize,
        block: &mut BlockBuffers<'_, B, T>,
        output: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        let inner = self.mlp_width();
        let flat = self.layout.block_index(block.layer);
        let projection = Projection {
            tokens,
            inputs: inner,
            x: B::view(block.wide, 0..tokens * inner),
            weight: self.weights.view(flat, self.layout.block.down.clone()),
        };
        self.project_to_stream(projection, &block.kept.middle, output, block.gathered)
    }

    /// Width of the MLP's columns that are held.
    fn mlp_width(&self) -> usize {
        self.parallel.part().tensor.mlp_width(&self.config)
    }

    /// Computes the norms of the forward pass again.
    pub(crate) fn recompute_norms(
        &self,
        tokens: usize,
        input: &B::Buffer<T>,
        block: &mut BlockBuffers<'_, B, T>,
    ) -> Result<(), Error> {
        self.normalize_input(block.layer, tokens, input, block.cheap)?;
        self.normalize_middle(block.layer, tokens, block.kept, block.cheap)
    }

    fn normalize_input(
        &self,
        layer: usize,
        tokens: usize,
        input: &B::Buffer<T>,
        cheap: &mut Cheap<B, T>,
    ) -> Result<(), Error> {
        let weight = (self.layout.block_index(layer), &self.layout.block.input_norm);
        let into = (&mut cheap.input_normed, &mut cheap.input_inv_rms);
        self.normalize(weight, tokens, input, into)
    }

    fn normalize_middle(
        &self,
        layer: usize,
        tokens: usize,
        kept: &Kept<B, T>,
        cheap: &mut Cheap<B, T>,
    ) -> Result<(), Error> {
        let weight = (self.layout.block_index(layer), &self.layout.block.post_norm);
        let into = (&mut cheap.post_normed, &mut cheap.post_inv_rms);
        self.normalize(weight, tokens, &kept.middle, into)
    }

    /// The norm of the tokens held here, whose weight is a range of a flat buffer.
    pub(crate) fn normalize(
        &self,
        (flat, weight): (usize, &Range<usize>),
        tokens: usize,
        x: &B::Buffer<T>,
        (y, inv_rms): (&mut B::Buffer<T>, &mut B::Buffer<f32>),
    ) -> Result<(), Error> {
        let stream = self.stream_len(tokens);
        self.backend.rms_norm_forward(RmsNormForward {
            eps: self.config.rms_norm_eps,
            x: B::view(x, 0..stream),
            weight: self.weights.view(flat, weight.clone()),
            y: B::view_mut(y, 0..stream),
            inv_rms: B::view_mut(inv_rms, 0..self.token_share(tokens).held()),
        })?;
        Ok(())
    }

    /// Turns `scratch.d_stream` from the gradient of the block's output into that of its input,
    /// and adds the gradients of its weights to `gradients`, or overwrites what is stale there.
    pub(crate) fn block_backward<G: Element>(
        &self,
        tokens: &Tokens<'_, B>,
        input: &B::Buffer<T>,
        mut block: BlockBuffers<'_, B, T>,
        scratch: &mut Backward<B, T>,
        gradients: &mut FlatBuffers<B, G>,
        router: RouterScale,
    ) -> Result<(), Error> {
        let n = tokens.shape.tokens();
        self.mlp_backward(n, &mut block, scratch, gradients)?;
        let _attention = span::enter("attention");
        let flat = self.layout.block_index(block.layer);
        let (width, ranges) = (self.config.hidden_size, &self.layout.block);
        let linear = |range, inputs| Linear { flat, range, tokens: n, inputs };
        let queries = tokens.shape.heads * tokens.shape.head_dim;
        let output = linear(&ranges.output, queries);
        let attended = B::view(&block.kept.attended, 0..n * queries);
        let d_output = self.gather(n, &scratch.d_stream, block.gathered)?;
        self.linear_backward_weight(output, attended, d_output, gradients)?;
        self.linear_backward_input(output, d_output, &mut scratch.d_branch)?;
        self.attention_backward(tokens, &mut block, scratch, router)?;
        let qkv = linear(&ranges.qkv, width);
        let d_qkv = B::view(block.wide, 0..n * tokens.shape.row());
        let normed = self.gather(n, &block.cheap.input_normed, block.gathered)?;
        self.linear_backward_weight(qkv, normed, d_qkv, gradients)?;
        self.linear_backward_input(qkv, d_qkv, &mut scratch.d_branch)?;
        let inv_rms = &block.cheap.input_inv_rms;
        self.norm_backward((flat, &ranges.input_norm, n), input, inv_rms, scratch, gradients)?;
        gradients.mark_written(flat);
        Ok(())
    }

    /// Leaves the gradient of gate and up in their own place.
    fn mlp_backward<G: Element>(
        &self,
        n: usize,
        block: &mut BlockBuffers<'_, B, T>,
        scratch: &mut Backward<B, T>,
        gradients: &mut FlatBuffers<B, G>,
    ) -> Result<(), Error> {
        let _span = span::enter("mlp");
        let BlockBuffers { layer, kept, cheap, wide, gathered } = block;
        let (flat, ranges) = (self.layout.block_index(*layer), &self.layout.block);
        let (width, inner) = (self.config.hidden_size, self.mlp_width());
        let linear = |range, inputs| Linear { flat, range, tokens: n, inputs };
        let down = linear(&ranges.down, inner);
        let d_output = self.gather(n, &scratch.d_stream, gathered)?;
        self.linear_backward_input(down, d_output, wide)?;
        self.backend.swiglu_backward(
            inner,
            B::whole_mut(&mut kept.gate_up),
            B::view_mut(wide, 0..n * inner),
        )?;
        self.linear_backward_weight(down, B::view(wide, 0..n * inner), d_output, gradients)?;
        let gate_up = linear(&ranges.gate_up, width);
        let d_gate_up = B::whole(&kept.gate_up);
        let normed = self.gather(n, &cheap.post_normed, gathered)?;
        self.linear_backward_weight(gate_up, normed, d_gate_up, gradients)?;
        self.linear_backward_input(gate_up, d_gate_up, &mut scratch.d_branch)?;
        let (middle, inv_rms) = (&kept.middle, &cheap.post_inv_rms);
        self.norm_backward((flat, &ranges.post_norm, n), middle, inv_rms, scratch, gradients)
    }

    /// From the gradient of attention's output in `d_branch` to that of the unrotated queries, keys
    /// and values in `wide`, the router's part included.
    fn attention_backward(
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
            args: tokens.attention(self.attention_shape(shape, shape.length), routing),
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

    fn linear_backward_weight<G: Element>(
        &self,
        linear: Linear<'_>,
        x: View<'_, B, T>,
        d_y: View<'_, B, T>,
        gradients: &mut FlatBuffers<B, G>,
    ) -> Result<(), Error> {
        let accumulation = gradients.accumulation(linear.flat);
        self.backend.linear_backward_weight(LinearBackwardWeight {
            inputs: linear.inputs,
            x: B::reborrow(x),
            d_y: B::reborrow(d_y),
            d_weight: gradients.view_mut(linear.flat, linear.range.clone()),
            accumulation,
        })?;
        Ok(())
    }

    fn linear_backward_input(
        &self,
        linear: Linear<'_>,
        d_y: View<'_, B, T>,
        d_x: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        self.backend.linear_backward_input(LinearBackwardInput {
            inputs: linear.inputs,
            d_y: B::reborrow(d_y),
            weight: self.weights.view(linear.flat, linear.range.clone()),
            d_x: B::view_mut(d_x, 0..linear.tokens * linear.inputs),
        })?;
        Ok(())
    }

    /// Adds a norm's gradients, from that of its output in `d_branch`, to `d_stream` and to those of its
    /// weight.
    pub(crate) fn norm_backward<G: Element>(
        &self,
        (flat, range, tokens): (usize, &Range<usize>, usize),
        x: &B::Buffer<T>,
        inv_rms: &B::Buffer<f32>,
        scratch: &mut Backward<B, T>,
        gradients: &mut FlatBuffers<B, G>,
    ) -> Result<(), Error> {
        let own = self.reduce_scatter(tokens, &mut scratch.d_branch)?;
        let held = own.len();
        gradients.clear_stale(&self.backend, flat, range.clone())?;
        self.backend.rms_norm_backward(RmsNormBackward {
            x: B::view(x, 0..held),
            weight: self.weights.view(flat, range.clone()),
            inv_rms: B::view(inv_rms, 0..self.token_share(tokens).held()),
            d_y: B::view(&scratch.d_branch, own),
            d_x: B::view_mut(&mut scratch.d_stream, 0..held),
            d_weight: gradients.view_mut(flat, range.clone()),
        })?;
        Ok(())
    }
}
