//! Forward and backward passes over micro-batches, of a whole model or of one pipeline stage.

use moh_comm::Reduce;
use moh_kernels::{Backend, for_element, span};

use crate::activations::{Activations, MicroBatch, PassActivations, PassSlot, Recompute};
use crate::layers::{BackwardContext, HeadBuffers, HeadPass, Scratch, Tokens};
use crate::layout::ModelLayout;
use crate::model::{LossConfig, Model};
use crate::parameters::{FlatBuffers, OnBuffer};
use crate::pass_sizes::PassRole;
use crate::router::RoutingStatistics;
use crate::{AuxiliaryLoss, Error, Result, StepSums};

/// Message tags of the residual stream and of its gradient.
const FORWARD: u32 = 3;
const BACKWARD: u32 = 4;

/// The buffers of a forward pass through a chunk.
pub(crate) struct ForwardBuffers<'a, B: Backend> {
    pub ids: &'a B::Buffer<u32>,
    pub tokens: Tokens<'a, B>,
    pub pass: &'a mut PassActivations<B>,
    pub scratch: &'a mut Scratch<B>,
    pub head: &'a mut HeadBuffers<B>,
}

/// The statistics that record the routings of a micro-batch's first tokens, and the number of these tokens. They record
/// this rank's layers, on tensor rank 0 only.
pub type OnRouting<'a> = Option<(&'a mut RoutingStatistics, usize)>;

impl<B: Backend> Model<B> {
    /// Computes the forward pass of one micro-batch up to the final norm, through all chunks of this rank's part. Adds
    /// the auxiliary losses to `sums`.
    ///
    /// # Errors
    /// Fails for a token id outside the vocabulary, and if the device or another rank fails.
    pub fn forward(
        &mut self,
        activations: &mut Activations<B>,
        sums: &mut StepSums<B>,
    ) -> Result<()> {
        self.forward_routed(activations, sums, None)
    }

    fn forward_routed(
        &mut self,
        activations: &mut Activations<B>,
        sums: &mut StepSums<B>,
        mut routed: OnRouting<'_>,
    ) -> Result<()> {
        (0..self.parallel.part().chunks.len()).try_for_each(|chunk| {
            let slot = PassSlot { chunk, ..PassSlot::default() };
            let ready: OnBuffer<'_, B> = &mut |_, _| Ok(());
            if activations.role == PassRole::Student {
                self.teach_chunk(activations, slot)?;
            }
            let routed = routed.as_mut().map(|(statistics, tokens)| (&mut **statistics, *tokens));
            self.forward_chunk(activations, slot, sums, ready, routed)
        })
    }

    /// Computes the forward pass through one chunk, after the teacher's if there is a teacher ([`Model::teach_chunk`]).
    /// Receives its input from the previous stage and sends its output to the next stage. Calls `before_use` with the
    /// weights before it uses each of their buffers; `before_use` may wait for the buffer.
    pub fn forward_chunk(
        &mut self,
        activations: &mut Activations<B>,
        slot: PassSlot,
        sums: &mut StepSums<B>,
        before_use: OnBuffer<'_, B>,
        mut routed: OnRouting<'_>,
    ) -> Result<()> {
        let Activations { shape, micro_batches, passes, scratch, head, .. } = activations;
        let micro_batch = &micro_batches[slot.micro_batch];
        let (ids, tokens) = (&micro_batch.ids, micro_batch.tokens(*shape));
        let pass = &mut passes[slot.slot];
        let mut buffers = ForwardBuffers { ids, tokens, pass, scratch, head };
        let share = 1.0 / self.routed_layers() as f64;
        let of_losses = self.parallel.part().tensor.rank == 0;
        let layers = self.parallel.part().chunks[slot.chunk].clone();
        self.begin_chunk(&mut buffers, slot.chunk, before_use)?;
        for (i, layer) in layers.clone().enumerate() {
            self.forward_block(&mut buffers, i, layer, before_use)?;
            // All tensor-parallel ranks have the loss and the routing.
            let router = self.layers.blocks[layer].attention.router.as_ref();
            let routing = router.zip(buffers.pass.blocks.routing(i));
            if let Some((router, routing)) = routing.filter(|_| of_losses) {
                let cx = self.context(buffers.tokens);
                router.loss(&cx, routing, share, sums.auxiliary(AuxiliaryLoss::Balance))?;
                if let Some((statistics, tokens)) = &mut routed {
                    statistics.add(&self.backend, layer, routing, *tokens)?;
                }
            }
        }
        self.end_chunk(&mut buffers, slot.chunk, before_use)
    }

