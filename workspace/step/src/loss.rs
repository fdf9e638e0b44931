//! The mean loss of a model over the windows of a token file.
//!
//! The loss over the first two windows:
//!
//! ```
//! use moh_data::{TokenFile, Windows};
//! use moh_hf::StoredModel;
//! use moh_kernels::{Cpu, ElementType};
//! use moh_step::{EvaluationText, Evaluator};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # std::env::set_current_dir("../..")?;
//! let stored = StoredModel::open("recipes/quickstart".as_ref())?;
//! let mut model = stored.load(Cpu, ElementType::F32, 64)?;
//! let file = TokenFile::open("recipes/quickstart/voyage-valid".as_ref())?;
//! let windows = Windows::new(file, 64)?;
//!
//! let text = EvaluationText { windows: &windows, count: 2, decoded_bytes: None };
//! let mut evaluator = Evaluator::new(&model, 2, windows.length())?;
//! let loss = evaluator.evaluate(&mut model, text, None, &mut |_, _| {})?;
//! assert!(loss.tokens == 2 * 63 && loss.loss > 0.0);
//! # Ok(())
//! # }
//! ```

use std::f64::consts::LN_2;
use std::ops::{ControlFlow, Range};

use moh_data::Windows;
use moh_kernels::cross_entropy::IGNORED;
use moh_kernels::{Backend, Memory, Purpose, Workspace};
use moh_model::router::RoutingStatistics;
use moh_model::{Activations, Model, PassShape, PassSizes, Recompute, Shard, Slots, StepSums};

use crate::{Error, Result};

/// The result of an evaluation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Loss {
    /// Mean cross-entropy of the targets, in nats.
    pub loss: f64,
    /// Number of targets that no mask leaves out.
    pub tokens: u64,
    /// The loss in bits per byte of the decoded targets; `None` if their bytes are not counted.
    pub bits_per_byte: Option<f64>,
}

impl Loss {
    /// Returns the exponential of the loss.
    pub fn perplexity(&self) -> f64 {
        self.loss.exp()
    }
}

/// Counts the bytes of decoded targets.
pub type DecodedBytes<'a> = dyn Fn(&[u32]) -> Result<u64> + 'a;

/// The text of an evaluation.
#[derive(Clone, Copy)]
pub struct EvaluationText<'a> {
    /// The windows of the text.
    pub windows: &'a Windows,
    /// Number of windows to evaluate, from the first on; all windows if there are fewer.
    pub count: u64,
    /// Counts the bytes of the targets of a window.
    pub decoded_bytes: Option<&'a DecodedBytes<'a>>,
}

/// Sums over batches of windows.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LossSums {
    /// Cross-entropy summed over the targets, in nats.
    pub cross_entropy: f64,
    /// Number of targets.
    pub tokens: u64,
    /// Bytes of the decoded targets; 0 if they are not counted.
    pub bytes: u64,
}

impl LossSums {
    /// Divides the sums into means. Without a target the loss is NaN.
    pub fn loss(&self) -> Loss {
        let LossSums { cross_entropy, tokens, bytes } = *self;
        let bits_per_byte = (bytes > 0).then(|| cross_entropy / LN_2 / bytes as f64);
        Loss { loss: cross_entropy / tokens as f64, tokens, bits_per_byte }
    }
}

/// Decides whether an evaluation continues, given the windows done and their total.
pub type GoOn<'a, E> = dyn FnMut(u64, u64) -> Result<ControlFlow<()>, E> + 'a;

/// The tokens of a batch, and the target after each token.
struct Tokens {
    ids: Vec<u32>,
    targets: Vec<u32>,
    /// For each token of a window, whether it is trained on.
    mask: Vec<u8>,
}

/// The buffers of an evaluation, for batches of windows of one length.
///
/// A window of n tokens has n - 1 targets, as in Hugging Face; the last batch is padded with
/// windows without targets.
pub struct Evaluator<B: Memory> {
    activations: Activations<B>,
    sums: StepSums<B>,
}

impl<M: Workspace> Evaluator<M> {
    /// Allocates the buffers of an evaluation, for `batch` windows of `length` tokens at a time. `part` describes the
    /// passes of the model's part.
    pub fn of_part(memory: &M, part: PassSizes<'_>, batch: usize, length: usize) -> Result<Self> {
        let sizes = part.of_pass(pass_shape(batch, length));
        memory.for_purpose(Purpose::Evaluation, || {
            Ok(Evaluator {
                activations: Activations::with_slots(memory, &sizes, Slots::ONE)?,
                sums: StepSums::new(memory)?,
            })
        })
    }
}

fn pass_shape(batch: usize, length: usize) -> PassShape {
    PassShape::evaluation(batch, length, Recompute::Block)
}

