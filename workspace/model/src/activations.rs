//! The buffers of a forward and backward pass, allocated once and reused in every step.
//!
//! A block saves two kinds of activations for its backward pass: those that are expensive to
//! recompute ([`Saved`]) and those that are cheap to recompute ([`Recomputable`]: norms and, in
//! Qwen3, rotated queries and keys). [`Recompute`] says which of them each block has for itself,
//! and which the blocks share and recompute. The MLP's activation is always shared: SwiGLU's
//! backward pass computes it beside the gradients.

use std::ops::Range;

use moh_kernels::cross_entropy::HeadShape;
use moh_kernels::rope::QkvShape;
use moh_kernels::router::Routing;
use moh_kernels::{Backend, Element, Memory, Purpose, Workspace};

use crate::Error;
use crate::model::Model;
use crate::pass_sizes::PassSizes;

/// The activations that the backward pass recomputes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recompute {
    /// Nothing.
    None,
    /// Norms.
    Cheap,
    /// All activations except the input of each block.
    Block,
}

/// The activations of a block that are expensive to recompute. With tensor parallelism H, G and I
/// are the rank's local sizes, and M is the number of the rank's own tokens, for rows of the
/// residual stream and of norms.
pub(crate) struct Saved<B: Memory, T: Element> {
    /// Queries, keys and values, `[N, (H + 2G) D]`: rotated, or the projection's output in
    /// architectures with query and key norms.
    pub qkv: B::Buffer<T>,
    /// Attention's output before the output projection, `[N, H D]`.
    pub attended: B::Buffer<T>,
    /// Log-sum-exp of attention's scores, `[N, H]`.
    pub log_sum_exp: B::Buffer<f32>,
    /// The residual stream after attention, `[M, C]`.
    pub residual: B::Buffer<T>,
    /// Gate and up projections, `[N, 2I]`.
    pub gate_up: B::Buffer<T>,
    /// The routing of a Mixture-of-Head block.
    pub routing: Option<Routing<B>>,
}

/// The activations of a block that are cheap to recompute.
pub(crate) struct Recomputable<B: Memory, T: Element> {
    /// Input of the query, key and value projections, `[M, C]`.
    pub input_normed: B::Buffer<T>,
    /// `[M]`.
    pub input_inv_rms: B::Buffer<f32>,
    /// Input of the MLP, `[M, C]`.
    pub post_normed: B::Buffer<T>,
    /// `[M]`.
    pub post_inv_rms: B::Buffer<f32>,
    /// With query and key norms: normed and rotated queries and keys, and values; `[N, (H + 2G)
    /// D]`.
    pub rotated: Option<B::Buffer<T>>,
}

impl<B: Backend, T: Element> Recomputable<B, T> {
    /// Queries, keys and values as attention reads them; `qkv` is the saved projection.
    pub fn rotated<'a>(&'a self, qkv: &'a B::Buffer<T>) -> &'a B::Buffer<T> {
        self.rotated.as_ref().unwrap_or(qkv)
    }
}

/// The saved activations of a pass's blocks.
pub(crate) struct Blocks<B: Memory, T: Element> {
    saved: Vec<Saved<B, T>>,
    recomputable: Vec<Recomputable<B, T>>,
}

/// Buffers shared by the blocks of all passes.
pub(crate) struct Shared<B: Memory, T: Element> {
    scratch: B::Buffer<T>,
    pub gathered: Option<B::Buffer<T>>,
}

/// The buffers of one block.
pub(crate) struct BlockBuffers<'a, B: Memory, T: Element> {
    pub layer: usize,
    pub saved: &'a mut Saved<B, T>,
    pub recomputable: &'a mut Recomputable<B, T>,
    /// Scratch shared by all blocks and by parts of a block that do not overlap: the input of the
    /// down projection and its gradient, `[N, I]`, and the gradient of queries, keys and values,
    /// `[N, (H + 2G) D]`.
    pub scratch: &'a mut B::Buffer<T>,
    /// With tensor parallelism: rows of the residual stream's width for all tokens, after an
    /// all-gather or before a reduce-scatter.
    pub gathered: &'a mut Option<B::Buffer<T>>,
}

/// Buffers of the backward pass, shared by the blocks.
pub(crate) struct Backward<B: Memory, T: Element> {
    /// Gradient of the residual stream, `[M, C]`.
    pub d_stream: B::Buffer<T>,
    /// Gradient of a norm's output, `[N, C]`, or of attention's, `[N, H D]`.
    pub d_branch: B::Buffer<T>,
    /// `<dO, O>`, `[N, H]`.
    pub delta: B::Buffer<f32>,
    /// With tensor parallelism: `<dO, O>` of the routed heads of all ranks, `[N, R]`.
    pub deltas: B::Buffer<f64>,
}

/// All buffers of passes over micro-batches: the saved activations of each pass in flight, and the
/// buffers that all passes share.
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

