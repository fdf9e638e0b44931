//! The samples of a step: the source of its tokens, and a micro-batch of them on the host.

use std::ops::Range;

use moh_kernels::cross_entropy::IGNORED;

use crate::{Result, StepConfig};

/// Reads the samples of a step. Closures implement it.
pub trait ReadSample {
    /// Writes sample `number`: to `window` a sequence and the token after it. With a document mask, writes to
    /// `document_start` the position in the window at which each token's document starts.
    fn read_sample(
        &self,
        number: u64,
        window: &mut [u32],
        document_start: Option<&mut [u32]>,
    ) -> Result<()>;

    /// Writes for each token in the window of sample `number` whether it is trained on: 1, otherwise 0. Returns whether
    /// any entry may be 0. A token with 0 is not a target. By default returns false and writes nothing: all tokens are
    /// trained on.
    fn read_mask(&self, number: u64, mask: &mut [u8]) -> Result<bool> {
        let _ = (number, mask);
        Ok(false)
    }

    /// Returns the number of targets in the samples of a step, of all ranks, that are trained on. Returns `None`, the
    /// default, if all are.
    fn trained_targets(&self, samples: Range<u64>) -> Result<Option<u64>> {
        let _ = samples;
        Ok(None)
    }

    /// Prepares for the samples that this rank reads next, so that they can be loaded meanwhile.
    fn read_ahead(&self, samples: Range<u64>) {
        let _ = samples;
    }
}

impl<F> ReadSample for F
where
    F: Fn(u64, &mut [u32], Option<&mut [u32]>) -> Result<()>,
{
    fn read_sample(
        &self,
        number: u64,
        window: &mut [u32],
        document_start: Option<&mut [u32]>,
    ) -> Result<()> {
        self(number, window, document_start)
    }
}

pub(crate) struct HostBatch {
    window: Vec<u32>,
    pub ids: Vec<u32>,
    pub targets: Vec<u32>,
    /// For the tokens of a window.
    mask: Vec<u8>,
    pub document_start: Vec<u32>,
}

impl HostBatch {
    /// Allocates a micro-batch of the sizes in `config`.
    pub fn new(config: &StepConfig) -> Self {
        let length = config.sequence_length;
        let tokens = config.micro_batch * length;
        HostBatch {
            window: vec![0; length + 1],
            ids: vec![0; tokens],
            targets: vec![0; tokens],
            mask: vec![1; length + 1],
            document_start: vec![0; if config.document_mask { tokens } else { 0 }],
        }
    }

    /// Reads the samples from `first` on, one sample for each sequence.
    pub fn read(&mut self, length: usize, read: &impl ReadSample, first: u64) -> Result<()> {
        let sequences =
            self.ids.chunks_exact_mut(length).zip(self.targets.chunks_exact_mut(length));
        for (index, (ids, targets)) in sequences.enumerate() {
            // Empty without a document mask.
            let document_start = self.document_start.get_mut(index * length..(index + 1) * length);
            read.read_sample(first + index as u64, &mut self.window, document_start)?;
            ids.copy_from_slice(&self.window[..length]);
            targets.copy_from_slice(&self.window[1..]);
            if read.read_mask(first + index as u64, &mut self.mask)? {
                for (target, &mask) in targets.iter_mut().zip(&self.mask[1..]) {
                    if mask == 0 {
                        *target = IGNORED;
                    }
                }
            }
        }
        Ok(())
    }
}