    /// Computes the forward pass of a teacher through one chunk, without losses.
    pub(crate) fn forward_frozen(
        &mut self,
        mut buffers: ForwardBuffers<'_, B>,
        chunk: usize,
    ) -> Result<()> {
        let ready: OnBuffer<'_, B> = &mut |_, _| Ok(());
        self.begin_chunk(&mut buffers, chunk, ready)?;
        for (i, layer) in self.parallel.part().chunks[chunk].clone().enumerate() {
            self.forward_block(&mut buffers, i, layer, ready)?;
        }
        self.end_chunk(&mut buffers, chunk, ready)
    }

    /// Computes the input of a chunk: embeds the tokens, or receives the previous stage's output.
    fn begin_chunk(
        &mut self,
        buffers: &mut ForwardBuffers<'_, B>,
        chunk: usize,
        before_use: OnBuffer<'_, B>,
    ) -> Result<()> {
        let input = &mut buffers.pass.stream[0];
        if self.parallel.begins_with(chunk) {
            before_use(&mut self.weights, ModelLayout::EMBEDDING)?;
            let (cx, ids) = (self.context(buffers.tokens), B::whole(buffers.ids));
            return self.layers.embedding.forward(&cx, ids, input, &mut buffers.scratch.gathered);
        }
        let parallel = &self.parallel;
        let (input, previous) = (input.whole_mut(), parallel.previous());
        Ok(for_element!(T: input.element() => {
            parallel.pipeline.recv::<B, T>(input.typed(), previous, FORWARD)
        })?)
    }

    /// Computes block `layer`, at `index` of its chunk.
    fn forward_block(
        &mut self,
        buffers: &mut ForwardBuffers<'_, B>,
        index: usize,
        layer: usize,
        before_use: OnBuffer<'_, B>,
    ) -> Result<()> {
        let _block = span::enter_numbered("block", layer as u64);
        before_use(&mut self.weights, self.layout.block_index(layer))?;
        let cx = self.context(buffers.tokens);
        let (before, after, blocks) = buffers.pass.around(index);
        let buffers = blocks.buffers(index, buffers.scratch);
        self.layers.blocks[layer].forward(&cx, before, buffers, None, after)
    }

    /// Norms the output of the last chunk, or sends the output to the next stage.
    fn end_chunk(
        &mut self,
        buffers: &mut ForwardBuffers<'_, B>,
        chunk: usize,
        before_use: OnBuffer<'_, B>,
    ) -> Result<()> {
        let output = buffers.pass.output(self.parallel.part().chunks[chunk].len());
        if self.parallel.ends_with(chunk) {
            let _span = span::enter("head");
            before_use(&mut self.weights, self.layout.final_norm_index())?;
            before_use(&mut self.weights, self.layout.head_index())?;
            let cx = self.context(buffers.tokens);
            self.layers.final_norm.forward(&cx, output, &mut buffers.head.normed)?;
            return Ok(());
        }
        let (parallel, output) = (&self.parallel, output.whole());
        Ok(for_element!(T: output.element() => {
            parallel.pipeline.send::<B, T>(output.typed(), parallel.next(), FORWARD)
        })?)
    }

    /// Adds the cross-entropy of the uploaded micro-batch to `sums`, on the stage with the head, without gradients.
    pub fn evaluate(
        &mut self,
        activations: &mut Activations<B>,
        sums: &mut StepSums<B>,
        routed: OnRouting<'_>,
    ) -> Result<()> {
        self.forward_routed(activations, sums, routed)?;
        self.evaluate_head(activations, sums)
    }

    pub(crate) fn evaluate_head(
        &self,
        activations: &mut Activations<B>,
        sums: &mut StepSums<B>,
    ) -> Result<()> {
        if !self.parallel.part().last {
            return Ok(());
        }
        let _span = span::enter("head");
        let Activations { shape, micro_batches, scratch, head: buffers, .. } = activations;
        let (targets, teacher) = (&micro_batches[0].targets, None);
        let pass = HeadPass { targets, buffers, scratch, sums, teacher };
        self.layers.head.loss(&self.context(Tokens::whole(*shape)), pass)
    }

    /// Computes the forward and backward pass over the uploaded micro-batch. Adds its losses to `sums` and its
    /// gradients to `gradients`.
    pub fn forward_backward(
        &mut self,
        activations: &mut Activations<B>,
        gradients: &mut FlatBuffers<B>,
        losses: LossConfig,
        sums: &mut StepSums<B>,
    ) -> Result<()> {
        self.forward(activations, sums)?;
        (0..self.parallel.part().chunks.len()).rev().try_for_each(|chunk| {
            let slot = PassSlot { chunk, ..PassSlot::default() };
            self.backward_chunk(activations, slot, gradients, losses, sums, None)
        })
    }

