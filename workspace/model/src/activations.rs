//! The buffers of a forward and backward pass, planned once and reused in every step.
//!
//! What a block saves for its backward pass comes in two parts: what is costly to compute again
//! ([`Kept`]), and what is cheap ([`Cheap`]: norms). [`Recompute`] says which of them every block
//! has for itself and which the blocks share and compute again. The MLP's activation is shared
//! always: SwiGLU's backward pass yields it beside the gradients.

use std::ops::Range;

use moh_kernels::attention::AttentionShape;
use moh_kernels::cross_entropy::HeadShape;
use moh_kernels::rope::QkvShape;
use moh_kernels::router::Routing;
use moh_kernels::{Backend, Element, WorkingSet};

use crate::Error;
use crate::model::Model;

/// What the backward pass computes again instead of keeping it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recompute {
    /// Nothing.
    None,
    /// Norms.
    Cheap,
    /// Everything but the input of each block.
    Block,
}

/// What a block keeps that is costly to compute again. Of ranks that share tensors, H, G and I are
/// those held, and rows of the residual stream and of norms, written M, those of the rank's own tokens.
pub(crate) struct Kept<B: Backend, T: Element> {
    /// Queries, keys and values, `[N, (H + 2G) D]`: rotated, or the projection's output where queries and
    /// keys are normed before they are rotated.
    pub qkv: B::Buffer<T>,
    /// Attention's output before its projection, `[N, H D]`.
    pub attended: B::Buffer<T>,
    /// Of attention's scores, `[N, H]`.
    pub log_sum_exp: B::Buffer<f32>,
    /// The residual stream between attention and MLP, `[M, C]`.
    pub middle: B::Buffer<T>,
    /// Gate and up, `[N, 2I]`.
    pub gate_up: B::Buffer<T>,
    /// Of a Mixture-of-Head block.
    pub routing: Option<Routing<B>>,
}

/// What a block keeps that is cheap to compute again.
pub(crate) struct Cheap<B: Backend, T: Element> {
    /// Input of the query, key and value projection, `[M, C]`.
    pub input_normed: B::Buffer<T>,
    /// `[M]`.
    pub input_inv_rms: B::Buffer<f32>,
    /// Input of the MLP, `[M, C]`.
    pub post_normed: B::Buffer<T>,
    /// `[M]`.
    pub post_inv_rms: B::Buffer<f32>,
    /// Where queries and keys are normed: those, rotated, and values; `[N, (H + 2G) D]`.
    pub rotated: Option<B::Buffer<T>>,
}

impl<B: Backend, T: Element> Cheap<B, T> {
    /// Queries, keys and values as attention reads them, of which the block saved `qkv`.
    pub fn rotated<'a>(&'a self, qkv: &'a B::Buffer<T>) -> &'a B::Buffer<T> {
        self.rotated.as_ref().unwrap_or(qkv)
    }
}

/// What the blocks of a pass keep.
pub(crate) struct Blocks<B: Backend, T: Element> {
    kept: Vec<Kept<B, T>>,
    cheap: Vec<Cheap<B, T>>,
}

/// What blocks of all passes share.
pub(crate) struct Shared<B: Backend, T: Element> {
    wide: B::Buffer<T>,
    pub gathered: Option<B::Buffer<T>>,
}

/// The buffers of one block.
pub(crate) struct BlockBuffers<'a, B: Backend, T: Element> {
    pub layer: usize,
    pub kept: &'a mut Kept<B, T>,
    pub cheap: &'a mut Cheap<B, T>,
    /// What no block keeps and no two parts of a block need at the same time: the input of the
    /// down projection and its gradient, `[N, I]`, and the gradient of queries, keys and values,
    /// `[N, (H + 2G) D]`.
    pub wide: &'a mut B::Buffer<T>,
    /// Where ranks share tensors: rows of the residual stream's width for all tokens, gathered or to be
    /// added up.
    pub gathered: &'a mut Option<B::Buffer<T>>,
}

/// Scratch of the backward pass, shared by the blocks.
pub(crate) struct Backward<B: Backend, T: Element> {
    /// Gradient of the residual stream, `[M, C]`.
    pub d_stream: B::Buffer<T>,
    /// Gradient of a norm's output, `[N, C]`, or of attention's, `[N, H D]`.
    pub d_branch: B::Buffer<T>,
    /// `<dO, O>`, `[N, H]`.
    pub delta: B::Buffer<f32>,
    /// The same of all heads that are routed, `[N, R]`, where ranks share them.
    pub deltas: B::Buffer<f64>,
}

