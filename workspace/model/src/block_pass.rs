//! A block of a model, or its embedding and head, computed alone: the caller stores the residual stream, and loads one
//! layer after another. So a conversion that measures heads handles a model of any size with the memory of one layer.

use std::ops::Range;

use moh_kernels::cross_entropy::IGNORED;
use moh_kernels::router::Routing;
use moh_kernels::{AnyBuffer, Backend, ElementType, Memory};

use crate::activations::{Activations, PassActivations, PassShape, Recompute};
use crate::layers::attention::AttentionBuffers;
use crate::layers::{
    Attention, Block, BlockBuffers, Context, ResidualSum, RouterLayer, SavedBlock, Tokens,
};
use crate::layout::Segment;
use crate::model::Model;
use crate::tensors::{in_layer, layer_and_name};
use crate::{Error, ModelConfig, MohConfig, Result, RouterKind, SharedHeadSets, StepSums, router};

/// Maximum tokens of a pass; longer windows are computed one at a time.
const PASS_TOKENS: usize = 4096;

/// Returns the maximum number of windows of `length` tokens in a pass over a layer, at least 1.
pub fn most_windows(length: usize) -> usize {
    (PASS_TOKENS / length.max(1)).max(1)
}

/// Returns the number of windows in each pass over `windows` windows of `length` tokens: the largest divisor of
/// `windows` up to [`most_windows`].
pub fn windows_of_pass(windows: usize, length: usize) -> usize {
    let most = most_windows(length).min(windows);
    (1..=most).rev().find(|batch| windows.is_multiple_of(*batch)).unwrap_or(1)
}

/// Returns the configuration of one block of a model, for [`BlockPass`]. Its buffers have room for every set of shared
/// heads. A learned router's matrices are among its tensors, whatever the number of routed heads.
///
/// # Errors
/// Fails if the model has more heads than a set can name.
pub fn block_alone(config: &ModelConfig) -> Result<ModelConfig> {
    let heads = config.num_attention_heads;
    let every_set = |moh: &MohConfig| {
        // The empty set has the most columns; a set of only the last head has as many.
        let (shared, top_k) = match moh.router {
            RouterKind::Static => (vec![heads - 1], 0),
            // Two-stage routers have two more logits if there are shared heads.
            router if router.weighs() => (vec![heads - 1], heads - 1),
            _ => (Vec::new(), heads),
        };
        Ok::<_, Error>(MohConfig {
            shared_heads: SharedHeadSets::from_ids(&[shared])?,
            routed_top_k: top_k.into(),
            ..moh.clone()
        })
    };
    Ok(ModelConfig {
        num_hidden_layers: 1,
        vocab_size: 1,
        tie_word_embeddings: true,
        moh: config.moh.as_ref().map(every_set).transpose()?,
        ..config.clone()
    })
}

/// Returns the configuration of a model's embedding, final norm and head, for [`EndsPass`].
pub fn ends_alone(config: &ModelConfig) -> ModelConfig {
    ModelConfig { num_hidden_layers: 0, moh: None, ..config.clone() }
}

/// Returns the pass of [`BlockPass`] and [`EndsPass`] over `batch` windows of `length` tokens.
pub fn pass_alone(batch: usize, length: usize) -> PassShape {
    PassShape::evaluation(batch, length, Recompute::None)
}

/// A block alone, of f32 weights, for passes over B sequences of T tokens, N = B T.
pub struct BlockPass<B: Backend> {
    model: Model<B>,
    activations: Activations<B>,
    /// The router that the block was allocated with. A learned router's matrices are tensors of the block, which a
    /// dense block does not read.
    router: Option<RouterLayer>,
}

type Parts<'a, B> = (Context<'a, B>, &'a Block, &'a mut Vec<AnyBuffer<B>>, BlockBuffers<'a, B>);

/// A block's results for a residual stream.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockOutput {
    /// The residual stream after attention, `[N, C]`.
    pub after_attention: Vec<f32>,
    /// The residual stream after the block, `[N, C]`.
    pub output: Vec<f32>,
}

impl<B: Backend> BlockPass<B> {
    /// Allocates a block of the model that `config` describes ([`block_alone`]), with weights of zeros, for passes
    /// over `batch` sequences of `length` tokens.
    pub fn new(backend: B, config: &ModelConfig, batch: usize, length: usize) -> Result<Self> {
        let zeros = |_: &Segment, _: &mut [f32]| Ok::<_, Error>(());
        let model = Model::new(backend, ElementType::F32, block_alone(config)?, length, zeros)?;
        let activations = Activations::new(&model, pass_alone(batch, length))?;
        let router = model.layers.blocks[0].attention.router.clone();
        Ok(BlockPass { model, activations, router })
    }