impl<B: Backend + Clone> Evaluator<B> {
    /// Allocates buffers for `batch` windows of `length` tokens each.
    pub fn new(model: &Model<B>, batch: usize, length: usize) -> Result<Self> {
        let sizes = model.pass_sizes(pass_shape(batch, length))?;
        Self::of_part(model.backend(), sizes, batch, length)
    }

    /// Returns the loss over the windows of `text`. Calls `progress` with the number of windows done and their total.
    ///
    /// # Errors
    /// Fails if the token file cannot be read or has ids outside the vocabulary.
    pub fn evaluate(
        &mut self,
        model: &mut Model<B>,
        text: EvaluationText<'_>,
        routing: Option<&mut RoutingStatistics>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Loss> {
        let mut go_on = |done, total| {
            progress(done, total);
            Ok::<_, Error>(ControlFlow::Continue(()))
        };
        let sums = self.evaluate_share(model, text, Shard::WHOLE, routing, &mut go_on)?;
        let count = text.count.min(text.windows.len());
        progress(count, count);
        // `go_on` never breaks here.
        Ok(sums.unwrap_or_default().loss())
    }

    /// Returns this rank's contribution to the loss over the windows of `text`. Data-parallel ranks compute batches in
    /// turn. In a sharded model only the last stage's tensor rank 0 contributes. If `routing` is given, also adds this
    /// rank's contribution to these statistics.
    ///
    /// Calls `go_on` before each round of batches, with the windows that all ranks have done and their total. In a
    /// round each data-parallel rank has at most one batch. Every rank calls `go_on` equally often, so that it may
    /// communicate. If `go_on` breaks, which it must do on all ranks in the same round, returns `None`.
    pub fn evaluate_share<E: From<Error>>(
        &mut self,
        model: &mut Model<B>,
        text: EvaluationText<'_>,
        shard: Shard,
        mut routing: Option<&mut RoutingStatistics>,
        go_on: &mut GoOn<'_, E>,
    ) -> Result<Option<LossSums>, E> {
        let shape = self.activations.shape();
        let (count, batch) = (text.count.min(text.windows.len()), shape.batch as u64);
        let mut tokens = Tokens {
            ids: vec![0u32; shape.tokens()],
            targets: vec![IGNORED; shape.tokens()],
            mask: vec![1; shape.length],
        };
        let (mut sums, mut round) = (LossSums::default(), 0u64);
        while round < count {
            if go_on(round, count)?.is_break() {
                return Ok(None);
            }
            let start = round + batch * shard.rank as u64;
            if start < count {
                let windows = start..count.min(start + batch);
                let routing = routing.as_deref_mut();
                self.add_batch(model, text, windows, &mut tokens, &mut sums, routing)?;
            }
            round += batch * shard.size as u64;
        }
        Ok(Some(sums))
    }

    fn add_batch(
        &mut self,
        model: &mut Model<B>,
        EvaluationText { windows, decoded_bytes, .. }: EvaluationText<'_>,
        batch: Range<u64>,
        Tokens { ids, targets, mask }: &mut Tokens,
        sums: &mut LossSums,
        routing: Option<&mut RoutingStatistics>,
    ) -> Result<()> {
        let shape = self.activations.shape();
        targets.fill(IGNORED);
        let num_tokens = (batch.end - batch.start) as usize * shape.length;
        let rows = ids.chunks_exact_mut(shape.length).zip(targets.chunks_mut(shape.length));
        let counts = model.parallel().counts_losses();
        let reads = self.activations.read_tokens();
        for (number, (ids, targets)) in batch.zip(rows).filter(|_| reads) {
            windows.read(number, ids).map_err(Error::samples)?;
            windows.read_mask(number, mask).map_err(Error::samples)?;
            let all = targets.iter_mut().zip(&ids[1..]).zip(&mask[1..]);
            all.filter(|(_, mask)| **mask == 1).for_each(|((target, id), _)| *target = *id);
            if !counts {
                continue;
            }
            let counted: Vec<u32> =
                targets.iter().copied().filter(|&target| target != IGNORED).collect();
            sums.tokens += counted.len() as u64;
            if let Some(decoded_bytes) = decoded_bytes {
                sums.bytes += decoded_bytes(&counted)?;
            }
        }
        let backend = model.backend().clone();
        self.activations.upload(&backend, ids, targets, &[])?;
        let Evaluator { activations, sums: on_device } = self;
        let routed = routing.map(|statistics| (statistics, num_tokens));
        backend.install(|| model.evaluate(activations, on_device, routed))?;
        sums.cross_entropy += self.sums.take(&backend)?.cross_entropy;
        Ok(())
    }
}
