//! The buffers of a forward and backward pass, planned once and reused in every step.
//!
//! What a block saves for its backward pass comes in two parts: what is costly to compute again
//! ([`Saved`]), and what is cheap ([`Recomputable`]: norms). [`Recompute`] says which of them every block
//! has for itself and which the blocks share and compute again. The MLP's activation is shared
//! always: SwiGLU's backward pass yields it beside the gradients.

use std::ops::Range;

use moh_kernels::cross_entropy::HeadShape;
use moh_kernels::rope::QkvShape;
use moh_kernels::router::Routing;
use moh_kernels::{Backend, Element, Memory, Purpose, Workspace};

use crate::Error;
use crate::model::Model;
use crate::pass_sizes::PassSizes;

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
pub(crate) struct Saved<B: Memory, T: Element> {
    /// Queries, keys and values, `[N, (H + 2G) D]`: rotated, or the projection's output where queries and
    /// keys are normed before they are rotated.
    pub qkv: B::Buffer<T>,
    /// Attention's output before its projection, `[N, H D]`.
    pub attended: B::Buffer<T>,
    /// Of attention's scores, `[N, H]`.
    pub log_sum_exp: B::Buffer<f32>,
    /// The residual stream between attention and MLP, `[M, C]`.
    pub residual: B::Buffer<T>,
    /// Gate and up, `[N, 2I]`.
    pub gate_up: B::Buffer<T>,
    /// Of a Mixture-of-Head block.
    pub routing: Option<Routing<B>>,
}

/// What a block keeps that is cheap to compute again.
pub(crate) struct Recomputable<B: Memory, T: Element> {
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

impl<B: Backend, T: Element> Recomputable<B, T> {
    /// Queries, keys and values as attention reads them, of which the block saved `qkv`.
    pub fn rotated<'a>(&'a self, qkv: &'a B::Buffer<T>) -> &'a B::Buffer<T> {
        self.rotated.as_ref().unwrap_or(qkv)
    }
}

/// What the blocks of a pass keep.
pub(crate) struct Blocks<B: Memory, T: Element> {
    saved: Vec<Saved<B, T>>,
    recomputable: Vec<Recomputable<B, T>>,
}

/// What blocks of all passes share.
pub(crate) struct Shared<B: Memory, T: Element> {
    scratch: B::Buffer<T>,
    pub gathered: Option<B::Buffer<T>>,
}

/// The buffers of one block.
pub(crate) struct BlockBuffers<'a, B: Memory, T: Element> {
    pub layer: usize,
    pub saved: &'a mut Saved<B, T>,
    pub recomputable: &'a mut Recomputable<B, T>,
    /// What no block keeps and no two parts of a block need at the same time: the input of the
    /// down projection and its gradient, `[N, I]`, and the gradient of queries, keys and values,
    /// `[N, (H + 2G) D]`.
    pub scratch: &'a mut B::Buffer<T>,
    /// Where ranks share tensors: rows of the residual stream's width for all tokens, gathered or to be
    /// added up.
    pub gathered: &'a mut Option<B::Buffer<T>>,
}

