//! The attention-output loss: each layer's attention learns the output of the teacher's for the same input, the
//! teacher's residual stream before the layer. Neither the MLPs nor the head take part, and no layer's error reaches
//! another's.
//!
//! The loss is the mean over layers and tokens of |a - t|^2 / |t|^2, with the attention output a of the model and t of
//! the teacher, both without the residual stream that they are added to. The output projections write them apart from it:
//! a difference of two residual streams would have the rounding of the streams. Loss and gradient of a layer are computed
//! as soon as the teacher's forward pass has computed it, so that nothing is kept for a backward pass.

use moh_kernels::relative_error::RelativeErrorArgs;
use moh_kernels::{Backend, Element, Memory, span};

use crate::layers::attention::{AttentionBuffers, SavedAttention};
use crate::layers::{
    ActivationGradients, BackwardContext, Block, Context, Normed, ResidualSum, Scratch, Tokens,
};
use crate::parameters::{FlatBuffers, OnBuffer};
use crate::{
    Activations, AuxiliaryLoss, Error, Model, PassRole, PassSizes, PassSlot, Result, StepSums,
};

/// What the attention-output loss of a pass writes.
pub struct AttentionOutputLoss<'a, B: Backend, G: Element> {
    /// The gradients, which are added to.
    pub gradients: &'a mut FlatBuffers<B, G>,
    /// The loss's weight over the layers and the tokens of the whole step.
    pub scale: f32,
    /// Whether the loss reaches the gates through the selection.
    pub straight_through: bool,
}

pub(crate) struct AttentionOutputs<M: Memory, T: Element> {
    saved: SavedAttention<M, T>,
    norm: Normed<M, T>,
    rotated: M::Buffer<T>,
    /// Zeros, `[M, C]`, to which attention outputs are added.
    zeros: M::Buffer<T>,
    /// `[M, C]`.
    own: M::Buffer<T>,
    /// `[M, C]`.
    target: M::Buffer<T>,
}

impl<M: Memory, T: Element> AttentionOutputs<M, T> {
    /// Allocates the buffers of passes of these sizes; `None` in passes without the loss.
    pub fn new(memory: &M, sizes: &PassSizes<'_>) -> Result<Option<Self>> {
        if sizes.role != (PassRole::Student { attention_output: true }) {
            return Ok(None);
        }
        Ok(Some(AttentionOutputs {
            saved: SavedAttention::new(memory, sizes)?,
            norm: Normed::new(memory, sizes)?,
            rotated: memory.allocate(sizes.rotated())?,
            zeros: memory.allocate(sizes.stream())?,
            own: memory.allocate(sizes.stream())?,
            target: memory.allocate(sizes.stream())?,
        }))
    }
}

/// What the teacher has of a layer after its forward pass.
pub(crate) struct TaughtLayer<'a, B: Backend, T: Element> {
    pub cx: Context<'a, B, T>,
    pub block: &'a Block,
    /// The residual stream before the layer, `[M, C]`.
    pub input: &'a B::Buffer<T>,
    pub saved: &'a SavedAttention<B, T>,
    pub scratch: &'a mut Scratch<B, T>,
}

/// The buffers that a layer's loss uses.
struct Buffers<'a, B: Backend, T: Element> {
    outputs: &'a mut AttentionOutputs<B, T>,
    scratch: &'a mut Scratch<B, T>,
    d: &'a mut ActivationGradients<B, T>,
}

