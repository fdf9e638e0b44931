//! The sizes of a pass's buffers, computed from a part of a model and a micro-batch, without a
//! device or other ranks.

use moh_kernels::attention::AttentionShape;
use moh_kernels::cross_entropy::HeadShape;
use moh_kernels::router::RoutingShape;
use moh_kernels::{AnyBuffer, ElementType, Memory, QkvShape, WorkingSet};

use crate::model_parallel::{ModelPart, TensorShare, TokenShare};
use crate::{ModelConfig, ModelLayout, PassShape, Result, router};

/// The role of a model's passes in distillation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PassRole {
    /// No distillation.
    #[default]
    Alone,
    /// Passes of the model that learns: its loss has a [`Teacher`](crate::Teacher).
    Student,
    /// Passes of the teacher, without a backward pass or a loss of their own.
    Teacher,
}

/// Sizes of the passes over micro-batches of a part of a model.
#[derive(Debug, Clone, Copy)]
pub struct PassSizes<'a> {
    pub(crate) config: &'a ModelConfig,
    pub(crate) part: &'a ModelPart,
    pub(crate) pass: PassShape,
    /// The type of weights and activations.
    pub(crate) element: ElementType,
    pub(crate) role: PassRole,
    /// Sizes of a routing that fits every layer; `None` if all layers are dense.
    pub(crate) routing: Option<RoutingShape>,
    pub(crate) tensors: usize,
}

impl<'a> PassSizes<'a> {
    /// Returns the sizes for the part with the tensors of `layout`, of the model that `config` describes, with weights
    /// and activations of type `element`.
    pub fn new(
        config: &'a ModelConfig,
        layout: &ModelLayout,
        part: &'a ModelPart,
        pass: PassShape,
        element: ElementType,
    ) -> Result<Self> {
        let heads = part.tensor.heads(config);
        let routing = router::routing_shape_of(config, pass.tokens(), heads)?;
        let (role, tensors) = (PassRole::Alone, layout.segments().count());
        Ok(PassSizes { config, part, pass, element, role, routing, tensors })
    }

    /// Returns the same passes in another role.
    pub fn in_role(self, role: PassRole) -> Self {
        PassSizes { role, ..self }
    }

    /// Returns the sizes of the same part with another pass shape, without distillation.
    pub fn of_pass(self, pass: PassShape) -> Self {
        let (tokens, role) = (pass.tokens(), PassRole::Alone);
        let routing = self.routing.map(|routing| RoutingShape { tokens, ..routing });
        PassSizes { pass, role, routing, ..self }
    }

    /// Returns the bytes of a message to another stage: the local residual stream or its gradient.
    pub fn message_bytes(&self) -> usize {
        self.stream() * self.element.bytes()
    }

    /// Allocates a buffer of `len` activations.
    pub(crate) fn zeros<M: Memory>(&self, memory: &M, len: usize) -> Result<AnyBuffer<M>> {
        Ok(AnyBuffer::zeros(memory, self.element, len)?)
    }

    pub(crate) fn share(&self) -> TensorShare {
        self.part.tensor
    }

    pub(crate) fn tokens(&self) -> usize {
        self.pass.tokens()
    }

    /// Returns the share of tokens with a local residual stream.
    pub(crate) fn token_share(&self) -> TokenShare {
        self.share().tokens(self.tokens())
    }

    /// Returns the number of elements of the residual stream in one rank's share of the tokens.
    pub(crate) fn stream(&self) -> usize {
        self.token_share().per_rank * self.config.hidden_size
    }

    /// Returns the number of elements of the copy of queries, keys and values that attention reads; 0 where they are
    /// rotated in place.
    pub(crate) fn rotated(&self) -> usize {
        let copied = self.config.architecture.norms_queries_and_keys();
        if copied { self.tokens() * self.qkv().row() } else { 0 }
    }

    pub(crate) fn qkv(&self) -> QkvShape {
        self.share().qkv_shape(self.config, self.pass.batch, self.pass.length)
    }

    pub(crate) fn head(&self) -> HeadShape {
        let shape = self.share().head_shape(self.config, self.tokens());
        shape.with_teacher(self.role == PassRole::Student)
    }

    pub(crate) fn working_set(&self) -> WorkingSet {
        let (config, qkv) = (self.config, self.qkv());
        let widths = [
            self.tokens(),
            config.hidden_size,
            qkv.row(),
            2 * self.share().mlp_width(config),
            self.head().largest_share,
        ];
        WorkingSet {
            attention: AttentionShape::of_qkv(&qkv, self.pass.length),
            routed: self.routing.is_some(),
            qk_norm: config.architecture.norms_queries_and_keys(),
            training: self.pass.training,
            width: config.hidden_size,
            widest: widths.into_iter().max().unwrap_or(0),
            tensors: self.tensors,
        }
    }
}