/// Every buffer that passes over micro-batches need: what is kept between a forward and its backward
/// pass, once for each pass in flight, and what all passes share.
pub struct Activations<B: Backend, T: Element> {
    pub(crate) shape: QkvShape,
    pub(crate) recompute: Recompute,
    /// A slot for each micro-batch in flight.
    pub(crate) micro_batches: Vec<MicroBatch<B>>,
    /// A slot for each pass in flight.
    pub(crate) passes: Vec<Pass<B, T>>,
    pub(crate) shared: Shared<B, T>,
    pub(crate) head: Head<B, T>,
    pub(crate) backward: Option<Backward<B, T>>,
}

/// Which of a rank's chunks a pass takes, and in which slots it is kept until its backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PassSlot {
    /// The chunk.
    pub chunk: usize,
    /// The slot of the micro-batch's tokens, which the passes through all chunks read.
    pub micro_batch: usize,
    /// The slot of what the pass keeps.
    pub slot: usize,
}

/// What a pass reads of a micro-batch's tokens; all of a stage's chunks read the same.
pub(crate) struct MicroBatch<B: Backend> {
    /// Empty on stages without the embedding.
    pub(crate) ids: B::Buffer<u32>,
    /// Empty on stages without the head.
    pub(crate) targets: B::Buffer<u32>,
    /// With a document mask, on every stage.
    pub(crate) document_start: Option<B::Buffer<u32>>,
}

/// What is kept of a micro-batch's pass through a chunk, with room for the largest one.
pub(crate) struct Pass<B: Backend, T: Element> {
    /// The residual stream before each block of the chunk and after its last one, `[M, C]` each.
    pub(crate) stream: Vec<B::Buffer<T>>,
    pub(crate) blocks: Blocks<B, T>,
}

/// The buffers of the head, whose backward pass follows its forward pass at once.
pub(crate) struct Head<B: Backend, T: Element> {
    /// The head's input, `[M, C]`.
    pub normed: B::Buffer<T>,
    /// `[M]`.
    pub inv_rms: B::Buffer<f32>,
    pub scratch: B::Buffer<f32>,
    /// What ranks that share the head add up.
    pub sums: B::Buffer<f64>,
}

/// What a pass is planned for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PassShape {
    /// Sequences of a micro-batch.
    pub batch: usize,
    /// Tokens of a sequence.
    pub length: usize,
    /// What the backward pass computes again.
    pub recompute: Recompute,
    /// Whether there is a backward pass.
    pub training: bool,
    /// Whether tokens see only their own document.
    pub document_mask: bool,
}

impl<B: Backend, T: Element> Activations<B, T> {
    /// Plans the buffers of one pass at a time.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn new(model: &Model<B, T>, pass: PassShape) -> Result<Self, Error> {
        Self::with_slots(model, pass, 1, 1)
    }

    /// As [`Activations::new`], with slots for so many micro-batches and passes in flight, that is
    /// between a forward pass and its backward pass.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn with_slots(
        model: &Model<B, T>,
        pass: PassShape,
        micro_batches: usize,
        passes: usize,
    ) -> Result<Self, Error> {
        let shape = model.qkv_shape(pass.batch, pass.length);
        let tokens = shape.tokens();
        let micro_batches =
            (0..micro_batches).map(|_| MicroBatch::new(model, tokens, pass.document_mask));
        let passes = (0..passes).map(|_| Pass::new(model, tokens, pass));
        model.backend.reserve::<T>(&WorkingSet {
            attention: model.attention_shape(&shape, pass.length),
            routed: model.routing_shape(tokens)?.is_some(),
            qk_norm: model.config.architecture.norms_queries_and_keys(),
            training: pass.training,
            width: model.config.hidden_size,
            tensors: model.layout.segments().count(),
        })?;
        Ok(Activations {
            shape,
            recompute: pass.recompute,
            micro_batches: micro_batches.collect::<Result<_, _>>()?,
            passes: passes.collect::<Result<_, _>>()?,
            shared: Shared::new(model, tokens)?,
            head: Head::new(model, tokens)?,
            backward: pass.training.then(|| Backward::new(model, tokens)).transpose()?,
        })
    }

    /// Sequences and tokens of the micro-batch.
    pub fn shape(&self) -> QkvShape {
        self.shape
    }

    /// Copies a micro-batch to the device, to the first slot: ids and targets `[B*T]`, and `document_start`
    /// `[B*T]` where the pass was planned with a document mask; of these, what this stage reads.
    ///
    /// # Errors
    /// When the lengths differ from the plan's.
    pub fn upload(
        &mut self,
        backend: &B,
        ids: &[u32],
        targets: &[u32],
        document_start: &[u32],
    ) -> Result<(), Error> {
        self.upload_to(0, backend, ids, targets, document_start)
    }

    /// Whether passes of this stage read anything of a micro-batch's tokens: those between the first
    /// and the last stage do with a document mask only.
    pub fn read_tokens(&self) -> bool {
        let filled = |buffer: &B::Buffer<u32>| B::len(buffer) > 0;
        self.micro_batches.iter().any(|tokens| {
            filled(&tokens.ids) || filled(&tokens.targets) || tokens.document_start.is_some()
        })
    }

    /// As [`Activations::upload`], to the slot of a micro-batch.
    ///
    /// # Errors
    /// When the lengths differ from the plan's.
    pub fn upload_to(
        &mut self,
        slot: usize,
        backend: &B,
        ids: &[u32],
        targets: &[u32],
        document_start: &[u32],
    ) -> Result<(), Error> {
        let tokens = &mut self.micro_batches[slot];
        if B::len(&tokens.ids) > 0 {
            backend.upload(ids, B::whole_mut(&mut tokens.ids))?;
        }
        if B::len(&tokens.targets) > 0 {
            backend.upload(targets, B::whole_mut(&mut tokens.targets))?;
        }
        if let Some(buffer) = &mut tokens.document_start {
            backend.upload(document_start, B::whole_mut(buffer))?;
        }
        Ok(())
    }
}

