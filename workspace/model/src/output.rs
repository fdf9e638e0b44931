//! A model's output for whole sequences: logits, and the heads that each token used.

use moh_kernels::Backend;

use crate::{Activations, Error, LayerHeads, Model, PassShape, Recompute, Result, StepSums};

/// The logits of sequences of equal length, and the heads that each token used.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelOutput {
    /// Number of sequences.
    pub batch: usize,
    /// Tokens per sequence.
    pub length: usize,
    /// Size of the vocabulary.
    pub vocab_size: usize,
    /// `[batch, length, vocab_size]`.
    pub logits: Vec<f32>,
    /// For each layer `[batch, length, routed heads]`, 1 where the token selected the head; empty for a dense layer.
    /// The routed heads are the heads that are not shared, in ascending order ([`ModelOutput::heads`]).
    pub routed_mask: Vec<Vec<u8>>,
    /// The shared heads of each layer, and the number of routed heads that a token selects.
    pub heads: Vec<LayerHeads>,
}

impl ModelOutput {
    /// Returns the query heads of `layer` that the token at `position` used, in ascending order: shared and selected
    /// heads, or all heads of a dense layer.
    ///
    /// # Panics
    /// Panics if the layer, sequence or position was not computed.
    pub fn active_heads(&self, layer: usize, sequence: usize, position: usize) -> Vec<usize> {
        let (mask, shared) = (&self.routed_mask[layer], self.heads[layer].shared);
        let routed = mask.len() / (self.batch * self.length);
        assert!(sequence < self.batch && position < self.length, "no such token");
        let row = sequence * self.length + position;
        let mut of_token = mask[row * routed..][..routed].iter();
        let is_active = |head: &usize| shared.contains(*head) || of_token.next() == Some(&1);
        (0..shared.len() + routed).filter(is_active).collect()
    }
}

impl<B: Backend> Model<B> {
    /// Runs the model on sequences of token ids of equal length. Each call allocates its buffers; a
    /// [`crate::Generator`] keeps its buffers, and the keys and values of its tokens.
    ///
    /// # Errors
    /// Fails if the sequences differ in length, are empty or exceed the model's positions, or have an id outside the
    /// vocabulary. Also fails if the device is out of memory, or if the model is a part.
    pub fn run(&mut self, ids: &[Vec<u32>]) -> Result<ModelOutput> {
        let (batch, length) = (ids.len(), ids.first().map_or(0, Vec::len));
        if let Some(sequence) = ids.iter().position(|row| row.len() != length) {
            let tokens = ids[sequence].len();
            return Err(Error::Invalid(format!(
                "sequence {sequence} has {tokens} tokens, but sequence 0 has {length}: pad them at the end, or \
                 compute them one by one"
            )));
        }
        if length == 0 || length > self.positions() {
            return Err(Error::too_long(length, self.positions()));
        }
        let shape = PassShape::evaluation(batch, length, Recompute::Norms);
        let mut activations = Activations::new(self, shape)?;
        let flat = ids.concat();
        activations.upload(self.backend(), &flat, &flat, &[])?;
        self.forward(&mut activations, &mut StepSums::new(self.backend())?)?;
        let config = self.config();
        Ok(ModelOutput {
            batch,
            length,
            vocab_size: config.vocab_size,
            logits: self.logits(&activations)?,
            routed_mask: self.routed_mask(&activations)?,
            heads: (0..config.num_hidden_layers).map(|layer| config.layer_heads(layer)).collect(),
        })
    }
}
