//! The final norm, the output head and the loss, forward and backward.

use moh_kernels::cross_entropy::{CrossEntropyArgs, HeadGradients, HeadRanks};
use moh_kernels::{Backend, Element, span};

use crate::activations::{Activations, Head, PassSlot, Shared};
use crate::model::{LossScale, Model};
use crate::parameters::FlatBuffers;
use crate::{Error, StepSums};

impl<B: Backend, T: Element> Model<B, T> {
    /// The norm before the head.
    pub(crate) fn final_norm(
        &self,
        tokens: usize,
        stream: &B::Buffer<T>,
        head: &mut Head<B, T>,
    ) -> Result<(), Error> {
        let into = (&mut head.normed, &mut head.inv_rms);
        self.normalize(self.layout.final_norm(), tokens, stream, into)
    }

    /// Adds the cross-entropy to `sums`; with gradients, writes the gradient of the normed residual
    /// stream.
    pub(crate) fn losses<G: Element>(
        &self,
        n: usize,
        targets: &B::Buffer<u32>,
        (shared, head): (&mut Shared<B, T>, &mut Head<B, T>),
        sums: &mut StepSums<B>,
        mut gradients: Option<HeadGradients<'_, B, T, G>>,
    ) -> Result<(), Error> {
        let tensor = self.parallel.part().tensor;
        let all_reduce = &self.sum_over_ranks();
        self.backend.cross_entropy(CrossEntropyArgs {
            shape: self.head_shape(n),
            x: self.gather(n, &head.normed, &mut shared.gathered)?,
            weight: self.weights_of(self.layout.head_index()),
            targets: B::whole(targets),
            scratch: B::whole_mut(&mut head.scratch),
            loss: sums.cross_entropy(),
            gradients: gradients.as_mut().map(HeadGradients::reborrow),
            ranks: self.is_tensor_parallel().then(|| HeadRanks {
                rows: tensor.vocabulary(&self.config),
                rank: tensor.rank,
                ranks: tensor.ranks,
                sums: B::whole_mut(&mut head.sums),
                all_reduce,
            }),
        })?;
        Ok(())
    }

    /// Computes the gradient of the residual stream after the last block, from the targets.
    pub(crate) fn head_backward<G: Element>(
        &self,
        activations: &mut Activations<B, T>,
        slot: PassSlot,
        gradients: &mut FlatBuffers<B, G>,
        scale: LossScale,
        sums: &mut StepSums<B>,
    ) -> Result<(), Error> {
        let _span = span::enter("head");
        let Activations { shape, micro_batches, passes, shared, head: of_head, backward, .. } =
            activations;
        let targets = &micro_batches[slot.micro_batch].targets;
        let (pass, Some(backward)) = (&passes[slot.slot], backward) else {
            return Err(Error::NotPlannedForTraining);
        };
        let layout = &self.layout;
        let (n, width) = (shape.tokens(), self.config.hidden_size);
        let head = layout.head_index();
        let head_gradients = HeadGradients::<B, T, G> {
            scale: scale.cross_entropy,
            d_x: B::view_mut(&mut backward.d_branch, 0..n * width),
            accumulation: gradients.accumulation(head),
            d_weight: gradients.view_mut(head, layout.flats[head].used()),
        };
        self.losses(n, targets, (shared, of_head), sums, Some(head_gradients))?;
        gradients.mark_written(head);
        let end = self.parallel.part().chunks[slot.chunk].len();
        self.backend.zero(B::whole_mut(&mut backward.d_stream))?;
        let ((flat, range), inv_rms) = (layout.final_norm(), &of_head.inv_rms);
        self.norm_backward((flat, range, n), &pass.stream[end], inv_rms, backward, gradients)?;
        gradients.mark_written(flat);
        Ok(())
    }
}
