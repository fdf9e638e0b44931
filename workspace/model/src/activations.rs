//! The buffers of a forward and backward pass, allocated once and reused in every step.
//!
//! A block saves two kinds of activations for its backward pass: activations that are expensive to recompute
//! ([`SavedBlock`]), and activations that are cheap to recompute ([`RecomputableBlock`]: norms and, in Qwen3, rotated
//! queries and keys). [`Recompute`] selects the kinds that blocks share and recompute. The MLP's activation is always
//! shared: SwiGLU's backward pass computes it together with the gradients.

use std::ops::Range;

use moh_kernels::router::Routing;
use moh_kernels::{AnyBuffer, Backend, Memory, Purpose, QkvShape, Workspace, for_element};
use serde::{Deserialize, Serialize};

use crate::layers::{
    ActivationGradients, BlockBuffers, HeadBuffers, RecomputableBlock, SavedBlock, Scratch, Tokens,
};
use crate::{Error, Model, PassRole, PassSizes, Result};

/// The activations that the backward pass recomputes, as a recipe names them; `docs/plan.md` lists the
/// bytes of each setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Nothing.
    None,
    /// Norms: a sixth of the activations, at a cost in time below the measurement noise.
    #[default]
    #[serde(rename = "cheap")]
    Norms,
    /// All activations except the input of each block: one more forward pass.
    Block,
}

/// The saved activations of a pass's blocks.
pub(crate) struct Blocks<B: Memory> {
    pub(crate) saved: Vec<SavedBlock<B>>,
    recomputable: Vec<RecomputableBlock<B>>,
}

/// All buffers of passes over micro-batches: the saved activations of each pass in flight, and the
/// buffers that all passes share.
pub struct Activations<B: Memory> {
    pub(crate) shape: QkvShape,
    pub(crate) recompute: Recompute,
    pub(crate) role: PassRole,
    pub(crate) micro_batches: Vec<MicroBatch<B>>,
    pub(crate) passes: Vec<PassActivations<B>>,
    pub(crate) scratch: Scratch<B>,
    pub(crate) head: HeadBuffers<B>,
    /// Only in training.
    pub(crate) gradients: Option<ActivationGradients<B>>,
}

/// The chunk of a pass, and the slots that store its activations until its backward pass.
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
pub(crate) struct PassActivations<B: Memory> {
    /// The residual stream before each block of the chunk and after its last block, `[M, C]` each. A teacher has two
    /// buffers in turn.
    pub(crate) stream: Vec<AnyBuffer<B>>,
    pub(crate) blocks: Blocks<B>,
}

/// The shape of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PassShape {
    /// Sequences of a micro-batch.
    pub batch: usize,
    /// Tokens of a sequence.
    pub length: usize,
    /// The activations that the backward pass recomputes.
    pub recompute: Recompute,
    /// Whether there is a backward pass.
    pub training: bool,
    /// Whether attention is limited to the token's own document.
    pub document_mask: bool,
}

impl PassShape {
    /// Creates a pass without a backward pass or a document mask, over `batch` sequences of `length` tokens. Its blocks
    /// share the buffers that `recompute` names.
    pub fn evaluation(batch: usize, length: usize, recompute: Recompute) -> Self {
        PassShape { batch, length, recompute, training: false, document_mask: false }
    }

    /// Returns the tokens of a micro-batch.
    pub fn tokens(&self) -> usize {
        self.batch * self.length
    }
}

/// Micro-batches and passes in flight, that is, between their forward and backward passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slots {
    /// Micro-batches with tokens on the device.
    pub micro_batches: usize,
    /// Passes, each of a micro-batch through a chunk, with saved activations.
    pub passes: usize,
}

impl Slots {
    /// One pass at a time.
    pub const ONE: Slots = Slots { micro_batches: 1, passes: 1 };
}

impl<B: Backend> Activations<B> {
    /// Allocates the buffers of one pass of `model` at a time.
    pub fn new(model: &Model<B>, pass: PassShape) -> Result<Self> {
        Self::with_slots(&model.backend, &model.pass_sizes(pass)?, Slots::ONE)
    }
}