impl<B: Backend> MicroBatch<B> {
    fn new<T: Element>(
        model: &Model<B, T>,
        tokens: usize,
        document_mask: bool,
    ) -> Result<Self, Error> {
        let (backend, part) = (&model.backend, model.parallel.part());
        let allocate = |read: bool| backend.allocate(if read { tokens } else { 0 });
        Ok(MicroBatch {
            ids: allocate(part.first)?,
            targets: allocate(part.last)?,
            document_start: document_mask.then(|| allocate(true)).transpose()?,
        })
    }
}

impl<B: Backend, T: Element> Pass<B, T> {
    fn new(model: &Model<B, T>, tokens: usize, pass: PassShape) -> Result<Self, Error> {
        let backend = &model.backend;
        let width = model.token_share(tokens).part * model.config.hidden_size;
        let layers = model.parallel.part().chunks.iter().map(Range::len).max().unwrap_or(0);
        Ok(Pass {
            stream: (0..=layers).map(|_| backend.allocate(width)).collect::<Result<_, _>>()?,
            blocks: Blocks::new(model, tokens, pass.recompute, layers)?,
        })
    }
}

impl<B: Backend, T: Element> Head<B, T> {
    /// Buffers where the head is, else empty ones.
    fn new(model: &Model<B, T>, tokens: usize) -> Result<Self, Error> {
        let (backend, part) = (&model.backend, model.parallel.part());
        let shape = model.head_shape(tokens);
        let held = model.token_share(tokens).part;
        let sums = match part.tensor.ranks {
            1 => 0,
            ranks => backend.cross_entropy_sums(&shape, ranks),
        };
        let here = |len: usize| if part.last { len } else { 0 };
        Ok(Head {
            normed: backend.allocate(here(held * model.config.hidden_size))?,
            inv_rms: backend.allocate(here(held))?,
            scratch: backend.allocate(here(backend.cross_entropy_scratch(&shape)))?,
            sums: backend.allocate(here(sums))?,
        })
    }
}

impl<B: Backend, T: Element> Shared<B, T> {
    /// Buffers for passes of `model` over `tokens` tokens.
    ///
    /// # Errors
    /// When the device has no room.
    pub(crate) fn new(model: &Model<B, T>, tokens: usize) -> Result<Self, Error> {
        let (config, tensor) = (&model.config, model.parallel.part().tensor);
        let wide = tensor.mlp_width(config).max(model.qkv_shape(1, 1).row());
        let gathered = model.token_share(tokens).padded() * config.hidden_size;
        Ok(Shared {
            wide: model.backend.allocate(tokens * wide)?,
            gathered: model.is_shared().then(|| model.backend.allocate(gathered)).transpose()?,
        })
    }
}

impl<B: Backend, T: Element> Blocks<B, T> {
    /// Buffers for `layers` blocks of `model` on `tokens` tokens.
    ///
    /// # Errors
    /// When the device has no room.
    pub(crate) fn new(
        model: &Model<B, T>,
        tokens: usize,
        recompute: Recompute,
        layers: usize,
    ) -> Result<Self, Error> {
        let copies = |shared: bool| if shared { layers.min(1) } else { layers };
        let kept = 0..copies(recompute == Recompute::Block);
        let cheap = 0..copies(recompute != Recompute::None);
        Ok(Blocks {
            kept: kept.map(|_| Kept::new(model, tokens)).collect::<Result<_, _>>()?,
            cheap: cheap.map(|_| Cheap::new(model, tokens)).collect::<Result<_, _>>()?,
        })
    }

