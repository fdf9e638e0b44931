//! Grouped-query attention between two linear layers.
//!
//! Mixture-of-Head attention differs from dense attention in two ways: a router selects heads
//! (`rotation.rs`), and the (token, head) pairs that it did not select are skipped.

use std::ops::Range;

use moh_kernels::attention::{
    AttentionArgs, AttentionBackward, AttentionForward, AttentionShape, KeyValues,
    SequenceAttention, Span,
};
use moh_kernels::key_value_cache::KeyValueAppend;
use moh_kernels::router::Routing;
use moh_kernels::{Accumulation, AnyBuffer, AnyView, Backend, Element, Memory, for_element};

use super::{
    ActivationGradients, BackwardContext, Context, Linear, ResidualSum, Rotation, RouterLayer,
    Scratch,
};
use crate::tensors::{Division, OUTPUT_PROJECTION, TensorList};
use crate::{ModelConfig, PassSizes, Result};

/// `y = residual + output(attention(rotation(qkv(x))))`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Attention {
    pub qkv: Linear,
    pub output: Linear,
    pub rotation: Rotation,
    /// The factor of the scores that RoPE asks for.
    pub score_factor: f32,
    /// In a layer with routed heads.
    pub router: Option<RouterLayer>,
}

/// The activations of attention for its backward pass that are expensive to recompute. With tensor parallelism H and G
/// are the rank's local heads.
pub(crate) struct SavedAttention<M: Memory> {
    /// Queries, keys and values, `[N, (H + 2G) D]`: rotated if the rotation is in place, otherwise as projected.
    pub qkv: AnyBuffer<M>,
    /// Attention's output before the output projection, `[N, H D]`.
    pub attended: AnyBuffer<M>,
    /// Log-sum-exp of attention's scores, `[N, H]`.
    pub log_sum_exp: M::Buffer<f32>,
    /// The routing, in a model with a router.
    pub routing: Option<Routing<M>>,
    /// The logits of a router by logits; in the backward pass their gradients.
    pub logits: AnyBuffer<M>,
}

impl<M: Memory> SavedAttention<M> {
    pub fn new(memory: &M, sizes: &PassSizes<'_>) -> Result<Self> {
        let (share, config, tokens) = (sizes.share(), sizes.config, sizes.tokens());
        Ok(SavedAttention {
            qkv: sizes.zeros(memory, tokens * sizes.qkv().row())?,
            attended: sizes.zeros(memory, tokens * share.query_width(config))?,
            log_sum_exp: memory.allocate(tokens * share.heads(config).local())?,
            routing: sizes.routing.map(|shape| Routing::new(memory, shape)).transpose()?,
            logits: sizes.zeros(memory, sizes.routing.map_or(0, |shape| tokens * shape.logits))?,
        })
    }
}

/// Keys and values of one layer's past tokens, `[blocks, G, block_length, D]` each.
pub(crate) struct LayerCache<B: Backend> {
    pub keys: AnyBuffer<B>,
    pub values: AnyBuffer<B>,
}

/// The cache of a layer in a pass of generation, and the places of the pass's tokens in it.
pub(crate) struct CachedTokens<'a, B: Backend> {
    pub layer: &'a mut LayerCache<B>,
    /// The place of each token in the cache, `[N]` or more.
    pub rows: &'a B::Buffer<u32>,
    /// The sequences' blocks: the first `blocks` entries.
    pub block_table: &'a B::Buffer<u32>,
    /// The operator's inputs for generated tokens.
    pub generated: &'a B::Buffer<u32>,
    pub blocks: usize,
    pub block_length: usize,
    /// The sequences that have the tokens.
    pub spans: &'a [Span],
}

pub(crate) struct AttentionBuffers<'a, B: Backend> {
    pub saved: &'a mut SavedAttention<B>,
    /// The copy of [`Rotation::NormedRope`]; empty with rotation in place.
    pub rotated: &'a mut AnyBuffer<B>,
    /// Only in generation.
    pub cache: Option<CachedTokens<'a, B>>,
}

