//! Text generation with a cache of keys and values: a Mixture-of-Head model computes the attention of each
//! token's active heads only.

mod batch;
mod heads;
mod packed;
mod pool;

use moh_kernels::Backend;

pub use batch::{BatchGenerator, BatchOptions, Chunk, SequenceId};
pub use heads::PassHeads;
pub(crate) use packed::PackedWeights;

use crate::{Error, Model, Result, Sampler};

/// Generates one sequence.
pub struct Generator<'a, B: Backend> {
    batch: BatchGenerator<'a, B>,
    sequence: Option<SequenceId>,
    position: usize,
    capacity: usize,
}

impl<'a, B: Backend> Generator<'a, B> {
    /// Allocates the buffers of a sequence of up to `capacity` tokens.
    ///
    /// # Errors
    /// Fails if the device is out of memory, and if the model has fewer positions than `capacity` or is a part.
    pub fn new(model: &'a Model<B>, capacity: usize) -> Result<Self> {
        Self::with_options(model, capacity, BatchOptions::for_tokens(capacity))
    }

    /// Returns a generator with the given sizes of passes and blocks.
    pub fn with_options(
        model: &'a Model<B>,
        capacity: usize,
        options: BatchOptions,
    ) -> Result<Self> {
        if capacity > model.positions() {
            return Err(Error::too_long(capacity, model.positions()));
        }
        let (pass_tokens, blocks) = (options.pass_tokens.min(capacity), options.blocks);
        // There is no other sequence that could change this sequence's bits.
        let options = BatchOptions {
            pass_tokens: pass_tokens.max(1),
            blocks: blocks.max(1),
            independent: false,
            ..options
        };
        let batch = BatchGenerator::new(model, options)?;
        Ok(Generator { batch, sequence: None, position: 0, capacity })
    }

    /// Returns the number of tokens so far.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Appends tokens and returns the logits of the token after them, `[V]`.
    ///
    /// # Errors
    /// Fails without tokens, for a token outside the vocabulary, and if the capacity is exceeded.
    pub fn extend(&mut self, ids: &[u32]) -> Result<Vec<f32>> {
        let sequence = self.append(ids)?;
        self.batch.finish_waiting(sequence)
    }

    /// Appends tokens and chooses the next token on the device.
    pub fn next_token(&mut self, ids: &[u32], sampler: &mut Sampler) -> Result<u32> {
        let sequence = self.append(ids)?;
        self.batch.next_token(sequence, sampler)
    }

    fn append(&mut self, ids: &[u32]) -> Result<SequenceId> {
        let end = self.position + ids.len();
        if end > self.capacity || ids.is_empty() {
            return Err(Error::too_long(end, self.capacity));
        }
        let sequence = match self.sequence {
            None => self.batch.add(ids, 0)?,
            Some(sequence) => {
                self.batch.append(sequence, ids, ids.len() > 1)?;
                sequence
            }
        };
        (self.sequence, self.position) = (Some(sequence), end);
        Ok(sequence)
    }
}