    /// The buffers of block `layer`, number `slot` of its chunk: its own or shared ones.
    pub(crate) fn of<'a>(
        &'a mut self,
        (slot, layer): (usize, usize),
        shared: &'a mut Shared<B, T>,
    ) -> BlockBuffers<'a, B, T> {
        let (kept, cheap) = (slot.min(self.kept.len() - 1), slot.min(self.cheap.len() - 1));
        BlockBuffers {
            layer,
            kept: &mut self.kept[kept],
            cheap: &mut self.cheap[cheap],
            wide: &mut shared.wide,
            gathered: &mut shared.gathered,
        }
    }

    /// The routings that are kept, in the order of the blocks; `None` where all layers are dense.
    pub(crate) fn routings(&self) -> impl Iterator<Item = Option<&Routing<B>>> {
        self.kept.iter().map(|kept| kept.routing.as_ref())
    }
}

impl<B: Backend, T: Element> Kept<B, T> {
    fn new(model: &Model<B, T>, tokens: usize) -> Result<Self, Error> {
        let (backend, config) = (&model.backend, &model.config);
        let share = model.parallel.part().tensor;
        let (heads, held) = (share.heads(config), model.token_share(tokens).part);
        let routing = model.routing_shape(tokens)?.map(|shape| Routing::new(backend, shape));
        Ok(Kept {
            qkv: backend.allocate(tokens * model.qkv_shape(1, 1).row())?,
            attended: backend.allocate(tokens * share.query_width(config))?,
            log_sum_exp: backend.allocate(tokens * heads.local())?,
            middle: backend.allocate(held * config.hidden_size)?,
            gate_up: backend.allocate(tokens * 2 * share.mlp_width(config))?,
            routing: routing.transpose()?,
        })
    }
}

impl<B: Backend, T: Element> Cheap<B, T> {
    fn new(model: &Model<B, T>, tokens: usize) -> Result<Self, Error> {
        let (backend, config) = (&model.backend, &model.config);
        let held = model.token_share(tokens).part;
        let rotated = config.architecture.norms_queries_and_keys();
        let row = model.qkv_shape(1, 1).row();
        Ok(Cheap {
            input_normed: backend.allocate(held * config.hidden_size)?,
            input_inv_rms: backend.allocate(held)?,
            post_normed: backend.allocate(held * config.hidden_size)?,
            post_inv_rms: backend.allocate(held)?,
            rotated: rotated.then(|| backend.allocate(tokens * row)).transpose()?,
        })
    }
}

impl<B: Backend, T: Element> Backward<B, T> {
    fn new(model: &Model<B, T>, tokens: usize) -> Result<Self, Error> {
        let (backend, config) = (&model.backend, &model.config);
        let (share, tokens_of) = (model.parallel.part().tensor, model.token_share(tokens));
        let heads = share.heads(config);
        let branch = tokens_of.padded() * config.hidden_size;
        let routing = model.routing_shape(tokens)?.filter(|_| share.ranks > 1);
        let deltas = routing.map_or(0, |shape| tokens * (heads.count - shape.shared_heads));
        Ok(Backward {
            d_stream: backend.allocate(tokens_of.part * config.hidden_size)?,
            d_branch: backend.allocate(branch.max(tokens * share.query_width(config)))?,
            delta: backend.allocate(tokens * heads.local())?,
            deltas: backend.allocate(deltas)?,
        })
    }
}

impl<B: Backend, T: Element> Model<B, T> {
    /// Shape of a micro-batch's packed queries, keys and values of the heads that are held.
    pub fn qkv_shape(&self, batch: usize, length: usize) -> QkvShape {
        QkvShape {
            batch,
            length,
            heads: self.parallel.part().tensor.heads(&self.config).local(),
            kv_heads: self.parallel.part().tensor.key_value_heads(&self.config),
            head_dim: self.config.head_dim,
        }
    }

    pub(crate) fn attention_shape(&self, qkv: &QkvShape, key_length: usize) -> AttentionShape {
        AttentionShape {
            batch: qkv.batch,
            query_length: qkv.length,
            key_length,
            heads: qkv.heads,
            kv_heads: qkv.kv_heads,
            head_dim: qkv.head_dim,
            query_stride: qkv.row(),
        }
    }

    pub(crate) fn head_shape(&self, tokens: usize) -> HeadShape {
        let tensor = self.parallel.part().tensor;
        let rows = tensor.vocabulary(&self.config);
        HeadShape::of_rows(tokens, self.config.hidden_size, rows, tensor.ranks)
    }
}
