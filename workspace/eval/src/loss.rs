//! The mean loss of a model over the windows of a token file.

use std::f64::consts::LN_2;

use moh_data::{TextTokenizer, Windows};
use moh_kernels::cross_entropy::IGNORED;
use moh_kernels::{Backend, Element};
use moh_model::{Activations, LossSums, Model, PassShape, Recompute};

use crate::Error;

/// What an evaluation found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Loss {
    /// Mean cross-entropy of the targets, in nats.
    pub loss: f64,
    /// Targets.
    pub tokens: u64,
    /// The loss in bits over the bytes of the decoded targets; `None` without a tokenizer.
    pub bits_per_byte: Option<f64>,
}

impl Loss {
    /// e^loss.
    pub fn perplexity(&self) -> f64 {
        self.loss.exp()
    }
}

/// The buffers of an evaluation, for batches of windows of one length.
///
/// A window of n tokens gives n - 1 targets, as Hugging Face counts them; the last batch is
/// filled up with windows that have none.
pub struct Evaluator<B: Backend, T: Element> {
    activations: Activations<B, T>,
    sums: LossSums<B>,
}

impl<B: Backend, T: Element> Evaluator<B, T> {
    /// Plans the buffers for `batch` windows of `length` tokens at a time.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn new(model: &Model<B, T>, batch: usize, length: usize) -> Result<Self, Error> {
        let shape = PassShape {
            batch,
            length,
            recompute: Recompute::Block,
            training: false,
            document_mask: false,
        };
        Ok(Evaluator {
            activations: Activations::new(model, shape)?,
            sums: LossSums::new(model.backend())?,
        })
    }

    /// The loss over the first `count` windows (all there are, when fewer). `progress` hears the
    /// number of windows done and of all.
    ///
    /// # Errors
    /// When the token file cannot be read or holds ids outside the vocabulary.
    pub fn evaluate(
        &mut self,
        model: &Model<B, T>,
        windows: &Windows,
        count: u64,
        tokenizer: Option<&TextTokenizer>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Loss, Error> {
        let shape = self.activations.shape();
        let count = count.min(windows.len());
        let mut ids = vec![0u32; shape.tokens()];
        let mut targets = vec![IGNORED; shape.tokens()];
        let (mut sum, mut tokens, mut bytes) = (0f64, 0u64, 0u64);
        let mut done = 0;
        while done < count {
            targets.fill(IGNORED);
            let batch = (count - done).min(shape.batch as u64) as usize;
            let rows = ids.chunks_exact_mut(shape.length).zip(targets.chunks_mut(shape.length));
            for (number, (ids, targets)) in (done..).zip(rows.take(batch)) {
                windows.read(number, ids)?;
                targets[..shape.length - 1].copy_from_slice(&ids[1..]);
                tokens += shape.length as u64 - 1;
                if let Some(tokenizer) = tokenizer {
                    bytes += tokenizer.decoded_bytes(&ids[1..])?;
                }
            }
            let backend = model.backend();
            self.activations.upload(backend, &ids, &targets, &[])?;
            backend.scope(|| model.evaluate(&mut self.activations, &mut self.sums))?;
            sum += self.sums.take(model.backend())?.0;
            done += batch as u64;
            progress(done, count);
        }
        let bits_per_byte = (bytes > 0).then(|| sum / LN_2 / bytes as f64);
        Ok(Loss { loss: sum / tokens.max(1) as f64, tokens, bits_per_byte })
    }
}
