//! One block of the model: `middle = x + O attention(norm(x))`, `y = middle + down(SwiGLU(
//! gate_up(norm(middle))))`, and its backward pass, written by hand beneath it.
//!
//! A Mixture-of-Head block differs from a Llama's only in that the pass over queries and keys also
//! routes, and that attention skips the (token, head) pairs which were not selected. Training and
//! generation take the same path: `tokens` may be fewer than the buffers hold.

use moh_kernels::attention::{KeyValues, Visibility};
use moh_kernels::rope::{QkvShape, RopeTable};
use moh_kernels::router::RouterGradient;
use moh_kernels::{Backend, Element};

use crate::Error;
use crate::activations::{Backward, Cheap, Kept, whole, whole_mut};
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
        layer: usize,
        tokens: &Tokens<'_, B>,
        input: &B::Buffer<T>,
        kept: &mut Kept<B, T>,
        cheap: &mut Cheap<B, T>,
        cache: Option<&mut LayerCache<B, T>>,
    ) -> Result<(), Error> {
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
        let qkv = B::view(&kept.qkv, 0..n * row);
        let keys = tokens.shape.heads * tokens.shape.head_dim;
        let values = keys + config.key_value_width();
        let (key_length, key_values) = match cache {
            None => (
                tokens.shape.length,
                KeyValues::Contiguous {
                    keys: B::view(&kept.qkv, keys..n * row),
                    values: B::view(&kept.qkv, values..n * row),
                    row_stride: row,
                },
            ),
            Some(cache) => {
                let end = tokens.first_position + tokens.shape.length;
                let len = end * config.key_value_width();
                backend.key_value_append(
                    &tokens.shape,
                    tokens.first_position,
                    qkv,
                    B::view_mut(&mut cache.keys, 0..len),
                    B::view_mut(&mut cache.values, 0..len),
                )?;
                let cached = KeyValues::Contiguous {
                    keys: B::view(&cache.keys, 0..len),
                    values: B::view(&cache.values, 0..len),
                    row_stride: config.key_value_width(),
                };
                (end, cached)
            }
        };
        backend.attention_forward(
            &self.attention_shape(&tokens.shape, key_length),
            qkv,
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

    /// The MLP up to the input of its down projection.
    pub(crate) fn activate(
        &self,
        layer: usize,
        tokens: usize,
        kept: &mut Kept<B, T>,
        cheap: &mut Cheap<B, T>,
    ) -> Result<(), Error> {
        let (width, inner) = (self.config.hidden_size, self.config.intermediate_size);
        self.normalize_middle(layer, tokens, kept, cheap)?;
        self.backend.linear_forward(
            width,
            B::view(&cheap.post_normed, 0..tokens * width),
            self.weights.view(self.layout.block_index(layer), self.layout.block.gate_up.clone()),
            None,
            B::view_mut(&mut kept.gate_up, 0..tokens * 2 * inner),
        )?;
        self.swiglu(tokens, kept, cheap)
    }

    /// The MLP's down projection, added to the residual stream.
    pub(crate) fn project_down(
        &self,
        layer: usize,
        tokens: usize,
        kept: &Kept<B, T>,
        cheap: &Cheap<B, T>,
        output: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        let (stream, inner) = (tokens * self.config.hidden_size, self.config.intermediate_size);
        self.backend.linear_forward(
            inner,
            B::view(&cheap.activated, 0..tokens * inner),
            self.weights.view(self.layout.block_index(layer), self.layout.block.down.clone()),
            Some(B::view(&kept.middle, 0..stream)),
            B::view_mut(output, 0..stream),
        )?;
        Ok(())
    }

    /// Computes norms and SwiGLU of the forward pass again.
    pub(crate) fn recompute_cheap(
        &self,
        layer: usize,
        tokens: usize,
        input: &B::Buffer<T>,
        kept: &Kept<B, T>,
        cheap: &mut Cheap<B, T>,
    ) -> Result<(), Error> {
        self.normalize_input(layer, tokens, input, cheap)?;
        self.normalize_middle(layer, tokens, kept, cheap)?;
        self.swiglu(tokens, kept, cheap)
    }

    fn normalize_input(
        &self,
        layer: usize,
        tokens: usize,
        input: &B::Buffer<T>,
        cheap: &mut Cheap<B, T>,
    ) -> Result<(), Error> {
        let stream = tokens * self.config.hidden_size;
        let flat = self.layout.block_index(layer);
        self.backend.rms_norm_forward(
            self.config.rms_norm_eps,
            B::view(input, 0..stream),
            self.weights.view(flat, self.layout.block.input_norm.clone()),
            B::view_mut(&mut cheap.input_normed, 0..stream),
            B::view_mut(&mut cheap.input_inv_rms, 0..tokens),
        )?;
        Ok(())
    }

    fn normalize_middle(
        &self,
        layer: usize,
        tokens: usize,
        kept: &Kept<B, T>,
        cheap: &mut Cheap<B, T>,
    ) -> Result<(), Error> {
        let stream = tokens * self.config.hidden_size;
        let flat = self.layout.block_index(layer);
        self.backend.rms_norm_forward(
            self.config.rms_norm_eps,
            B::view(&kept.middle, 0..stream),
            self.weights.view(flat, self.layout.block.post_norm.clone()),
            B::view_mut(&mut cheap.post_normed, 0..stream),
            B::view_mut(&mut cheap.post_inv_rms, 0..tokens),
        )?;
        Ok(())
    }

    fn swiglu(
        &self,
        tokens: usize,
        kept: &Kept<B, T>,
        cheap: &mut Cheap<B, T>,
    ) -> Result<(), Error> {
        let inner = self.config.intermediate_size;
        self.backend.swiglu_forward(
            inner,
            B::view(&kept.gate_up, 0..tokens * 2 * inner),
            B::view_mut(&mut cheap.activated, 0..tokens * inner),
        )?;
        Ok(())
    }

    /// Turns `scratch.d_stream` from the gradient of the block's output into that of its input,
    /// and adds the gradients of its weights to `gradients`.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn block_backward<G: Element>(
        &self,
        layer: usize,
        tokens: &Tokens<'_, B>,
        input: &B::Buffer<T>,
        kept: &Kept<B, T>,
        cheap: &Cheap<B, T>,
        scratch: &mut Backward<B, T>,
        gradients: &mut FlatBuffers<B, G>,
        router: RouterScale,
    ) -> Result<(), Error> {
        self.mlp_backward(layer, kept, cheap, scratch, gradients)?;
        let (backend, config, ranges) = (&self.backend, &self.config, &self.layout.block);
        let flat = self.layout.block_index(layer);
        let width = config.hidden_size;
        backend.linear_backward_weight(
            config.query_width(),
            whole::<B, T>(&kept.attended),
            whole::<B, T>(&scratch.d_stream),
            gradients.view_mut(flat, ranges.output.clone()),
        )?;
        backend.linear_backward_input(
            config.query_width(),
            whole::<B, T>(&scratch.d_stream),
            self.weights.view(flat, ranges.output.clone()),
            whole_mut::<B, T>(&mut scratch.d_attended),
        )?;
        backend.attention_backward(
            &self.attention_shape(&tokens.shape, tokens.shape.length),
            whole::<B, T>(&kept.qkv),
            tokens.visibility(),
            kept.routing.as_ref(),
            None,
            whole::<B, T>(&kept.attended),
            whole::<B, f32>(&kept.log_sum_exp),
            whole::<B, T>(&scratch.d_attended),
            whole_mut::<B, T>(&mut scratch.d_qkv),
            kept.routing.is_some().then(|| whole_mut::<B, f32>(&mut scratch.delta)),
        )?;
        let gradient = kept.routing.as_ref().map(|routing| RouterGradient {
            routing,
            delta: router.straight_through.then(|| whole::<B, f32>(&scratch.delta)),
            balance_weight: router.balance_weight,
        });
        backend.rope_route_backward(
            &tokens.shape,
            self.rope_table(),
            tokens.first_position,
            whole::<B, T>(&kept.qkv),
            whole_mut::<B, T>(&mut scratch.d_qkv),
            gradient,
        )?;
        backend.linear_backward_weight(
            width,
            whole::<B, T>(&cheap.input_normed),
            whole::<B, T>(&scratch.d_qkv),
            gradients.view_mut(flat, ranges.qkv.clone()),
        )?;
        backend.linear_backward_input(
            width,
            whole::<B, T>(&scratch.d_qkv),
            self.weights.view(flat, ranges.qkv.clone()),
            whole_mut::<B, T>(&mut scratch.d_normed),
        )?;
        backend.rms_norm_backward(
            whole::<B, T>(input),
            self.weights.view(flat, ranges.input_norm.clone()),
            whole::<B, f32>(&cheap.input_inv_rms),
            whole::<B, T>(&scratch.d_normed),
            whole_mut::<B, T>(&mut scratch.d_stream),
            gradients.view_mut(flat, ranges.input_norm.clone()),
        )?;
        Ok(())
    }

    fn mlp_backward<G: Element>(
        &self,
        layer: usize,
        kept: &Kept<B, T>,
        cheap: &Cheap<B, T>,
        scratch: &mut Backward<B, T>,
        gradients: &mut FlatBuffers<B, G>,
    ) -> Result<(), Error> {
        let (backend, ranges) = (&self.backend, &self.layout.block);
        let flat = self.layout.block_index(layer);
        let (width, inner) = (self.config.hidden_size, self.config.intermediate_size);
        backend.linear_backward_weight(
            inner,
            whole::<B, T>(&cheap.activated),
            whole::<B, T>(&scratch.d_stream),
            gradients.view_mut(flat, ranges.down.clone()),
        )?;
        backend.linear_backward_input(
            inner,
            whole::<B, T>(&scratch.d_stream),
            self.weights.view(flat, ranges.down.clone()),
            whole_mut::<B, T>(&mut scratch.d_activated),
        )?;
        backend.swiglu_backward(
            inner,
            whole::<B, T>(&kept.gate_up),
            whole::<B, T>(&scratch.d_activated),
            whole_mut::<B, T>(&mut scratch.d_gate_up),
        )?;
        backend.linear_backward_weight(
            width,
            whole::<B, T>(&cheap.post_normed),
            whole::<B, T>(&scratch.d_gate_up),
            gradients.view_mut(flat, ranges.gate_up.clone()),
        )?;
        backend.linear_backward_input(
            width,
            whole::<B, T>(&scratch.d_gate_up),
            self.weights.view(flat, ranges.gate_up.clone()),
            whole_mut::<B, T>(&mut scratch.d_normed),
        )?;
        backend.rms_norm_backward(
            whole::<B, T>(&kept.middle),
            self.weights.view(flat, ranges.post_norm.clone()),
            whole::<B, f32>(&cheap.post_inv_rms),
            whole::<B, T>(&scratch.d_normed),
            whole_mut::<B, T>(&mut scratch.d_stream),
            gradients.view_mut(flat, ranges.post_norm.clone()),
        )?;
        Ok(())
    }
}
