//! The embedding, forward and backward, over a rank's local rows of the vocabulary.

use moh_kernels::embedding::{EmbeddingBackward, EmbeddingForward};
use moh_kernels::{Backend, Element, span};

use crate::Error;
use crate::layout::ModelLayout;
use crate::model::Model;
use crate::parameters::FlatBuffers;

impl<B: Backend, T: Element> Model<B, T> {
    /// The embedding of this rank's local tokens.
    pub(crate) fn embed(
        &self,
        tokens: usize,
        ids: &B::Buffer<u32>,
        stream: &mut B::Buffer<T>,
        gathered: &mut Option<B::Buffer<T>>,
    ) -> Result<(), Error> {
        let _span = span::enter("embedding");
        let (backend, width) = (&self.backend, self.config.hidden_size);
        let rows = self.parallel.part().tensor.vocabulary(&self.config);
        let (ids, table) = (B::whole(ids), self.weights_of(ModelLayout::EMBEDDING));
        let Some(partial) = gathered else {
            let out = B::whole_mut(stream);
            let embedding = EmbeddingForward { width, rows, ids, table, out };
            return Ok(backend.embedding_forward(embedding)?);
        };
        let out = B::view_mut(partial, 0..tokens * width);
        backend.embedding_forward(EmbeddingForward { width, rows, ids, table, out })?;
        let local = self.reduce_scatter(tokens, partial)?;
        let into = B::view_mut(stream, 0..local.len());
        Ok(backend.copy(B::view(partial, local), into)?)
    }

    /// Adds the gradient of the embedding, given the residual stream's.
    pub(crate) fn embed_backward<G: Element>(
        &self,
        tokens: usize,
        ids: &B::Buffer<u32>,
        d_stream: &B::Buffer<T>,
        gathered: &mut Option<B::Buffer<T>>,
        gradients: &mut FlatBuffers<B, G>,
    ) -> Result<(), Error> {
        let _span = span::enter("embedding");
        let flat = ModelLayout::EMBEDDING;
        let used = self.layout.flats[flat].used();
        gradients.clear_stale(&self.backend, flat, used.clone())?;
        gradients.mark_written(flat);
        self.backend.embedding_backward(EmbeddingBackward {
            width: self.config.hidden_size,
            rows: self.parallel.part().tensor.vocabulary(&self.config),
            ids: B::whole(ids),
            d_out: self.gather(tokens, d_stream, gathered)?,
            d_table: gradients.view_mut(flat, used),
        })?;
        Ok(())
    }
}
