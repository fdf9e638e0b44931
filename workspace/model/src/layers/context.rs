//! The context that the layers of a pass share: the device, the parameters, the tokens, the ranks with the other parts
//! of each tensor, and buffers that layers use in turn.
//!
//! With tensor parallelism each rank has the residual stream of some of the tokens (sequence
//! parallelism). Rows are all-gathered before a matmul, and its result is reduce-scattered.

use std::ops::{Deref, Range};

use moh_comm::Reduce;
use moh_kernels::ranks::VocabularyRows;
use moh_kernels::{
    AnyBuffer, AnyView, Backend, ElementType, Memory, Purpose, QkvShape, View, ViewMut, for_element,
};

use super::RopeTables;
use crate::generation::PackedWeights;
use crate::model_parallel::{TensorShare, TokenShare};
use crate::parameters::ParameterRange;
use crate::{FlatBuffers, ModelParallel, PassSizes, Result};

/// The tokens that a pass computes, at most the buffers' capacity.
pub(crate) struct Tokens<'a, B: Backend> {
    /// Sequences, their tokens, and the local heads.
    pub shape: QkvShape,
    /// Position of each sequence's first token.
    pub first_position: usize,
    /// Start of each token's document; `[N]`.
    pub document_start: Option<&'a B::Buffer<u32>>,
    /// Whether each token's results must not depend on the number of tokens of the pass.
    pub independent: bool,
}

impl<B: Backend> Tokens<'_, B> {
    /// Returns whole sequences without a document mask.
    pub fn whole(shape: QkvShape) -> Self {
        Tokens { shape, first_position: 0, document_start: None, independent: false }
    }
}

impl<B: Backend> Clone for Tokens<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Tokens<'_, B> {}

/// The inputs of every layer of a pass.
pub(crate) struct Context<'a, B: Backend> {
    pub backend: &'a B,
    /// The type of activations.
    pub element: ElementType,
    pub weights: &'a FlatBuffers<B>,
    pub parallel: &'a ModelParallel,
    pub rope: &'a RopeTables<B>,
    /// Packed copies of weights, in generation.
    pub packed: Option<&'a PackedWeights<B>>,
    pub tokens: Tokens<'a, B>,
}

/// The context of every layer of a backward pass: the context of the forward pass, and the gradients of the parameters,
/// which layers add to.
pub(crate) struct BackwardContext<'a, B: Backend> {
    pub forward: Context<'a, B>,
    pub gradients: &'a mut FlatBuffers<B>,
    /// Gradient of the total loss with respect to one layer's balance loss.
    pub balance_weight: f32,
    /// Whether the loss reaches the gates through the selection.
    pub straight_through: bool,
}

impl<'a, B: Backend> Deref for BackwardContext<'a, B> {
    type Target = Context<'a, B>;

    fn deref(&self) -> &Self::Target {
        &self.forward
    }
}

/// Buffers that the layers of all passes use in turn.
pub(crate) struct Scratch<M: Memory> {
    /// The input of the down projection and its gradient, `[N, I]`; the gradient of queries, keys
    /// and values, `[N, (H + 2G) D]`.
    pub hidden: AnyBuffer<M>,
    /// With tensor parallelism: rows of the residual stream's width for all tokens, after an
    /// all-gather or before a reduce-scatter.
    pub gathered: Option<AnyBuffer<M>>,
}

impl<M: Memory> Scratch<M> {
    pub fn new(memory: &M, sizes: &PassSizes<'_>) -> Result<Self> {
        let share = sizes.share();
        let hidden = sizes.tokens() * share.mlp_width(sizes.config).max(sizes.qkv().row());
        let rows = sizes.token_share().padded() * sizes.config.hidden_size;
        let gathered = || memory.for_purpose(Purpose::Gathered, || sizes.zeros(memory, rows));
        Ok(Scratch {
            hidden: memory.for_purpose(Purpose::Activations, || sizes.zeros(memory, hidden))?,
            gathered: (share.ranks > 1).then(gathered).transpose()?,
        })
    }
}