/// Scratch of the backward pass, shared by the blocks.
pub(crate) struct Backward<B: Memory, T: Element> {
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
pub struct Activations<B: Memory, T: Element> {
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
pub(crate) struct MicroBatch<B: Memory> {
    /// Empty on stages without the embedding.
    pub(crate) ids: B::Buffer<u32>,
    /// Empty on stages without the head.
    pub(crate) targets: B::Buffer<u32>,
    /// With a document mask, on every stage.
    pub(crate) document_start: Option<B::Buffer<u32>>,
}

/// What is kept of a micro-batch's pass through a chunk, with room for the largest one.
pub(crate) struct Pass<B: Memory, T: Element> {
    /// The residual stream before each block of the chunk and after its last one, `[M, C]` each.
    pub(crate) stream: Vec<B::Buffer<T>>,
    pub(crate) blocks: Blocks<B, T>,
}

/// The buffers of the head, whose backward pass follows its forward pass at once.
pub(crate) struct Head<B: Memory, T: Element> {
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

impl PassShape {
    /// Tokens of a micro-batch.
    pub fn tokens(&self) -> usize {
        self.batch * self.length
    }
}

/// Micro-batches and passes in flight, that is between a forward pass and its backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slots {
    /// Micro-batches whose tokens are kept.
    pub micro_batches: usize,
    /// Passes, each of a micro-batch through a chunk, of which something is kept.
    pub passes: usize,
}

impl Slots {
    /// One pass at a time.
    pub const ONE: Slots = Slots { micro_batches: 1, passes: 1 };
}

impl<B: Backend, T: Element> Activations<B, T> {
    /// Plans the buffers of one pass of `model` at a time.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn new(model: &Model<B, T>, pass: PassShape) -> Result<Self, Error> {
        Self::with_slots(&model.backend, &model.pass_sizes(pass)?, Slots::ONE)
    }
}

impl<M: Workspace, T: Element> Activations<M, T> {
    /// Plans the buffers of passes of these sizes, and lets the device reserve what operators use beside
    /// their arguments.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn with_slots(memory: &M, sizes: &PassSizes<'_>, slots: Slots) -> Result<Self, Error> {
        memory.reserve::<T>(&sizes.working_set())?;
        let saved = || {
            let micro_batches = (0..slots.micro_batches).map(|_| MicroBatch::new(memory, sizes));
            let micro_batches = micro_batches.collect::<Result<_, Error>>()?;
            let passes = (0..slots.passes).map(|_| Pass::new(memory, sizes));
            Ok::<_, Error>((micro_batches, passes.collect::<Result<_, Error>>()?))
        };
        let (micro_batches, passes) = memory.for_purpose(Purpose::Activations, saved)?;
        let backward =
            || memory.for_purpose(Purpose::ActivationGradients, || Backward::new(memory, sizes));
        Ok(Activations {
            shape: sizes.qkv(),
            recompute: sizes.pass.recompute,
            micro_batches,
            passes,
            shared: Shared::new(memory, sizes)?,
            head: Head::new(memory, sizes)?,
            backward: sizes.pass.training.then(backward).transpose()?,
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
        memory: &M,
        ids: &[u32],
        targets: &[u32],
        document_start: &[u32],
    ) -> Result<(), Error> {
        self.upload_to(0, memory, ids, targets, document_start)
    }

    /// Whether passes of this stage read anything of a micro-batch's tokens: those between the first
    /// and the last stage do with a document mask only.
    pub fn read_tokens(&self) -> bool {
        let filled = |buffer: &M::Buffer<u32>| M::len(buffer) > 0;
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
        memory: &M,
        ids: &[u32],
        targets: &[u32],
        document_start: &[u32],
    ) -> Result<(), Error> {
        let tokens = &mut self.micro_batches[slot];
        if M::len(&tokens.ids) > 0 {
            memory.upload(ids, M::whole_mut(&mut tokens.ids))?;
        }
        if M::len(&tokens.targets) > 0 {
            memory.upload(targets, M::whole_mut(&mut tokens.targets))?;
        }
        if let Some(buffer) = &mut tokens.document_start {
            memory.upload(document_start, M::whole_mut(buffer))?;
        }
        Ok(())
    }
}

impl<M: Memory> MicroBatch<M> {
    fn new(memory: &M, sizes: &PassSizes<'_>) -> Result<Self, Error> {
        let part = sizes.part;
        let allocate = |read: bool| memory.allocate(if read { sizes.tokens() } else { 0 });
        Ok(MicroBatch {
            ids: allocate(part.first)?,
            targets: allocate(part.last)?,
            document_start: sizes.pass.document_mask.then(|| allocate(true)).transpose()?,
        })
    }
}

impl<M: Memory, T: Element> Pass<M, T> {
    fn new(memory: &M, sizes: &PassSizes<'_>) -> Result<Self, Error> {
        let layers = sizes.part.chunks.iter().map(Range::len).max().unwrap_or(0);
        let stream = (0..=layers).map(|_| memory.allocate(sizes.stream()));
        Ok(Pass {
            stream: stream.collect::<Result<_, _>>()?,
            blocks: Blocks::new(memory, sizes, layers)?,
        })
    }
}

impl<M: Workspace, T: Element> Head<M, T> {
    /// Buffers where the head is, else empty ones.
    fn new(memory: &M, sizes: &PassSizes<'_>) -> Result<Self, Error> {
        let shape = sizes.head();
        let sums = match sizes.share().ranks {
            1 => 0,
            ranks => memory.cross_entropy_sums(&shape, ranks),
        };
        let here = |len: usize| if sizes.part.last { len } else { 0 };
        let (stream, local) = (here(sizes.stream()), here(sizes.token_share().part));
        let (scratch, sums) = (here(memory.cross_entropy_scratch(&shape)), here(sums));
        let norms = || Ok::<_, Error>((memory.allocate(stream)?, memory.allocate(local)?));
        let logits = || Ok::<_, Error>((memory.allocate(scratch)?, memory.allocate(sums)?));
        let (normed, inv_rms) = memory.for_purpose(Purpose::Activations, norms)?;
        let (scratch, sums) = memory.for_purpose(Purpose::Logits, logits)?;
        Ok(Head { normed, inv_rms, scratch, sums })
    }
}

impl<M: Memory, T: Element> Shared<M, T> {
    /// Buffers for passes of these sizes.
    ///
    /// # Errors
    /// When the device has no room.
    pub(crate) fn new(memory: &M, sizes: &PassSizes<'_>) -> Result<Self, Error> {
        let share = sizes.share();
        let scratch = sizes.tokens() * share.mlp_width(sizes.config).max(sizes.qkv().row());
        let rows = sizes.token_share().padded() * sizes.config.hidden_size;
        let gathered = || memory.for_purpose(Purpose::Gathered, || memory.allocate(rows));
        Ok(Shared {
            scratch: memory.for_purpose(Purpose::Activations, || memory.allocate(scratch))?,
            gathered: (share.ranks > 1).then(gathered).transpose()?,
        })
    }
}

impl<M: Memory, T: Element> Blocks<M, T> {
    /// Buffers for `layers` blocks.
    ///
    /// # Errors
    /// When the device has no room.
    pub(crate) fn new(memory: &M, sizes: &PassSizes<'_>, layers: usize) -> Result<Self, Error> {
        let recompute = sizes.pass.recompute;
        let copies = |shared: bool| if shared { layers.min(1) } else { layers };
        let saved = 0..copies(recompute == Recompute::Block);
        let recomputable = 0..copies(recompute != Recompute::None);
        Ok(Blocks {
            saved: saved.map(|_| Saved::new(memory, sizes)).collect::<Result<_, _>>()?,
            recomputable: recomputable
                .map(|_| Recomputable::new(memory, sizes))
                .collect::<Result<_, _>>()?,
        })
    }