    /// Loads the weights of layer `layer`, from 0: `source` writes each tensor by its name in the whole
    /// model.
    pub fn load<E: From<Error>>(
        &mut self,
        layer: usize,
        mut source: impl FnMut(&str, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let Model { backend, layout, weights, .. } = &mut self.model;
        weights.fill(backend, layout, |segment, values| {
            match layer_and_name(&segment.name) {
                Some((_, name)) => source(&in_layer(layer, name), values),
                // A block does not use the embedding and the final norm.
                None => Ok(()),
            }
        })
    }

    /// Replaces the block's attention; its tensors stay.
    fn set_attention(&mut self, moh: Option<MohConfig>) -> Result<()> {
        let Model { config, layers, .. } = &mut self.model;
        if let Some(moh) = &moh {
            config.check_moh(moh)?;
        }
        config.moh = moh;
        let of_block = |spec| {
            RouterLayer::after(config, spec, self.router.as_ref()).ok_or_else(|| {
                Error::invalid("the block was allocated without this router's matrices")
            })
        };
        layers.blocks[0].attention.router =
            router::of_layer(config, 0).map(of_block).transpose()?;
        Ok(())
    }

    /// Returns the layers' context, the block, the residual stream before and after it, and its buffers.
    fn parts(&mut self) -> Parts<'_, B> {
        let Activations { shape, passes, scratch, .. } = &mut self.activations;
        let PassActivations { stream, blocks } = &mut passes[0];
        let (cx, block) = (self.model.context(Tokens::whole(*shape)), &self.model.layers.blocks[0]);
        (cx, block, stream, blocks.buffers(0, scratch))
    }

    /// Computes queries, keys and values of the residual stream `x`, `[N, C]`, and returns the queries
    /// before RoPE, `[N, H D]`.
    pub fn project(&mut self, x: &[f32]) -> Result<Vec<f32>> {
        let (cx, block, stream, buffers) = self.parts();
        let (shape, BlockBuffers { saved, recomputable, scratch }) = (cx.tokens.shape, buffers);
        stream[0].whole_mut().fill_from_f32(cx.backend, x)?;
        let norm = &mut recomputable.attention_norm;
        let normed = block.attention_norm.forward(&cx, &stream[0], norm)?;
        block.attention.project(&cx, normed, &mut saved.attention, &mut scratch.gathered)?;
        let qkv = download(cx.backend, &saved.attention.qkv, shape.tokens() * shape.row())?;
        Ok(columns(&qkv, shape.row(), 0..shape.heads * shape.head_dim))
    }

    /// Returns the heads that each token computes with the router of `moh`: `[N, H]`, 1 for shared and selected heads.
    /// Call it after [`Self::project`] and before [`Self::attend`].
    pub fn select(&mut self, moh: MohConfig) -> Result<Vec<u8>> {
        self.set_attention(Some(moh))?;
        let (cx, block, _, BlockBuffers { saved, recomputable, .. }) = self.parts();
        let (shape, attention) = (cx.tokens.shape, &mut saved.attention);
        let router = block.attention.router.as_ref();
        let Some((router, routing)) = router.zip(attention.routing.as_mut()) else {
            return Ok(vec![1; shape.tokens() * shape.heads]);
        };
        let x = recomputable.attention_norm.y.whole();
        let qkv = attention.qkv.whole_mut();
        router.forward(&cx, x, qkv, false, routing, &mut attention.logits)?;
        let mut selected = vec![0u8; shape.tokens() * routing.columns()];
        cx.backend.download(routing.selected(), &mut selected)?;
        Ok(of_all_heads(&selected, routing, 1))
    }

    /// Returns the gates of all heads, `[N, H]`, 0 for shared heads. Call it after [`Self::select`], in a layer that
    /// routes.
    pub fn gates(&mut self) -> Result<Vec<f32>> {
        let (cx, .., buffers) = self.parts();
        let Some(routing) = &buffers.saved.attention.routing else {
            return Err(Error::invalid("the block routes no heads"));
        };
        let mut gates = vec![0f32; routing.tokens() * routing.columns()];
        cx.backend.download(routing.gates(), &mut gates)?;
        Ok(of_all_heads(&gates, routing, 0.0))
    }