impl<B: Backend, T: Element> Model<B, T> {
    /// The teacher's forward pass through one chunk, which precedes the model's own ([`Model::forward_chunk`]). With a
    /// `loss`, adds the attention-output loss, summed over layers and tokens, to `sums`, and its gradients. `before_use`
    /// is that of [`Model::forward_chunk`].
    ///
    /// # Errors
    /// As [`Model::forward_chunk`]; fails without a teacher, and with a `loss` for which the passes are not
    /// planned.
    pub fn teach_chunk<G: Element>(
        &mut self,
        activations: &mut Activations<B, T>,
        slot: PassSlot,
        loss: Option<AttentionOutputLoss<'_, B, G>>,
        sums: &mut StepSums<B>,
        before_use: OnBuffer<'_, B, T>,
    ) -> Result<()> {
        let Activations { shape, micro_batches, scratch, attention_outputs, gradients, .. } =
            activations;
        let _span = span::enter("teacher");
        let micro_batch = &micro_batches[slot.micro_batch];
        // The plan is checked before the teacher is taken out of the model, which an error must not lose.
        let buffers = attention_outputs.as_mut().zip(gradients.as_mut());
        let learned = match loss {
            None => None,
            Some(loss) => Some((loss, buffers.ok_or_else(|| Error::invalid(NOT_PLANNED))?)),
        };
        let mut teacher = self.take_teacher()?;
        let done = match learned {
            None => teacher.forward_chunk(micro_batch, slot.chunk, &mut |_, _| Ok(())),
            Some((mut loss, (outputs, d))) => {
                let tokens = micro_batch.tokens(*shape);
                teacher.forward_chunk(micro_batch, slot.chunk, &mut |layer, taught| {
                    before_use(&mut self.weights, self.layout.block_index(layer))?;
                    let (outputs, scratch, d) = (&mut *outputs, &mut *scratch, &mut *d);
                    let buffers = Buffers { outputs, scratch, d };
                    self.attention_output(tokens, layer, taught, &mut loss, buffers, sums)
                })
            }
        };
        self.teacher = Some(teacher);
        done
    }

    fn attention_output<G: Element>(
        &self,
        tokens: Tokens<'_, B>,
        layer: usize,
        taught: TaughtLayer<'_, B, T>,
        loss: &mut AttentionOutputLoss<'_, B, G>,
        buffers: Buffers<'_, B, T>,
        sums: &mut StepSums<B>,
    ) -> Result<()> {
        let Buffers { outputs, scratch, d } = buffers;
        let AttentionOutputs { saved, norm, rotated, zeros, own, target } = outputs;
        let TaughtLayer { cx: teacher, block, input, saved: of_teacher, scratch: gathered } =
            taught;
        let sum = ResidualSum { x: &*zeros, y: target };
        block.attention.project_output(&teacher, of_teacher, &mut gathered.gathered, sum)?;

        let block = &self.layers.blocks[layer];
        let cx = self.context(tokens);
        let normed = block.attention_norm.forward(&cx, input, norm)?;
        let attention =
            AttentionBuffers { saved: &mut *saved, rotated: &mut *rotated, cache: None };
        let sum = ResidualSum { x: &*zeros, y: own };
        block.attention.forward(&cx, normed, attention, scratch, sum)?;

        // Rows of padding have no gradient.
        cx.backend.zero(B::whole_mut(&mut d.residual))?;
        let (width, own_tokens) = (self.config.hidden_size, cx.own_tokens().local());
        let rows = 0..own_tokens * width;
        cx.backend.relative_error(RelativeErrorArgs {
            width,
            scale: loss.scale,
            y: B::view(own, rows.clone()),
            target: B::view(target, rows.clone()),
            d_y: B::view_mut(&mut d.residual, rows),
            sum: sums.auxiliary(AuxiliaryLoss::AttentionOutput),
        })?;
        // The block's other tensors have no gradient of this loss.
        loss.gradients.clear(cx.backend, block.attention_norm.weight.buffer)?;
        let mut cx = BackwardContext {
            forward: cx,
            gradients: &mut *loss.gradients,
            balance_weight: 0.0,
            straight_through: loss.straight_through,
        };
        let attention = AttentionBuffers { saved, rotated, cache: None };
        let d_normed = block.attention.backward(&mut cx, &norm.y, attention, scratch, d)?;
        block.attention_norm.backward(&mut cx, input, &norm.inv_rms, d_normed, d)
    }
}

const NOT_PLANNED: &str = "the passes are planned without an attention-output loss";