    /// The buffers of block `layer`, number `slot` of its chunk: its own or shared ones.
    pub(crate) fn of<'a>(
        &'a mut self,
        (slot, layer): (usize, usize),
        shared: &'a mut Shared<M, T>,
    ) -> BlockBuffers<'a, M, T> {
        let (saved, recomputable) =
            (slot.min(self.saved.len() - 1), slot.min(self.recomputable.len() - 1));
        BlockBuffers {
            layer,
            saved: &mut self.saved[saved],
            recomputable: &mut self.recomputable[recomputable],
            scratch: &mut shared.scratch,
            gathered: &mut shared.gathered,
        }
    }

    /// The routings that are kept, in the order of the blocks; `None` where all layers are dense.
    pub(crate) fn routings(&self) -> impl Iterator<Item = Option<&Routing<M>>> {
        self.saved.iter().map(|saved| saved.routing.as_ref())
    }
}

impl<M: Memory, T: Element> Saved<M, T> {
    fn new(memory: &M, sizes: &PassSizes<'_>) -> Result<Self, Error> {
        let (share, config, tokens) = (sizes.share(), sizes.config, sizes.tokens());
        Ok(Saved {
            qkv: memory.allocate(tokens * sizes.qkv().row())?,
            attended: memory.allocate(tokens * share.query_width(config))?,
            log_sum_exp: memory.allocate(tokens * share.heads(config).local())?,
            residual: memory.allocate(sizes.stream())?,
            gate_up: memory.allocate(tokens * 2 * share.mlp_width(config))?,
            routing: sizes.routing.map(|shape| Routing::new(memory, shape)).transpose()?,
        })
    }
}

impl<M: Memory, T: Element> Recomputable<M, T> {
    fn new(memory: &M, sizes: &PassSizes<'_>) -> Result<Self, Error> {
        let (stream, local) = (sizes.stream(), sizes.token_share().part);
        let rotated = sizes.config.architecture.norms_queries_and_keys();
        Ok(Recomputable {
            input_normed: memory.allocate(stream)?,
            input_inv_rms: memory.allocate(local)?,
            post_normed: memory.allocate(stream)?,
            post_inv_rms: memory.allocate(local)?,
            rotated: rotated
                .then(|| memory.allocate(sizes.qkv().tokens() * sizes.qkv().row()))
                .transpose()?,
        })
    }
}

impl<M: Memory, T: Element> Backward<M, T> {
    fn new(memory: &M, sizes: &PassSizes<'_>) -> Result<Self, Error> {
        let (share, config, tokens) = (sizes.share(), sizes.config, sizes.tokens());
        let heads = share.heads(config);
        let branch = sizes.token_share().padded() * config.hidden_size;
        let routing = sizes.routing.filter(|_| share.ranks > 1);
        let deltas = routing.map_or(0, |shape| tokens * (heads.count - shape.shared_heads));
        Ok(Backward {
            d_stream: memory.allocate(sizes.stream())?,
            d_branch: memory.allocate(branch.max(tokens * share.query_width(config)))?,
            delta: memory.allocate(tokens * heads.local())?,
            deltas: memory.allocate(deltas)?,
        })
    }
}

impl<B: Backend, T: Element> Model<B, T> {
    /// Shape of a micro-batch's packed queries, keys and values of the heads that are held.
    pub fn qkv_shape(&self, batch: usize, length: usize) -> QkvShape {
        self.parallel.part().tensor.qkv_shape(&self.config, batch, length)
    }

    pub(crate) fn head_shape(&self, tokens: usize) -> HeadShape {
        self.parallel.part().tensor.head_shape(&self.config, tokens)
    }
}