    /// Returns the factors of all heads' outputs, `[N, H]`, 0 for heads that a token does not compute. Returns `None`
    /// if the router does not weigh heads. Call it after [`Self::select`].
    pub fn weights(&mut self) -> Result<Option<Vec<f32>>> {
        let (cx, .., buffers) = self.parts();
        let routing = buffers.saved.attention.routing.as_ref();
        let Some(routing) = routing.filter(|routing| routing.is_weighted()) else {
            return Ok(None);
        };
        let mut weights = vec![0f32; routing.tokens() * routing.heads().count];
        cx.backend.download(routing.weights(), &mut weights)?;
        Ok(Some(weights))
    }

    /// Returns the block's normed input, `[N, C]`, which learned routers read. Call it after [`Self::project`].
    pub fn normed(&mut self) -> Result<Vec<f32>> {
        let (cx, .., buffers) = self.parts();
        download_all(cx.backend, &buffers.recomputable.attention_norm.y)
    }

    /// Returns a learned router's logits of all heads, `[N, H]`. Call it after [`Self::project`].
    pub fn logits(&mut self) -> Result<Vec<f32>> {
        let Some(linear) = self.router.as_ref().and_then(RouterLayer::logits) else {
            return Err(Error::invalid("the block was allocated without a learned router"));
        };
        let (cx, _, _, BlockBuffers { saved, recomputable, .. }) = self.parts();
        let (shape, logits) = (cx.tokens.shape, &mut saved.attention.logits);
        linear.forward(&cx, recomputable.attention_norm.y.whole(), None, logits)?;
        let host = download(cx.backend, logits, shape.tokens() * linear.outputs)?;
        // The logits of two stages come after the logits of the heads.
        Ok(columns(&host, linear.outputs, 0..shape.heads))
    }

    /// Returns the outputs of all heads before the output projection, `[N, H D]`. Call it after [`Self::project`].
    pub fn attend(&mut self) -> Result<Vec<f32>> {
        let (cx, block, _, BlockBuffers { saved, recomputable, .. }) = self.parts();
        let attention = Attention { router: None, ..block.attention.clone() };
        let (saved, rotated) = (&mut saved.attention, &mut recomputable.rotated);
        let mut buffers = AttentionBuffers { saved, rotated, cache: None };
        let x = recomputable.attention_norm.y.whole();
        attention.rotation.forward(&cx, None, x, &mut buffers)?;
        let attended = attention.attend(&cx, buffers)?;
        Ok(attended.to_f32(cx.backend)?)
    }

    /// Computes the rest of the block on the residual stream `x`, `[N, C]`. The heads' outputs `attended`, `[N, H D]`,
    /// replace attention's.
    pub fn after_attention(&mut self, x: &[f32], attended: &[f32]) -> Result<BlockOutput> {
        let (cx, block, stream, BlockBuffers { saved, recomputable, scratch }) = self.parts();
        let SavedBlock { attention, h, gate_up } = saved;
        stream[0].whole_mut().fill_from_f32(cx.backend, x)?;
        attention.attended.view_mut(0..attended.len()).fill_from_f32(cx.backend, attended)?;
        let (input, output) = stream.split_at_mut(1);
        let sum = ResidualSum { x: &input[0], y: &mut *h };
        block.attention.project_output(&cx, attention, &mut scratch.gathered, sum)?;
        block.add_mlp(&cx, h, &mut recomputable.mlp_norm, gate_up, scratch, &mut output[0])?;
        Ok(BlockOutput {
            after_attention: download_all(cx.backend, h)?,
            output: download_all(cx.backend, &output[0])?,
        })
    }

    /// Returns the queries, `[N, H D]`, and keys, `[N, G D]`, that attention reads. Call it after [`Self::attend`].
    pub fn queries_and_keys(&mut self) -> Result<(Vec<f32>, Vec<f32>)> {
        let (cx, block, _, BlockBuffers { saved, recomputable, .. }) = self.parts();
        let shape = cx.tokens.shape;
        let qkv = block.attention.rotation.rotated(&saved.attention.qkv, &recomputable.rotated);
        let rows = download(cx.backend, qkv, shape.tokens() * shape.row())?;
        let (queries, keys) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let part = |range| columns(&rows, shape.row(), range);
        Ok((part(0..queries), part(queries..queries + keys)))
    }

