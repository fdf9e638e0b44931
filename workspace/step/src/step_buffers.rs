//! The buffers of a rank's steps, computed from their sizes alone.

use moh_kernels::{AnyBuffer, ElementType, Memory, Purpose, Workspace};
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
    /// Type of the gradients of weights.
    pub gradients: ElementType,
    /// Type in which the data ranks exchange f32 gradients.
    pub reduce: ElementType,
}

/// The buffers of a rank's steps.
pub struct StepBuffers<M: Memory> {
    pub(crate) activations: Activations<M>,
    pub(crate) gradients: FlatBuffers<M>,
    pub(crate) rounded: Rounded<M>,
    pub(crate) sums: StepSums<M>,
    pub(crate) block_norms: SquaredBlockNorms<M>,
}

impl<M: Workspace> StepBuffers<M> {
    /// Allocates the buffers, filled with zeros.
    pub fn new(memory: &M, sizes: &StepSizes<'_>) -> Result<Self> {
        let StepSizes { layout, passes, slots, data_ranks, gradients, reduce } = *sizes;
        let of_weights = || FlatBuffers::zeros(memory, gradients, layout);
        Ok(StepBuffers {
            gradients: memory.for_purpose(Purpose::Gradients, of_weights)?,
            rounded: Rounded::new(memory, layout, data_ranks, gradients, reduce)?,
            activations: Activations::with_slots(memory, &passes, slots)?,
            sums: StepSums::new(memory)?,
            block_norms: SquaredBlockNorms::new(memory, layout)?,
        })
    }
}

/// Copies of the gradients in bf16 for their reduce-scatter; `None` for gradients that are not rounded.
pub(crate) struct Rounded<M: Memory> {
    pub copies: Vec<Option<AnyBuffer<M>>>,
}

impl<M: Memory> Rounded<M> {
    /// Allocates the copies. Gradients are rounded if they are f32, `reduce` is bf16 and there are several data ranks.
    pub(crate) fn new(
        memory: &M,
        layout: &ModelLayout,
        data_ranks: usize,
        gradients: ElementType,
        reduce: ElementType,
    ) -> Result<Self, moh_model::Error> {
        let rounds = data_ranks > 1 && reduce == ElementType::BF16 && gradients == ElementType::F32;
        let copy = |len| rounds.then(|| AnyBuffer::zeros(memory, reduce, len)).transpose();
        let copies = || layout.flats.iter().map(|flat| copy(flat.len)).collect::<Result<_, _>>();
        Ok(Rounded { copies: memory.for_purpose(Purpose::RoundedGradients, copies)? })
    }
}
