//! One block of the model: `middle = x + O attention(norm(x))`, `y = middle + down(SwiGLU(
//! gate_up(norm(middle))))`, and its backward pass, written by hand beneath it.
//!
//! A Mixture-of-Head block differs from a Llama's only in that the pass over queries and keys also
//! routes, and that attention skips the (token, head) pairs which were not selected. Training and
//! generation take the same path: `tokens` may be fewer than the buffers hold.

use std::ops::Range;

use moh_kernels::attention::{KeyValues, Visibility};
use moh_kernels::rope::{QkvShape, RopeTable};
use moh_kernels::router::RouterGradient;
use moh_kernels::{Backend, Element};

use crate::Error;
use crate::activations::{Backward, BlockBuffers, Cheap, Kept, whole, whole_mut};
use crate::model::Model;
use crate::parameters::FlatBuffers;

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
    pub first_key: Option<&'a B::Buffer<u32>>,
}

impl<B: Backend> Tokens<'_, B> {
    fn visibility(&self) -> Visibility<'_, B> {
        Visibility {
            causal: true,
            query_offset: self.first_position,
            first_key: self.first_key.map(whole::<B, u32>),
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

impl Linear<'_> {
    fn outputs(&self) -> usize {
        self.range.len() / self.inputs
    }
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
    fn rope_table(&self) -> RopeTable<'_, B> {
        RopeTable { cos: whole::<B, f32>(&self.rope_cos), sin: whole::<B, f32>(&self.rope_sin) }
    }

    /// Attention's half of a block: fills `kept` up to `middle`.
    pub(crate) fn attend(
        &self,
        tokens: &Tokens<'_, B>,
        input: &B::Buffer<T>,
        block: &mut BlockBuffers<'_, B, T>,
        mut cache: Option<&mut LayerCache<B, T>>,
    ) -> Result<(), Error> {
        let BlockBuffers { layer, kept, cheap, .. } = block;
        let layer = *layer;
        let (backend, config, ranges) = (&self.backend, &self.config, &self.layout.block);
        let flat = self.layout.block_index(layer);
        let (n, width) = (tokens.shape.tokens(), config.hidden_size);
        let (stream, row) = (n * width, tokens.shape.row());
        self.normalize_input(layer, n, input, cheap)?;
        backend.linear_forward(
            width,
            B::view(&cheap.input_normed, 0..stream),
            self.weights.view(flat, ranges.qkv.clone()),
            None,
            B::view_mut(&mut kept.qkv, 0..n * row),
        )?;
        backend.rope_route_forward(
            &tokens.shape,
            self.rope_table(),
            tokens.first_position,
            B::view_mut(&mut kept.qkv, 0..n * row),
            kept.routing.as_mut(),
        )?;
        if let Some(cache) = &mut cache {
            self.append(tokens, &kept.qkv, cache)?;
        }
        let (key_length, key_values) = self.key_values(tokens, &kept.qkv, cache.as_deref());
        backend.attention_forward(
            &self.attention_shape(&tokens.shape, key_length),
            B::view(&kept.qkv, 0..n * row),
            key_values,
            tokens.visibility(),
            kept.routing.as_ref(),
            None,
            B::view_mut(&mut kept.attended, 0..n * config.query_width()),
            B::view_mut(&mut kept.log_sum_exp, 0..n * config.num_attention_heads),
        )?;
        backend.linear_forward(
            config.query_width(),
            B::view(&kept.attended, 0..n * config.query_width()),
            self.weights.view(flat, ranges.output.clone()),
            Some(B::view(input, 0..stream)),
            B::view_mut(&mut kept.middle, 0..stream),
        )?;
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
        let len = end * self.config.key_value_width();
        self.backend.key_value_append(
            &tokens.shape,
            tokens.first_position,
            B::view(qkv, 0..tokens.shape.tokens() * tokens.shape.row()),
            B::view_mut(&mut cache.keys, 0..len),
            B::view_mut(&mut cache.values, 0..len),
        )?;
        Ok(())
    }

    /// How many keys there are and where they lie: in the cache, or beside the queries.
    fn key_values<'k>(
        &self,
        tokens: &Tokens<'_, B>,
        qkv: &'k B::Buffer<T>,
        cache: Option<&'k LayerCache<B, T>>,
    ) -> (usize, KeyValues<'k, B, T>) {
        let width = self.config.key_value_width();
        let (row, end) = (tokens.shape.row(), tokens.shape.tokens() * tokens.shape.row());
        let keys = self.config.query_width();
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
        let BlockBuffers { layer, kept, cheap, .. } = block;
        let (width, inner) = (self.config.hidden_size, self.config.intermediate_size);
        self.normalize_middle(*layer, tokens, kept, cheap)?;
        self.backend.linear_forward(
            width,
            B::view(&cheap.post_normed, 0..tokens * width),
            self.weights.view(self.layout.block_index(*layer), self.layout.block.gate_up.clone()),
            None,
            B::view_mut(&mut kept.gate_up, 0..tokens * 2 * inner),
        )?;
        Ok(())
    }

    /// The MLP up to the input of its down projection.
    pub(crate) fn activate(
        &self,
        tokens: usize,
        block: &mut BlockBuffers<'_, B, T>,
    ) -> Result<(), Error> {
        self.project_up(tokens, block)?;
        let inner = self.config.intermediate_size;
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
        block: &BlockBuffers<'_, B, T>,
        output: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        let (stream, inner) = (tokens * self.config.hidden_size, self.config.intermediate_size);
        self.backend.linear_forward(
            inner,
            B::view(block.wide, 0..tokens * inner),
            self.weights.view(self.layout.block_index(block.layer), self.layout.block.down.clone()),
            Some(B::view(&block.kept.middle, 0..stream)),
            B::view_mut(output, 0..stream),
        )?;
        Ok(())
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
        let weight = &self.layout.block.input_norm;
        let into = (&mut cheap.input_normed, &mut cheap.input_inv_rms);
        self.normalize((layer, weight), tokens, input, into)
    }

    fn normalize_middle(
        &self,
        layer: usize,
        tokens: usize,
        kept: &Kept<B, T>,
        cheap: &mut Cheap<B, T>,
    ) -> Result<(), Error> {
        let weight = &self.layout.block.post_norm;
        let into = (&mut cheap.post_normed, &mut cheap.post_inv_rms);
        self.normalize((layer, weight), tokens, &kept.middle, into)
    }

    fn normalize(
        &self,
        (layer, weight): (usize, &Range<usize>),
        tokens: usize,
        x: &B::Buffer<T>,
        (y, inv_rms): (&mut B::Buffer<T>, &mut B::Buffer<f32>),
    ) -> Result<(), Error> {
        let stream = tokens * self.config.hidden_size;
        self.backend.rms_norm_forward(
            self.config.rms_norm_eps,
            B::view(x, 0..stream),
            self.weights.view(self.layout.block_index(layer), weight.clone()),
            B::view_mut(y, 0..stream),
            B::view_mut(inv_rms, 0..tokens),
        )?;
        Ok(())
    }

    /// Turns `scratch.d_stream` from the gradient of the block's output into that of its input,
    /// and adds the gradients of its weights to `gradients`.
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
        let flat = self.layout.block_index(block.layer);
        let (width, ranges) = (self.config.hidden_size, &self.layout.block);
        let linear = |range, inputs| Linear { flat, range, tokens: n, inputs };
        let output = linear(&ranges.output, self.config.query_width());
        self.linear_backward_weight(output, &block.kept.attended, &scratch.d_stream, gradients)?;
        self.linear_backward_input(output, &scratch.d_stream, &mut scratch.d_branch)?;
        self.attention_backward(tokens, &mut block, scratch, router)?;
        let qkv = linear(&ranges.qkv, width);
        self.linear_backward_weight(qkv, &block.cheap.input_normed, block.wide, gradients)?;
        self.linear_backward_input(qkv, block.wide, &mut scratch.d_branch)?;
        let inv_rms = &block.cheap.input_inv_rms;
        self.norm_backward((flat, &ranges.input_norm), input, inv_rms, scratch, gradients)
    }

    /// Leaves the gradient of gate and up in their own place.
    fn mlp_backward<G: Element>(
        &self,
        n: usize,
        block: &mut BlockBuffers<'_, B, T>,
        scratch: &mut Backward<B, T>,
        gradients: &mut FlatBuffers<B, G>,
    ) -> Result<(), Error> {
        let BlockBuffers { layer, kept, cheap, wide } = block;
        let (flat, ranges) = (self.layout.block_index(*layer), &self.layout.block);
        let (width, inner) = (self.config.hidden_size, self.config.intermediate_size);
        let linear = |range, inputs| Linear { flat, range, tokens: n, inputs };
        let down = linear(&ranges.down, inner);
        self.linear_backward_input(down, &scratch.d_stream, wide)?;
        self.backend.swiglu_backward(
            inner,
            whole_mut::<B, T>(&mut kept.gate_up),
            B::view_mut(wide, 0..n * inner),
        )?;
        self.linear_backward_weight(down, wide, &scratch.d_stream, gradients)?;
        let gate_up = linear(&ranges.gate_up, width);
        self.linear_backward_weight(gate_up, &cheap.post_normed, &kept.gate_up, gradients)?;
        self.linear_backward_input(gate_up, &kept.gate_up, &mut scratch.d_branch)?;
        let (middle, inv_rms) = (&kept.middle, &cheap.post_inv_rms);
        self.norm_backward((flat, &ranges.post_norm), middle, inv_rms, scratch, gradients)
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
        let BlockBuffers { kept, wide, .. } = block;
        let (n, shape) = (tokens.shape.tokens(), &tokens.shape);
        self.backend.attention_backward(
            &self.attention_shape(shape, shape.length),
            whole::<B, T>(&kept.qkv),
            tokens.visibility(),
            kept.routing.as_ref(),
            None,
            whole::<B, T>(&kept.attended),
            whole::<B, f32>(&kept.log_sum_exp),
            B::view(&scratch.d_branch, 0..n * self.config.query_width()),
            B::view_mut(wide, 0..n * shape.row()),
            kept.routing.is_some().then(|| whole_mut::<B, f32>(&mut scratch.delta)),
        )?;
        let gradient = kept.routing.as_ref().map(|routing| RouterGradient {
            routing,
            delta: router.straight_through.then(|| whole::<B, f32>(&scratch.delta)),
            balance_weight: router.balance_weight,
        });
        self.backend.rope_route_backward(
            &tokens.shape,
            self.rope_table(),
            tokens.first_position,
            whole::<B, T>(&kept.qkv),
            B::view_mut(wide, 0..n * shape.row()),
            gradient,
        )?;
        Ok(())
    }

    fn linear_backward_weight<G: Element>(
        &self,
        linear: Linear<'_>,
        x: &B::Buffer<T>,
        d_y: &B::Buffer<T>,
        gradients: &mut FlatBuffers<B, G>,
    ) -> Result<(), Error> {
        self.backend.linear_backward_weight(
            linear.inputs,
            B::view(x, 0..linear.tokens * linear.inputs),
            B::view(d_y, 0..linear.tokens * linear.outputs()),
            gradients.view_mut(linear.flat, linear.range.clone()),
        )?;
        Ok(())
    }

    fn linear_backward_input(
        &self,
        linear: Linear<'_>,
        d_y: &B::Buffer<T>,
        d_x: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        self.backend.linear_backward_input(
            linear.inputs,
            B::view(d_y, 0..linear.tokens * linear.outputs()),
            self.weights.view(linear.flat, linear.range.clone()),
            B::view_mut(d_x, 0..linear.tokens * linear.inputs),
        )?;
        Ok(())
    }

    /// Adds a norm's gradients, from that of its output in `d_branch`, to `d_stream` and to those of its weight.
    fn norm_backward<G: Element>(
        &self,
        (flat, range): (usize, &Range<usize>),
        x: &B::Buffer<T>,
        inv_rms: &B::Buffer<f32>,
        scratch: &mut Backward<B, T>,
        gradients: &mut FlatBuffers<B, G>,
    ) -> Result<(), Error> {
        self.backend.rms_norm_backward(
            whole::<B, T>(x),
            self.weights.view(flat, range.clone()),
            whole::<B, f32>(inv_rms),
            B::view(&scratch.d_branch, 0..B::len(x)),
            whole_mut::<B, T>(&mut scratch.d_stream),
            gradients.view_mut(flat, range.clone()),
        )?;
        Ok(())
    }
}
