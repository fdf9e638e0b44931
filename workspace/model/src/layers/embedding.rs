//! The embedding of tokens. Tensor-parallel ranks divide its rows.

use moh_kernels::embedding::{EmbeddingBackward, EmbeddingForward};
use moh_kernels::{AnyBuffer, Backend, View, for_element, span};

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
    pub fn forward<B: Backend>(
        &self,
        cx: &Context<'_, B>,
        ids: View<'_, B, u32>,
        out: &mut AnyBuffer<B>,
        gathered: &mut Option<AnyBuffer<B>>,
    ) -> Result<()> {
        let _span = span::enter("embedding");
        let (backend, width, rows) = (cx.backend, self.width, cx.vocabulary(self.vocabulary));
        let (table, len) = (cx.weights.get(&self.table), cx.num_tokens() * width);
        let looked_up = gathered.as_mut().unwrap_or(&mut *out).view_mut(0..len);
        for_element!(T: table.element() => backend.embedding_forward::<T>(EmbeddingForward {
            width,
            rows,
            ids: B::reborrow(ids),
            table: table.typed(),
            out: looked_up.typed(),
        }))?;
        let Some(partial) = gathered else { return Ok(()) };
        let own = cx.reduce_scatter(width, partial)?;
        Ok(out.view_mut(0..own.len()).copy_from(backend, partial.view(own))?)
    }

    /// Adds the gradient of the table, unless it is frozen, given the gradient of the residual stream.
    pub fn backward<B: Backend>(
        &self,
        cx: &mut BackwardContext<'_, B>,
        ids: View<'_, B, u32>,
        d: &ActivationGradients<B>,
        gathered: &mut Option<AnyBuffer<B>>,
    ) -> Result<()> {
        let _span = span::enter("embedding");
        cx.gradients.clear_stale(cx.forward.backend, &self.table)?;
        cx.gradients.mark_written(self.table.buffer);
        let rows = cx.vocabulary(self.vocabulary);
        let d_out = cx.forward.all_gather(self.width, &d.residual, gathered)?;
        let backend = cx.forward.backend;
        let Some(d_table) = cx.gradients.gradients_mut(&self.table) else { return Ok(()) };
        for_element!(T: d_out.element(), G: d_table.element() => {
            backend.embedding_backward::<T, G>(EmbeddingBackward {
                width: self.width,
                rows,
                ids: B::reborrow(ids),
                d_out: d_out.typed(),
                d_table: d_table.typed(),
            })
        })?;
        Ok(())
    }
}