impl Attention {
    pub fn new(list: &mut TensorList<'_>, config: &ModelConfig) -> Self {
        let hidden = config.hidden_size;
        let (queries, keys) = (config.query_width(), config.key_value_width());
        let qkv = [
            ("self_attn.q_proj.weight", queries),
            ("self_attn.k_proj.weight", keys),
            ("self_attn.v_proj.weight", keys),
        ];
        let output = [hidden, queries];
        Attention {
            qkv: Linear::by_outputs(list, &qkv, hidden, Division::Heads),
            output: Linear::by_inputs(list, OUTPUT_PROJECTION, output, Division::Heads),
            rotation: Rotation::Rope,
            score_factor: config.rope.score_factor(),
            router: None,
        }
    }

    /// Adds attention of `x`, `[M, C]`, to the residual stream.
    pub fn forward<B: Backend>(
        &self,
        cx: &Context<'_, B>,
        x: &AnyBuffer<B>,
        mut buffers: AttentionBuffers<'_, B>,
        scratch: &mut Scratch<B>,
        sum: ResidualSum<'_, B>,
    ) -> Result<()> {
        let gathered = &mut scratch.gathered;
        let x = self.project(cx, x, buffers.saved, gathered)?;
        self.rotation.forward(cx, self.router.as_ref(), x, &mut buffers)?;
        let AttentionBuffers { saved, rotated, cache } = buffers;
        self.attend(cx, AttentionBuffers { saved: &mut *saved, rotated, cache })?;
        self.project_output(cx, saved, gathered, sum)
    }

    /// Adds the output projection of the heads' outputs from [`Self::attend`] to the residual stream.
    pub fn project_output<B: Backend>(
        &self,
        cx: &Context<'_, B>,
        saved: &SavedAttention<B>,
        gathered: &mut Option<AnyBuffer<B>>,
        sum: ResidualSum<'_, B>,
    ) -> Result<()> {
        let attended = saved.attended.view(0..cx.num_tokens() * self.output.inputs);
        self.output.add_to_stream(cx, attended, gathered, sum)
    }

