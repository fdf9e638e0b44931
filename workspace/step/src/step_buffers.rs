//! The buffers of a rank's steps, computed from their sizes alone.

use half::bf16;
use moh_kernels::{Element, ElementType, Memory, Purpose, Scalar, Workspace};
use moh_model::{Activations, FlatBuffers, ModelLayout, PassSizes, Slots, StepSums};

use crate::Result;
use crate::block_norms::SquaredBlockNorms;

/// The parameters that determine the sizes.
#[derive(Debug, Clone, Copy)]
pub struct StepSizes<'a> {
    /// The tensors of the rank's part.
    pub layout: &'a ModelLayout,
    /// A pass of a micro-batch.
    pub passes: PassSizes<'a>,
    /// Passes in flight.
    pub slots: Slots,
    /// Ranks that share the micro-batches.
    pub data_ranks: usize,
    /// Type in which the data ranks exchange f32 gradients.
    pub reduce: ElementType,
}

/// The buffers of a rank's steps.
pub struct StepBuffers<M: Memory, T: Element, G: Element> {
    pub(crate) activations: Activations<M, T>,
    pub(crate) gradients: FlatBuffers<M, G>,
    pub(crate) rounded: Rounded<M>,
    pub(crate) sums: StepSums<M>,
    pub(crate) block_norms: SquaredBlockNorms<M>,
}

impl<M: Workspace, T: Element, G: Element> StepBuffers<M, T, G> {
    /// Allocates the buffers, filled with zeros.
    pub fn new(memory: &M, sizes: &StepSizes<'_>) -> Result<Self> {
        let StepSizes { layout, passes, slots, data_ranks, reduce } = *sizes;
        let gradients = || FlatBuffers::zeros(memory, layout);
        Ok(StepBuffers {
            gradients: memory.for_purpose(Purpose::Gradients, gradients)?,
            rounded: Rounded::new::<G>(memory, layout, data_ranks, reduce)?,
            activations: Activations::with_slots(memory, &passes, slots)?,
            sums: StepSums::new(memory)?,
            block_norms: SquaredBlockNorms::new(memory, layout)?,
        })
    }
}

/// Copies of the gradients in bf16 for their reduce-scatter; `None` for gradients that are not rounded.
pub(crate) struct Rounded<M: Memory> {
    pub copies: Vec<Option<M::Buffer<bf16>>>,
}

impl<M: Memory> Rounded<M> {
    /// Allocates the copies for gradients of type `G`. Gradients are rounded if they are f32, `reduce` is
    /// bf16 and there are several data ranks.
    pub(crate) fn new<G: Element>(
        memory: &M,
        layout: &ModelLayout,
        data_ranks: usize,
        reduce: ElementType,
    ) -> Result<Self, moh_model::Error> {
        let rounds = data_ranks > 1 && reduce == ElementType::BF16 && G::DTYPE == f32::DTYPE;
        let copy = |len| rounds.then(|| memory.allocate(len)).transpose();
        let copies = || layout.flats.iter().map(|flat| copy(flat.len)).collect::<Result<_, _>>();
        Ok(Rounded { copies: memory.for_purpose(Purpose::RoundedGradients, copies)? })
    }
}