    /// Computes the whole block on the residual stream `x`, `[N, C]`, with the attention of `moh`; dense without `moh`.
    pub fn forward(&mut self, x: &[f32], moh: Option<MohConfig>) -> Result<BlockOutput> {
        self.set_attention(moh)?;
        let (cx, block, stream, BlockBuffers { saved, recomputable, scratch }) = self.parts();
        stream[0].whole_mut().fill_from_f32(cx.backend, x)?;
        let (input, output) = stream.split_at_mut(1);
        let buffers = BlockBuffers { saved: &mut *saved, recomputable, scratch };
        block.forward(&cx, &input[0], buffers, None, &mut output[0])?;
        Ok(BlockOutput {
            after_attention: download_all(cx.backend, &saved.h)?,
            output: download_all(cx.backend, &output[0])?,
        })
    }
}

/// The embedding, the final norm and the head of a model alone, of f32 weights.
pub struct EndsPass<B: Backend> {
    model: Model<B>,
    activations: Activations<B>,
    sums: StepSums<B>,
}

impl<B: Backend> EndsPass<B> {
    /// Loads the ends of the model that `config` describes, for passes over `batch` sequences of
    /// `length` tokens; `source` writes each tensor by its name.
    pub fn new<E: From<Error>>(
        backend: B,
        config: &ModelConfig,
        batch: usize,
        length: usize,
        mut source: impl FnMut(&str, &mut [f32]) -> Result<(), E>,
    ) -> Result<Self, E> {
        let source = |segment: &Segment, values: &mut [f32]| source(&segment.name, values);
        let model = Model::new(backend, ElementType::F32, ends_alone(config), length, source)?;
        let activations = Activations::new(&model, pass_alone(batch, length))?;
        let sums = StepSums::new(&model.backend)?;
        Ok(EndsPass { model, activations, sums })
    }

    /// Returns the residual stream before the first block, `[N, C]`, of the tokens `ids`, `[N]`.
    pub fn embed(&mut self, ids: &[u32]) -> Result<Vec<f32>> {
        let EndsPass { model, activations, sums } = self;
        activations.upload(&model.backend, ids, ids, &[])?;
        model.forward(activations, sums)?;
        download_all(&model.backend, &activations.passes[0].stream[0])
    }

    /// Returns the sum of the cross-entropies of `targets`, `[N]`, in nats, given the residual stream `x` after the
    /// last block, `[N, C]`. Targets that are [`IGNORED`] do not count.
    pub fn cross_entropy(&mut self, x: &[f32], targets: &[u32]) -> Result<f64> {
        let EndsPass { model, activations, sums } = self;
        activations.upload(&model.backend, &vec![0; targets.len()], targets, &[])?;
        let Activations { shape, passes, head, .. } = &mut *activations;
        passes[0].stream[0].whole_mut().fill_from_f32(&model.backend, x)?;
        let cx = model.context(Tokens::whole(*shape));
        model.layers.final_norm.forward(&cx, &passes[0].stream[0], &mut head.normed)?;
        model.evaluate_head(activations, sums)?;
        Ok(sums.take(&model.backend)?.cross_entropy)
    }

    /// Returns the targets of windows of `length` tokens each. A token's target is the next token of its window; the
    /// last token has no target.
    pub fn targets(ids: &[u32], length: usize) -> Vec<u32> {
        let of_window = |window: &[u32]| [&window[1..], &[IGNORED]].concat();
        ids.chunks_exact(length).flat_map(of_window).collect()
    }
}

/// Returns a table of a routing, `[N, columns]`, with columns of `shared` for the leading shared heads: `[N, H]`.
fn of_all_heads<M: Memory, V: Copy>(table: &[V], routing: &Routing<M>, shared: V) -> Vec<V> {
    let first = vec![shared; routing.shared().leading()];
    table.chunks_exact(routing.columns()).flat_map(|row| [&first[..], row].concat()).collect()
}

/// Returns the columns `range` of a table with rows of `row` elements.
fn columns(table: &[f32], row: usize, range: Range<usize>) -> Vec<f32> {
    table.chunks_exact(row).flat_map(|row| &row[range.clone()]).copied().collect()
}

fn download<M: Memory>(memory: &M, from: &AnyBuffer<M>, len: usize) -> Result<Vec<f32>> {
    Ok(from.view(0..len).to_f32(memory)?)
}

fn download_all<M: Memory>(memory: &M, from: &AnyBuffer<M>) -> Result<Vec<f32>> {
    download(memory, from, from.len())
}