/// The chunk of a pass, and the slots of its activations until its backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PassSlot {
    /// The chunk.
    pub chunk: usize,
    /// The slot of the micro-batch's tokens, shared by the passes through all chunks.
    pub micro_batch: usize,
    /// The slot of the pass's saved activations.
    pub slot: usize,
}

/// A micro-batch's tokens on the device; all chunks of a stage read the same.
pub(crate) struct MicroBatch<B: Memory> {
    /// Empty on stages without the embedding.
    pub(crate) ids: B::Buffer<u32>,
    /// Empty on stages without the head.
    pub(crate) targets: B::Buffer<u32>,
    /// With a document mask, on every stage; otherwise empty.
    pub(crate) document_start: Option<B::Buffer<u32>>,
}

/// The saved activations of a micro-batch's pass through a chunk, sized for the largest chunk.
pub(crate) struct Pass<B: Memory, T: Element> {
    /// The residual stream before each block of the chunk and after its last block, `[M, C]` each.
    pub(crate) stream: Vec<B::Buffer<T>>,
    pub(crate) blocks: Blocks<B, T>,
}

/// The buffers of the head, whose backward pass immediately follows its forward pass.
pub(crate) struct Head<B: Memory, T: Element> {
    /// The head's input, `[M, C]`.
    pub normed: B::Buffer<T>,
    /// `[M]`.
    pub inv_rms: B::Buffer<f32>,
    pub scratch: B::Buffer<f32>,
    /// The sums that tensor-parallel ranks all-reduce.
    pub sums: B::Buffer<f64>,
}

/// The shape of a pass.
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
    /// Whether attention is limited to the token's own document.
    pub document_mask: bool,
}

impl PassShape {
    /// Tokens of a micro-batch.
    pub fn tokens(&self) -> usize {
        self.batch * self.length
    }
}

/// Micro-batches and passes in flight, that is, between their forward and backward passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slots {
    /// Micro-batches whose tokens are on the device.
    pub micro_batches: usize,
    /// Passes, each of a micro-batch through a chunk, with saved activations.
    pub passes: usize,
}

impl Slots {
    /// One pass at a time.
    pub const ONE: Slots = Slots { micro_batches: 1, passes: 1 };
}

impl<B: Backend, T: Element> Activations<B, T> {
    /// Allocates the buffers of one pass of `model` at a time.
    ///
    /// # Errors
    /// Fails if the device is out of memory.
    pub fn new(model: &Model<B, T>, pass: PassShape) -> Result<Self, Error> {
        Self::with_slots(&model.backend, &model.pass_sizes(pass)?, Slots::ONE)
    }
}

impl<M: Workspace, T: Element> Activations<M, T> {
    /// Allocates the buffers of passes of these sizes, and lets the device reserve its operators'
    /// scratch.
    ///
    /// # Errors
    /// Fails if the device is out of memory.
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

    /// Copies a micro-batch to the first slot on the device: ids and targets `[B*T]`, and with a
    /// document mask `document_start` `[B*T]`; only those that this stage reads.
    ///
    /// # Errors
    /// Fails if a length differs from the planned shape.
    pub fn upload(
        &mut self,
        memory: &M,
        ids: &[u32],
        targets: &[u32],
        document_start: &[u32],
    ) -> Result<(), Error> {
        self.upload_to(0, memory, ids, targets, document_start)
    }

    /// Whether passes of this stage read a micro-batch's tokens: stages between the first and the
    /// last one only do with a document mask.
    pub fn read_tokens(&self) -> bool {
        let filled = |buffer: &M::Buffer<u32>| M::len(buffer) > 0;
        self.micro_batches.iter().any(|tokens| {
            filled(&tokens.ids) || filled(&tokens.targets) || tokens.document_start.is_some()
        })
    }

    /// Copies a micro-batch to the given slot; see [`Activations::upload`].
    ///
    /// # Errors
    /// Fails if a length differs from the planned shape.
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
    /// Allocates the buffers; they are empty on stages without the head.
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
    /// Allocates the buffers of passes of these sizes.
    ///
    /// # Errors
    /// Fails if the device is out of memory.
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
    /// Allocates the buffers of `layers` blocks.
    ///
    /// # Errors
    /// Fails if the device is out of memory.
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

    /// The buffers of block `layer`, at index `slot` of its chunk: its own or shared.
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

    /// The residual stream after attention, in the order of the blocks.
    pub(crate) fn residuals(&self) -> impl Iterator<Item = &M::Buffer<T>> {
        self.saved.iter().map(|saved| &saved.residual)
    }

    /// The saved routings, in the order of the blocks; `None` if all layers are dense.
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
    /// Shape of a micro-batch's packed queries, keys and values of the local heads.
    pub fn qkv_shape(&self, batch: usize, length: usize) -> QkvShape {
        self.parallel.part().tensor.qkv_shape(&self.config, batch, length)
    }

    pub(crate) fn head_shape(&self, tokens: usize) -> HeadShape {
        self.parallel.part().tensor.head_shape(&self.config, tokens)
    }
}
