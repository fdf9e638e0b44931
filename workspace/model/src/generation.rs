//! Text generation, token by token, with a cache of keys and values: a Mixture-of-Head model
//! computes the attention of each token's active heads only.

use moh_kernels::{Backend, Element};

use crate::Error;
use crate::activations::{Blocks, PassShape, Recompute};
use crate::layers::{LayerCache, Normed, Scratch, Tokens};
use crate::model::Model;

/// Prompt tokens per pass.
const CHUNK_TOKENS: usize = 512;

/// A sequence that is being generated.
pub struct Generator<'a, B: Backend, T: Element> {
    model: &'a Model<B, T>,
    cache: Vec<LayerCache<B, T>>,
    ids: B::Buffer<u32>,
    stream: [B::Buffer<T>; 2],
    blocks: Blocks<B, T>,
    scratch: Scratch<B, T>,
    normed: Normed<B, T>,
    position: usize,
    capacity: usize,
}

impl<'a, B: Backend, T: Element> Generator<'a, B, T> {
    /// Allocates the buffers of a sequence of up to `capacity` tokens; the model must have as many
    /// positions.
    ///
    /// # Errors
    /// Fails if the device is out of memory or the model has fewer positions; [`Error::Divided`] if
    /// the model is a part.
    pub fn new(model: &'a Model<B, T>, capacity: usize) -> Result<Self, Error> {
        if !model.is_whole() {
            return Err(Error::Divided);
        }
        if capacity > model.positions() {
            return Err(Error::TooLong { tokens: capacity, positions: model.positions() });
        }
        let (backend, config) = (&model.backend, &model.config);
        let chunk = capacity.clamp(1, CHUNK_TOKENS);
        let cached = capacity * config.key_value_width();
        let layer = || {
            Ok(LayerCache { keys: backend.allocate(cached)?, values: backend.allocate(cached)? })
        };
        let width = chunk * config.hidden_size;
        let sizes = model.pass_sizes(PassShape {
            batch: 1,
            length: chunk,
            recompute: Recompute::Block,
            training: false,
            document_mask: false,
        })?;
        Ok(Generator {
            model,
            cache: (0..config.num_hidden_layers).map(|_| layer()).collect::<Result<_, Error>>()?,
            ids: backend.allocate(chunk)?,
            stream: [backend.allocate(width)?, backend.allocate(width)?],
            blocks: Blocks::new(backend, &sizes, config.num_hidden_layers)?,
            scratch: Scratch::new(backend, &sizes)?,
            normed: Normed::new(backend, &sizes)?,
            position: 0,
            capacity,
        })
    }

    /// The tokens so far.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Appends tokens and returns the logits of the token after them, `[V]`.
    ///
    /// # Errors
    /// Fails without tokens, for a token outside the vocabulary, and if the capacity is exceeded.
    pub fn extend(&mut self, ids: &[u32]) -> Result<Vec<f32>, Error> {
        let end = self.position + ids.len();
        if end > self.capacity || ids.is_empty() {
            return Err(Error::TooLong { tokens: end, positions: self.capacity });
        }
        let model = self.model;
        model.backend.install(|| {
            let mut last = 0;
            for chunk in ids.chunks(CHUNK_TOKENS) {
                self.pass(chunk)?;
                last = chunk.len() - 1;
            }
            let width = model.config.hidden_size;
            model.project(B::view(&self.normed.y, last * width..(last + 1) * width), 1, true)
        })
    }

    /// One pass over at most [`CHUNK_TOKENS`] tokens, up to the final norm.
    fn pass(&mut self, ids: &[u32]) -> Result<(), Error> {
        let (model, n) = (self.model, ids.len());
        let cx = model.context(Tokens {
            shape: model.qkv_shape(1, n),
            first_position: self.position,
            document_start: None,
            independent: true,
        });
        let (layers, gathered) = (&model.layers, &mut self.scratch.gathered);
        cx.backend.upload(ids, B::view_mut(&mut self.ids, 0..n))?;
        layers.embedding.forward(&cx, B::view(&self.ids, 0..n), &mut self.stream[0], gathered)?;
        for (block, cache) in layers.blocks.iter().zip(&mut self.cache) {
            let [input, output] = &mut self.stream;
            // Nothing is saved for a backward pass: the blocks share their buffers.
            let buffers = self.blocks.buffers(0, &mut self.scratch);
            block.forward(&cx, input, buffers, Some(cache), output)?;
            self.stream.swap(0, 1);
        }
        layers.final_norm.forward(&cx, &self.stream[0], &mut self.normed)?;
        self.position += n;
        Ok(())
    }
}
