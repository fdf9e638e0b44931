//! The output head and the loss; the vocabulary's rows are divided among tensor-parallel ranks.

use std::ops::Range;

use moh_kernels::cross_entropy::{CrossEntropyArgs, HeadGradients, HeadRanks, HeadShape};
use moh_kernels::{
    AnyViewMut, Backend, Element, ElementType, Memory, Purpose, Workspace, for_element,
};

use super::{ActivationGradients, BackwardContext, Context, Linear, Normed, Scratch};
use crate::model_parallel::TensorShare;
use crate::parameters::ParameterRange;
use crate::tensors::{Division, OUTPUT_HEAD, TensorList};
use crate::{Error, ModelConfig, PassRole, PassSizes, Result, StepSums, Teacher};

/// The logits of the normed residual stream, and their cross-entropy.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Head {
    /// In a tied model the weight is the embedding's.
    pub linear: Linear,
    vocabulary: usize,
}

/// The buffers of the head. Its backward pass immediately follows its forward pass. All buffers are empty on stages
/// without the head, and the loss's buffers are empty on a teacher.
pub(crate) struct HeadBuffers<M: Memory> {
    pub normed: Normed<M>,
    scratch: M::Buffer<f32>,
    /// The sums that tensor-parallel ranks all-reduce.
    sums: M::Buffer<f64>,
}

impl<M: Workspace> HeadBuffers<M> {
    pub fn new(memory: &M, sizes: &PassSizes<'_>) -> Result<Self> {
        let shape = sizes.head();
        let sums = match sizes.share().ranks {
            1 => 0,
            ranks => memory.cross_entropy_sums(&shape, ranks),
        };
        let here = |len: usize| if sizes.part.last { len } else { 0 };
        let loss = |len: usize| if sizes.role == PassRole::Teacher { 0 } else { here(len) };
        let (stream, local) = (here(sizes.stream()), here(sizes.token_share().per_rank));
        let (scratch, sums) = (loss(memory.cross_entropy_scratch(&shape)), loss(sums));
        let normed = || {
            let y = sizes.zeros(memory, stream)?;
            Ok::<_, Error>(Normed { y, inv_rms: memory.allocate(local)? })
        };
        let logits = || Ok::<_, Error>((memory.allocate(scratch)?, memory.allocate(sums)?));
        let normed = memory.for_purpose(Purpose::Activations, normed)?;
        let (scratch, sums) = memory.for_purpose(Purpose::Logits, logits)?;
        Ok(HeadBuffers { normed, scratch, sums })
    }
}

/// The targets of a pass, `[N]`, and the buffers that the head uses.
pub(crate) struct HeadPass<'a, B: Backend> {
    pub targets: &'a B::Buffer<u32>,
    pub buffers: &'a mut HeadBuffers<B>,
    pub scratch: &'a mut Scratch<B>,
    pub sums: &'a mut StepSums<B>,
    /// The teacher of the distillation loss, and the gradient of the total loss with respect to a token's distillation
    /// loss.
    pub teacher: Option<(&'a Teacher<B>, f32)>,
}

impl Head {
    pub fn new(list: &mut TensorList<'_>, config: &ModelConfig) -> Self {
        let shape = [config.vocab_size, config.hidden_size];
        Self::at(list.matrix(OUTPUT_HEAD, shape, Division::Vocabulary), config)
    }

    /// Returns the head with this weight, `[V, C]`.
    pub fn at(weight: ParameterRange, config: &ModelConfig) -> Self {
        let linear = Linear::at(weight, config.hidden_size);
        Head { linear, vocabulary: config.vocab_size }
    }

    pub fn loss<B: Backend>(&self, cx: &Context<'_, B>, pass: HeadPass<'_, B>) -> Result<()> {
        for_element!(T: cx.element => self.cross_entropy::<B, T, f32>(cx, pass, None))
    }

    /// Adds the cross-entropy to the sums. Adds `scale` times its gradient to the gradient of the weight, unless the weight
    /// is frozen. Writes the gradient of the head's input to `d.hidden`, and returns the range of the rank's own tokens in
    /// it.
    pub fn loss_and_backward<B: Backend>(
        &self,
        cx: &mut BackwardContext<'_, B>,
        pass: HeadPass<'_, B>,
        scale: f32,
        d: &mut ActivationGradients<B>,
    ) -> Result<Range<usize>> {
        let accumulation = cx.gradients.accumulation(self.linear.weight.buffer);
        let d_x = d.hidden.view_mut(0..cx.num_tokens() * self.linear.inputs);
        let d_weight = cx.gradients.gradients_mut(&self.linear.weight);
        let gradient = d_weight.as_ref().map_or(ElementType::F32, AnyViewMut::element);
        for_element!(T: d_x.element(), G: gradient => {
            let (d_x, d_weight) = (d_x.typed(), d_weight.map(AnyViewMut::typed));
            let gradients = HeadGradients::<B, T, G> { scale, d_x, accumulation, d_weight };
            self.cross_entropy(&cx.forward, pass, Some(gradients))
        })?;
        cx.gradients.mark_written(self.linear.weight.buffer);
        cx.reduce_scatter(self.linear.inputs, &mut d.hidden)
    }

    fn cross_entropy<B: Backend, T: Element, G: Element>(
        &self,
        cx: &Context<'_, B>,
        pass: HeadPass<'_, B>,
        mut gradients: Option<HeadGradients<'_, B, T, G>>,
    ) -> Result<()> {
        let HeadPass { targets, buffers, scratch, sums, teacher } = pass;
        let width = self.linear.inputs;
        let TensorShare { rank, ranks } = cx.share();
        let rows = cx.vocabulary(self.vocabulary);
        let all_reduce = &cx.sum_over_ranks();
        let shape = HeadShape::of_rows(cx.num_tokens(), width, rows, ranks);
        cx.backend.cross_entropy(CrossEntropyArgs {
            shape: shape.with_teacher(teacher.is_some()),
            x: cx.all_gather(width, &buffers.normed.y, &mut scratch.gathered)?.typed(),
            weight: cx.weights.get(&self.linear.weight).typed(),
            targets: B::whole(targets),
            scratch: B::whole_mut(&mut buffers.scratch),
            loss: sums.of_head(teacher.is_some()),
            teacher: teacher.map(|(teacher, scale)| teacher.of_head(scale)),
            gradients: gradients.as_mut().map(HeadGradients::reborrow),
            ranks: cx.is_tensor_parallel().then(|| HeadRanks {
                rows,
                rank,
                ranks,
                sums: B::whole_mut(&mut buffers.sums),
                all_reduce,
            }),
        })?;
        Ok(())
    }
}