/// Gradients of activations, which each layer of a backward pass leaves to the next layer.
pub(crate) struct ActivationGradients<M: Memory> {
    /// Gradient of the residual stream, `[M, C]`.
    pub residual: AnyBuffer<M>,
    /// Gradient of a norm's output, `[N, C]`, or of attention's output, `[N, H D]`.
    pub hidden: AnyBuffer<M>,
    /// `<dO, O>` of the local heads, `[N, H]`.
    pub delta: M::Buffer<f32>,
    /// With tensor parallelism: `<dO, O>` of the routed heads of all ranks, `[N, R]`. If a router weighs heads, of all
    /// heads.
    pub deltas: M::Buffer<f64>,
}

impl<M: Memory> ActivationGradients<M> {
    pub fn new(memory: &M, sizes: &PassSizes<'_>) -> Result<Self> {
        let (share, config, tokens) = (sizes.share(), sizes.config, sizes.tokens());
        let heads = share.heads(config);
        let normed = sizes.token_share().padded() * config.hidden_size;
        let routing = sizes.routing.filter(|_| share.ranks > 1);
        let deltas = routing.map_or(0, |shape| match shape.weighted {
            true => heads.count,
            false => shape.columns,
        });
        Ok(ActivationGradients {
            residual: sizes.zeros(memory, sizes.stream())?,
            hidden: sizes.zeros(memory, normed.max(tokens * share.query_width(config)))?,
            delta: memory.allocate(tokens * heads.local())?,
            deltas: memory.allocate(tokens * deltas)?,
        })
    }
}

impl<B: Backend> Context<'_, B> {
    /// Returns the number of tokens, N.
    pub fn num_tokens(&self) -> usize {
        self.tokens.shape.tokens()
    }

    pub fn packed(&self, weight: &ParameterRange) -> Option<View<'_, B, u32>> {
        self.packed?.get(weight)
    }

    pub fn share(&self) -> TensorShare {
        self.parallel.part().tensor
    }

    /// Returns this rank's rows of a vocabulary.
    pub fn vocabulary(&self, size: usize) -> VocabularyRows {
        VocabularyRows::of_rank(size, self.share().rank, self.share().ranks)
    }

    /// Returns whether several ranks have shards of each tensor.
    pub fn is_tensor_parallel(&self) -> bool {
        self.share().ranks > 1
    }

    /// Returns the share of tokens with a residual stream on this rank.
    pub fn own_tokens(&self) -> TokenShare {
        self.share().tokens(self.num_tokens())
    }

    /// All-gathers rows of `width` elements from the ranks' own rows into `gathered`, and returns the rows of all
    /// tokens. Without tensor parallelism returns the own rows.
    pub fn all_gather<'v>(
        &self,
        width: usize,
        own: &'v AnyBuffer<B>,
        gathered: &'v mut Option<AnyBuffer<B>>,
    ) -> Result<AnyView<'v, B>> {
        let share = self.own_tokens();
        let len = share.local() * width;
        let Some(gathered) = gathered else { return Ok(own.view(0..len)) };
        let start = share.start() * width;
        gathered.view_mut(start..start + len).copy_from(self.backend, own.view(0..len))?;
        let whole = gathered.view_mut(0..share.padded() * width);
        let tensor = self.parallel.tensor();
        for_element!(T: whole.element() => tensor.all_gather::<B, T>(whole.typed()))?;
        Ok(gathered.view(0..self.num_tokens() * width))
    }

    /// Reduce-scatters the rows of `width` elements in `partial`; returns the range of this rank's rows in `partial`.
    pub fn reduce_scatter(&self, width: usize, partial: &mut AnyBuffer<B>) -> Result<Range<usize>> {
        let share = self.own_tokens();
        let start = share.start() * width;
        if self.is_tensor_parallel() {
            let whole = partial.view_mut(0..share.padded() * width);
            let tensor = self.parallel.tensor();
            for_element!(T: whole.element() => {
                tensor.reduce_scatter::<B, T>(whole.typed(), Reduce::Sum)
            })?;
        }
        Ok(start..start + share.local() * width)
    }

    /// Returns a function that all-reduces over the tensor-parallel ranks, for operators that need sums before their
    /// end.
    pub fn sum_over_ranks(
        &self,
    ) -> impl for<'v> Fn(ViewMut<'v, B, f64>) -> moh_kernels::Result<()> + Sync {
        |table| {
            let summed = self.parallel.tensor().all_reduce::<B, f64>(table, Reduce::Sum);
            summed.map_err(|error| moh_kernels::Error::new(error.to_string()))
        }
    }
}
