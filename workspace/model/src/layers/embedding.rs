//! The embedding of tokens. Tensor-parallel ranks divide its rows.

use moh_kernels::embedding::{EmbeddingBackward, EmbeddingForward};
use moh_kernels::{Backend, Element, View, span};

use super::{ActivationGradients, BackwardContext, Context};
use crate::parameters::ParameterRange;
use crate::tensors::{Division, EMBEDDING, TensorList};
use crate::{ModelConfig, Result};

/// A row, `[C]`, for each token of the vocabulary.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Embedding {
    pub table: ParameterRange,
    width: usize,
    vocabulary: usize,
}

impl Embedding {
    pub fn new(list: &mut TensorList<'_>, config: &ModelConfig) -> Self {
        let (vocabulary, width) = (config.vocab_size, config.hidden_size);
        let table = list.matrix(EMBEDDING, [vocabulary, width], Division::Vocabulary);
        Embedding { table, width, vocabulary }
    }

    /// Writes the rows of the rank's own tokens, `[M, C]`.
    pub fn forward<B: Backend, T: Element>(
        &self,
        cx: &Context<'_, B, T>,
        ids: View<'_, B, u32>,
        out: &mut B::Buffer<T>,
        gathered: &mut Option<B::Buffer<T>>,
    ) -> Result<()> {
        let _span = span::enter("embedding");
        let (backend, width, rows) = (cx.backend, self.width, cx.vocabulary(self.vocabulary));
        let (table, len) = (cx.weights.get(&self.table), cx.num_tokens() * width);
        let ids = B::reborrow(ids);
        let Some(partial) = gathered else {
            let out = B::view_mut(out, 0..len);
            let embedding = EmbeddingForward { width, rows, ids, table, out };
            return Ok(backend.embedding_forward(embedding)?);
        };
        let sum = B::view_mut(partial, 0..len);
        backend.embedding_forward(EmbeddingForward { width, rows, ids, table, out: sum })?;
        let own = cx.reduce_scatter(width, partial)?;
        let out = B::view_mut(out, 0..own.len());
        Ok(backend.copy(B::view(partial, own), out)?)
    }

    /// Adds the gradient of the table, given the gradient of the residual stream.
    pub fn backward<B: Backend, T: Element, G: Element>(
        &self,
        cx: &mut BackwardContext<'_, B, T, G>,
        ids: View<'_, B, u32>,
        d: &ActivationGradients<B, T>,
        gathered: &mut Option<B::Buffer<T>>,
    ) -> Result<()> {
        let _span = span::enter("embedding");
        cx.gradients.clear_stale(cx.forward.backend, &self.table)?;
        cx.gradients.mark_written(self.table.buffer);
        cx.forward.backend.embedding_backward(EmbeddingBackward {
            width: self.width,
            rows: cx.vocabulary(self.vocabulary),
            ids: B::reborrow(ids),
            d_out: cx.forward.all_gather(self.width, &d.residual, gathered)?,
            d_table: cx.gradients.get_mut(&self.table),
        })?;
        Ok(())
    }
}