impl<M: Workspace> Activations<M> {
    /// Allocates the buffers of passes of these sizes, and makes the device reserve scratch for its operators.
    pub fn with_slots(memory: &M, sizes: &PassSizes<'_>, slots: Slots) -> Result<Self> {
        for_element!(T: sizes.element => memory.reserve::<T>(&sizes.working_set()))?;
        let saved = || {
            let micro_batches = (0..slots.micro_batches).map(|_| MicroBatch::new(memory, sizes));
            let micro_batches = micro_batches.collect::<Result<_>>()?;
            let passes = (0..slots.passes).map(|_| PassActivations::new(memory, sizes));
            Ok::<_, Error>((micro_batches, passes.collect::<Result<_>>()?))
        };
        let (micro_batches, passes) = memory.for_purpose(Purpose::Activations, saved)?;
        let gradients = || ActivationGradients::new(memory, sizes);
        let gradients = || memory.for_purpose(Purpose::ActivationGradients, gradients);
        Ok(Activations {
            shape: sizes.qkv(),
            recompute: sizes.pass.recompute,
            role: sizes.role,
            micro_batches,
            passes,
            scratch: Scratch::new(memory, sizes)?,
            head: HeadBuffers::new(memory, sizes)?,
            gradients: sizes.pass.training.then(gradients).transpose()?,
        })
    }

    /// Allocates the buffers of one pass of a teacher at a time, over the micro-batches of a student. The student's
    /// passes have the shape of `sizes`.
    pub fn of_teacher(memory: &M, sizes: PassSizes<'_>) -> Result<Self> {
        let pass = PassShape { recompute: Recompute::Block, training: false, ..sizes.pass };
        // The teacher reads the student's tokens.
        let slots = Slots { micro_batches: 0, passes: 1 };
        Self::with_slots(memory, &sizes.of_pass(pass).in_role(PassRole::Teacher), slots)
    }

    /// Returns the sequences and tokens of the micro-batch.
    pub fn shape(&self) -> QkvShape {
        self.shape
    }

    /// Copies a micro-batch to the first slot on the device: ids and targets `[B*T]`, and with a document mask
    /// `document_start` `[B*T]`. Skips the inputs that this stage does not read.
    pub fn upload(
        &mut self,
        memory: &M,
        ids: &[u32],
        targets: &[u32],
        document_start: &[u32],
    ) -> Result<()> {
        self.upload_to(0, memory, ids, targets, document_start)
    }

    /// Returns whether passes of this stage read a micro-batch's tokens. Stages between the first and the last stage
    /// read them only with a document mask.
    pub fn read_tokens(&self) -> bool {
        let filled = |buffer: &M::Buffer<u32>| M::len(buffer) > 0;
        self.micro_batches.iter().any(|tokens| {
            filled(&tokens.ids) || filled(&tokens.targets) || tokens.document_start.is_some()
        })
    }

    /// Copies a micro-batch to the given slot; see [`Activations::upload`].
    pub fn upload_to(
        &mut self,
        slot: usize,
        memory: &M,
        ids: &[u32],
        targets: &[u32],
        document_start: &[u32],
    ) -> Result<()> {
        let tokens = &mut self.micro_batches[slot];
        for (source, buffer) in [(ids, &mut tokens.ids), (targets, &mut tokens.targets)] {
            if M::len(buffer) > 0 {
                memory.upload(source, M::whole_mut(buffer))?;
            }
        }
        if let Some(buffer) = &mut tokens.document_start {
            memory.upload(document_start, M::whole_mut(buffer))?;
        }
        Ok(())
    }
}

impl<B: Backend> MicroBatch<B> {
    /// Returns the layers' view of the micro-batch in passes of this shape.
    pub(crate) fn tokens(&self, shape: QkvShape) -> Tokens<'_, B> {
        Tokens { document_start: self.document_start.as_ref(), ..Tokens::whole(shape) }
    }
}