    /// Computes queries, keys and values of `x`, `[M, C]`, before RoPE. Returns `x` of all tokens, `[N, C]`.
    pub fn project<'v, B: Backend>(
        &self,
        cx: &Context<'_, B>,
        x: &'v AnyBuffer<B>,
        saved: &mut SavedAttention<B>,
        gathered: &'v mut Option<AnyBuffer<B>>,
    ) -> Result<AnyView<'v, B>> {
        let x = cx.all_gather(self.qkv.inputs, x, gathered)?;
        self.qkv.forward(cx, x, None, &mut saved.qkv)?;
        Ok(x)
    }

    /// Computes and returns the outputs of the local heads, `[N, H D]`, from rotated queries and keys. With a router
    /// computes only the heads that a token selected.
    pub fn attend<'v, B: Backend>(
        &self,
        cx: &Context<'_, B>,
        buffers: AttentionBuffers<'v, B>,
    ) -> Result<AnyView<'v, B>> {
        let (n, shape) = (cx.num_tokens(), &cx.tokens.shape);
        let AttentionBuffers { saved, rotated, cache } = buffers;
        let SavedAttention { qkv, attended, log_sum_exp, routing, .. } = saved;
        let qkv = self.rotation.rotated(qkv, rotated);
        let (queries, routing) = (0..n * self.output.inputs, self.routing(routing.as_ref()));
        let log_sum_exp = B::view_mut(log_sum_exp, 0..n * shape.heads);
        match cache {
            Some(mut cache) => {
                append(cx, qkv, &mut cache)?;
                let generated = cache.spans.iter().filter(|span| !span.is_prompt).count();
                for_element!(T: qkv.element() => {
                    cx.backend.attention_of_sequences::<T>(SequenceAttention {
                        shape,
                        sequences: cache.spans,
                        selection: routing.map(Routing::selection),
                        score_factor: self.score_factor,
                        qkv: qkv.view(0..n * shape.row()).typed(),
                        keys: cache.layer.keys.whole().typed(),
                        values: cache.layer.values.whole().typed(),
                        block_table: B::view(cache.block_table, 0..cache.blocks),
                        generated: B::view(cache.generated, 0..3 * generated),
                        block_length: cache.block_length,
                        out: attended.view_mut(queries.clone()).typed(),
                        log_sum_exp,
                    })
                })?;
            }
            None => for_element!(T: qkv.element() => {
                cx.backend.attention_forward::<T>(AttentionForward {
                    args: self.args(cx, shape.length, routing),
                    queries: qkv.view(0..n * shape.row()).typed(),
                    key_values: key_values(cx, qkv),
                    out: attended.view_mut(queries.clone()).typed(),
                    log_sum_exp,
                })
            })?,
        }
        Ok(attended.view(queries))
    }

    /// Computes the gradient of `x` from the gradient of the residual stream, in `d.hidden`, and returns its range.
    pub fn backward<B: Backend>(
        &self,
        cx: &mut BackwardContext<'_, B>,
        x: &AnyBuffer<B>,
        buffers: AttentionBuffers<'_, B>,
        scratch: &mut Scratch<B>,
        d: &mut ActivationGradients<B>,
    ) -> Result<Range<usize>> {
        let AttentionBuffers { saved, rotated, .. } = buffers;
        let Scratch { hidden: d_qkv, gathered } = scratch;
        let (n, shape) = (cx.num_tokens(), cx.tokens.shape);
        let (queries, all) = (0..n * self.output.inputs, 0..n * shape.row());
        let d_y = cx.all_gather(self.output.outputs, &d.residual, gathered)?;
        self.output.backward_weight(cx, saved.attended.view(queries.clone()), d_y)?;
        self.output.backward_input(cx, d_y, &mut d.hidden, Accumulation::Overwrite)?;
        let routing = self.routing(saved.routing.as_ref());
        let qkv = self.rotation.rotated(&saved.qkv, rotated).whole();
        for_element!(T: qkv.element() => cx.backend.attention_backward::<T>(AttentionBackward {
            args: self.args(cx, shape.length, routing),
            qkv: qkv.typed(),
            out: saved.attended.whole().typed(),
            log_sum_exp: B::whole(&saved.log_sum_exp),
            d_out: d.hidden.view(queries).typed(),
            d_qkv: d_qkv.view_mut(all.clone()).typed(),
            delta: routing.is_some().then(|| B::whole_mut(&mut d.delta)),
        }))?;
        self.rotation.backward(cx, self.router.as_ref(), x, saved, d, d_qkv)?;
        let accumulation = match self.router.as_ref().is_some_and(RouterLayer::reads_input) {
            true => Accumulation::Add,
            false => Accumulation::Overwrite,
        };
        self.qkv.backward(cx, x, d_qkv.view(all), gathered, &mut d.hidden, accumulation)
    }

    /// Returns the routing of a layer with a router; layers without a router may have an unused buffer.
    fn routing<'v, B: Backend>(&self, routing: Option<&'v Routing<B>>) -> Option<&'v Routing<B>> {
        routing.filter(|_| self.router.is_some())
    }

    /// Returns the arguments of causal attention of the heads that `routing` selected, or of all heads without a
    /// routing.
    fn args<'v, B: Backend>(
        &self,
        cx: &Context<'v, B>,
        key_length: usize,
        routing: Option<&'v Routing<B>>,
    ) -> AttentionArgs<'v, B> {
        AttentionArgs {
            query_offset: cx.tokens.first_position,
            document_start: cx.tokens.document_start.map(|starts| B::whole(starts)),
            selection: routing.map(Routing::selection),
            score_factor: self.score_factor,
            ..AttentionArgs::causal(AttentionShape::of_qkv(&cx.tokens.shape, key_length))
        }
    }
}

/// Returns the keys and values of the pass's own tokens.
fn key_values<'v, B: Backend, T: Element>(
    cx: &Context<'_, B>,
    qkv: &'v AnyBuffer<B>,
) -> KeyValues<'v, B, T> {
    let shape = &cx.tokens.shape;
    let end = shape.tokens() * shape.row();
    let keys = shape.heads * shape.head_dim;
    let values = keys + shape.kv_heads * shape.head_dim;
    KeyValues::Contiguous {
        keys: qkv.view(keys..end).typed(),
        values: qkv.view(values..end).typed(),
        row_stride: shape.row(),
    }
}

fn append<B: Backend>(
    cx: &Context<'_, B>,
    qkv: &AnyBuffer<B>,
    cache: &mut CachedTokens<'_, B>,
) -> Result<()> {
    let shape = &cx.tokens.shape;
    for_element!(T: qkv.element() => cx.backend.key_value_append::<T>(KeyValueAppend {
        shape,
        rows: B::view(cache.rows, 0..shape.tokens()),
        block_length: cache.block_length,
        qkv: qkv.view(0..shape.tokens() * shape.row()).typed(),
        keys: cache.layer.keys.whole_mut().typed(),
        values: cache.layer.values.whole_mut().typed(),
    }))?;
    Ok(())
}