    /// Computes the backward pass through one chunk, after its forward pass. Receives its gradient from the next stage
    /// and sends a gradient to the previous stage. Adds the cross-entropy to `sums` and the gradients to `gradients`,
    /// where they overwrite stale buffers ([`FlatBuffers::mark_stale`]).
    ///
    /// Callers pass `complete` with a step's last micro-batch: it is called with the gradients as soon as a buffer of
    /// this rank is complete. Both stages with a tied head complete their own buffer of it
    /// ([`ModelParallel::tied_head`](crate::model_parallel::ModelParallel::tied_head)).
    pub fn backward_chunk(
        &self,
        activations: &mut Activations<B>,
        slot: PassSlot,
        gradients: &mut FlatBuffers<B>,
        losses: LossConfig,
        sums: &mut StepSums<B>,
        mut complete: Option<OnBuffer<'_, B>>,
    ) -> Result<()> {
        let Activations { shape, recompute, role, micro_batches, passes, scratch, head, .. } =
            activations;
        let d = &mut activations.gradients;
        let Some(d) = d else {
            return Err(Error::invalid("the activations were planned without a backward pass"));
        };
        let micro_batch = &micro_batches[slot.micro_batch];
        let MicroBatch { ids, targets, .. } = micro_batch;
        let PassActivations { stream, blocks } = &mut passes[slot.slot];
        let (parallel, layout, layers) = (&self.parallel, &self.layout, &self.layers);
        let mut cx = BackwardContext {
            forward: self.context(micro_batch.tokens(*shape)),
            gradients,
            balance_weight: losses.auxiliary[AuxiliaryLoss::Balance] / self.routed_layers() as f32,
            straight_through: losses.straight_through,
        };
        if parallel.ends_with(slot.chunk) {
            let output = &stream[parallel.part().chunks[slot.chunk].len()];
            let scale = losses.auxiliary[AuxiliaryLoss::Distillation];
            let teacher = match *role {
                PassRole::Student => Some((self.teacher()?, scale)),
                PassRole::Alone | PassRole::Teacher => None,
            };
            let head_span = span::enter("head");
            let (buffers, scratch) = (&mut *head, &mut *scratch);
            let pass = HeadPass { targets, buffers, scratch, sums, teacher };
            let d_normed = layers.head.loss_and_backward(&mut cx, pass, losses.cross_entropy, d)?;
            d.residual.whole_mut().zero(cx.backend)?;
            let norm = &layers.final_norm;
            norm.backward(&mut cx, output, &head.normed.inv_rms, d_normed, d)?;
            cx.gradients.mark_written(norm.weight.buffer);
            drop(head_span);
            if layout.head_index() != ModelLayout::EMBEDDING || parallel.tied_head().is_some() {
                self.complete(cx.gradients, layout.head_index(), &mut complete)?;
            }
            self.complete(cx.gradients, layout.final_norm_index(), &mut complete)?;
        } else {
            let (d_output, next) = (d.residual.whole_mut(), parallel.next());
            for_element!(T: d_output.element() => {
                parallel.backward.recv::<B, T>(d_output.typed(), next, BACKWARD)
            })?;
        }
        for (i, layer) in parallel.part().chunks[slot.chunk].clone().enumerate().rev() {
            let (block, input, mut buffers) =
                (&layers.blocks[layer], &stream[i], blocks.buffers(i, scratch));
            let _block = span::enter_numbered("block", layer as u64);
            let recomputing = (*recompute != Recompute::None).then(|| span::enter("recompute"));
            block.recompute(*recompute, &cx, input, &mut buffers)?;
            drop(recomputing);
            block.backward(&mut cx, input, buffers, d)?;
            self.complete(cx.gradients, layout.block_index(layer), &mut complete)?;
        }
        if !parallel.begins_with(slot.chunk) {
            let (d_input, previous) = (d.residual.whole(), parallel.previous());
            return Ok(for_element!(T: d_input.element() => {
                parallel.backward.send::<B, T>(d_input.typed(), previous, BACKWARD)
            })?);
        }
        layers.embedding.backward(&mut cx, B::whole(ids), d, &mut scratch.gathered)?;
        self.complete(cx.gradients, ModelLayout::EMBEDDING, &mut complete)
    }

    /// Calls `complete` for a buffer with complete gradients on this rank. Before, sums the gradients of replicated
    /// tensors over the tensor-parallel ranks.
    fn complete(
        &self,
        gradients: &mut FlatBuffers<B>,
        flat: usize,
        complete: &mut Option<OnBuffer<'_, B>>,
    ) -> Result<()> {
        let Some(complete) = complete else { return Ok(()) };
        let segments = self.layout.flats[flat].segments.iter();
        for segment in segments.filter(|segment| segment.replicated) {
            let part = gradients.view_mut(flat, segment.range.clone());
            let tensor = self.parallel.tensor();
            for_element!(G: part.element() => tensor.all_reduce::<B, G>(part.typed(), Reduce::Sum))?;
        }
        complete(gradients, flat)
    }
}