impl<M: Memory> MicroBatch<M> {
    fn new(memory: &M, sizes: &PassSizes<'_>) -> Result<Self> {
        let part = sizes.part;
        let allocate = |read: bool| memory.allocate(if read { sizes.tokens() } else { 0 });
        Ok(MicroBatch {
            ids: allocate(part.first)?,
            targets: allocate(part.last)?,
            document_start: sizes.pass.document_mask.then(|| allocate(true)).transpose()?,
        })
    }
}

/// The residual stream before and after a block, and the blocks of the chunk.
type AroundBlock<'a, M> = (&'a AnyBuffer<M>, &'a mut AnyBuffer<M>, &'a mut Blocks<M>);

impl<M: Memory> PassActivations<M> {
    /// Returns the residual stream before and after block `index` of the chunk, and the blocks.
    pub(crate) fn around(&mut self, index: usize) -> AroundBlock<'_, M> {
        let count = self.stream.len();
        let (before, after) = (index % count, (index + 1) % count);
        let (low, high) = self.stream.split_at_mut(before.max(after));
        let (input, output) = match before < after {
            true => (&low[before], &mut high[0]),
            false => (&high[0], &mut low[after]),
        };
        (input, output, &mut self.blocks)
    }

    /// Returns the residual stream after a chunk of `layers` blocks.
    pub(crate) fn output(&self, layers: usize) -> &AnyBuffer<M> {
        &self.stream[layers % self.stream.len()]
    }

    fn new(memory: &M, sizes: &PassSizes<'_>) -> Result<Self> {
        let layers = sizes.part.chunks.iter().map(Range::len).max().unwrap_or(0);
        let streams = if sizes.role == PassRole::Teacher { 2 } else { layers + 1 };
        let stream = (0..streams).map(|_| sizes.zeros(memory, sizes.stream()));
        Ok(PassActivations {
            stream: stream.collect::<Result<_, _>>()?,
            blocks: Blocks::new(memory, sizes, layers)?,
        })
    }
}

impl<M: Memory> Blocks<M> {
    /// Allocates the buffers of `layers` blocks.
    pub(crate) fn new(memory: &M, sizes: &PassSizes<'_>, layers: usize) -> Result<Self> {
        let recompute = sizes.pass.recompute;
        let copies = |shared: bool| if shared { layers.min(1) } else { layers };
        let saved = 0..copies(recompute == Recompute::Block);
        let recomputable = 0..copies(recompute != Recompute::None);
        Ok(Blocks {
            saved: saved.map(|_| SavedBlock::new(memory, sizes)).collect::<Result<_, _>>()?,
            recomputable: recomputable
                .map(|_| RecomputableBlock::new(memory, sizes))
                .collect::<Result<_, _>>()?,
        })
    }

    /// Returns the buffers of the block at index `slot` of its chunk: its own or shared buffers.
    pub(crate) fn buffers<'a>(
        &'a mut self,
        slot: usize,
        scratch: &'a mut Scratch<M>,
    ) -> BlockBuffers<'a, M> {
        let Blocks { saved, recomputable } = self;
        let (own, own_recomputable) = (slot.min(saved.len() - 1), slot.min(recomputable.len() - 1));
        let (saved, recomputable) = (&mut saved[own], &mut recomputable[own_recomputable]);
        BlockBuffers { saved, recomputable, scratch }
    }

    /// Returns the routing of the block at index `slot` of its chunk.
    pub(crate) fn routing(&self, slot: usize) -> Option<&Routing<M>> {
        self.saved[slot.min(self.saved.len() - 1)].attention.routing.as_ref()
    }

    /// Returns the saved routings, in the order of the blocks; `None` if all layers are dense.
    pub(crate) fn routings(&self) -> impl Iterator<Item = Option<&Routing<M>>> {
        self.saved.iter().map(|saved| saved.attention.routing.as_ref())
    }
}
