//! The order of training data: sample number -> tokens, a pure function of the seed. There is no shuffle buffer and no
//! iterator state, so training resumes at any step, on any number of ranks, at no cost. `mixture.rs` selects the source
//! of a sample. Each source is divided into windows of sequence_length + 1 tokens that advance by sequence_length. Each
//! epoch visits every window once, in the order of a keyed permutation or front to back. Data that continue a run start
//! at a later sample, after the windows that earlier data have read.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::mapped::read_ahead;
use crate::mixture::Mixture;
use crate::permutation::{Permutation, key_of};
use crate::{Error, Result, TokenFile};

/// The version of the order in which several sources are mixed. Version 0.1.0 of this crate mixed them in another
/// order, version 0.
pub const ORDER_VERSION: u32 = 1;

/// One token file of a mixture.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// The token file's path without `.bin` and `.idx`.
    pub path: PathBuf,
    /// Weight of the file's tokens, relative to the other sources; default: 1.
    #[serde(default = "one")]
    pub weight: f64,
}

fn one() -> f64 {
    1.0
}

/// The order in which windows are visited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// A new permutation of each source's windows in every epoch, mixed by weight.
    #[default]
    Shuffled,
    /// Front to back, restarting at the end: documents are concatenated, as other trainers do.
    Sequential,
}

/// The start of a source's samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceStart {
    /// The number of the file, part of the key of its permutations. Without earlier data it is the source's index.
    pub number: u64,
    /// The windows that earlier data have read.
    pub windows: u64,
}

/// A mixture of token files in training order.
#[derive(Debug)]
pub struct TrainingData {
    files: Vec<Arc<TokenFile>>,
    starts: Vec<SourceStart>,
    /// The number of the mixture's first sample.
    first: u64,
    mixture: Mixture,
    sequence_length: usize,
    order: Order,
    seed: u64,
    /// Whether the first token of a document is excluded from the targets.
    by_document: bool,
}

impl TrainingData {
    /// Opens the token files. Reading an id of `vocab_size` or above is an error.
    pub fn open(
        sources: &[Source],
        sequence_length: usize,
        order: Order,
        seed: u64,
        vocab_size: usize,
    ) -> Result<Self> {
        Self::of_files(sources, sequence_length, order, seed, |_, source| {
            let mut file = TokenFile::open(&source.path)?;
            file.limit_vocabulary(vocab_size);
            Ok(Arc::new(file))
        })
    }

    /// Creates training data as [`TrainingData::open`], from the files that `open` returns for each index and source.
    pub fn of_files(
        sources: &[Source],
        sequence_length: usize,
        order: Order,
        seed: u64,
        mut open: impl FnMut(usize, &Source) -> Result<Arc<TokenFile>>,
    ) -> Result<Self> {
        if sequence_length == 0 {
            return Err(Error::argument("sequence_length", 0, "must be at least 1"));
        }
        let weights: Vec<_> =
            sources.iter().map(|source| (source.path.as_path(), source.weight)).collect();
        let mixture = Mixture::new(&weights, order, seed)?;
        let mut files = Vec::with_capacity(sources.len());
        for (index, source) in sources.iter().enumerate() {
            let file = open(index, source)?;
            if file.num_tokens() <= sequence_length as u64 {
                return Err(Error::TooShort {
                    path: source.path.clone(),
                    tokens: file.num_tokens(),
                    needed: sequence_length as u64 + 1,
                    length: "the sequence length".to_owned(),
                });
            }
            files.push(file);
        }
        let start = |number| SourceStart { number, windows: 0 };
        let starts = (0..files.len() as u64).map(start).collect();
        let by_document = false;
        Ok(Self { files, starts, first: 0, mixture, sequence_length, order, seed, by_document })
    }

    /// Returns the same data, for attention within documents if `by_document`. The first token of a document is not a
    /// target then, because no earlier token belongs to the document.
    pub fn by_document(self, by_document: bool) -> Self {
        Self { by_document, ..self }
    }

    /// Returns the same data with `first` as the number of its first sample, and sources that start at `starts`.
    ///
    /// # Panics
    /// If `starts` does not have one entry for each source.
    pub fn beginning_at(self, first: u64, starts: Vec<SourceStart>) -> Self {
        assert_eq!(starts.len(), self.files.len(), "one start for each source");
        Self { first, starts, ..self }
    }

    /// Returns the token files, in the order of the sources.
    pub fn files(&self) -> &[Arc<TokenFile>] {
        &self.files
    }

    /// Returns the number of each file; see [`SourceStart::number`].
    pub fn file_numbers(&self) -> impl Iterator<Item = u64> {
        self.starts.iter().map(|start| start.number)
    }

    /// Returns the tokens per sample that have a target.
    pub fn sequence_length(&self) -> usize {
        self.sequence_length
    }

    /// Returns the number of windows of a source: its samples in one epoch.
    ///
    /// # Panics
    /// If there is no such source.
    pub fn num_windows(&self, source: usize) -> u64 {
        (self.files[source].num_tokens() - 1) / self.sequence_length as u64
    }

    /// Counts the samples of each source among the sample numbers `samples`.
    pub fn samples_by_source(&self, samples: Range<u64>) -> Vec<u64> {
        let [before, until] = [samples.start, samples.end]
            .map(|number| self.mixture.counts(number.saturating_sub(self.first)));
        until.iter().zip(before).map(|(until, before)| until.saturating_sub(before)).collect()
    }

    /// Returns the source of sample `number`, and the position of its first token in that source.
    pub fn locate(&self, number: u64) -> (usize, u64) {
        let (source, index) = self.mixture.locate(number.saturating_sub(self.first));
        let start = self.starts[source];
        let (index, windows) = (index.saturating_add(start.windows), self.num_windows(source));
        let (epoch, place) = (index / windows, index % windows);
        let window = match self.order {
            Order::Sequential => place,
            Order::Shuffled => {
                let key = key_of(&[self.seed, start.number, epoch]);
                Permutation::new(windows, key).apply(place)
            }
        };
        (source, window * self.sequence_length as u64)
    }

    /// Reads the mask of sample `number`: 1 for each token that is trained on, 0 for the others. `mask` has
    /// `sequence_length + 1` bytes. Returns whether a byte may be 0.
    pub fn mask(&self, number: u64, mask: &mut [u8]) -> Result<bool> {
        let (source, start) = self.locate(number);
        let file = &self.files[source];
        file.read_mask(start, mask)?;
        if self.by_document {
            for first in file.document_starts(start..start + mask.len() as u64)? {
                // Inside the window, so the index fits usize.
                mask[(first - start) as usize] = 0;
            }
        }
        Ok(self.by_document || file.has_mask())
    }

    /// Counts the targets of these samples that are trained on: the tokens after the first token of each sample, except
    /// tokens that [`TrainingData::mask`] excludes. Returns `None` if nothing excludes tokens: all targets are trained
    /// on.
    pub fn trained_targets(&self, samples: Range<u64>) -> Result<Option<u64>> {
        if !self.by_document && !self.files.iter().any(|file| file.has_mask()) {
            return Ok(None);
        }
        let mut count = 0;
        let mut mask = vec![0; self.sequence_length + 1];
        for number in samples {
            if self.by_document {
                self.mask(number, &mut mask)?;
                count += mask[1..].iter().filter(|&&trained| trained != 0).count() as u64;
                continue;
            }
            let (source, start) = self.locate(number);
            let targets = start + 1..start + 1 + self.sequence_length as u64;
            count += self.files[source].count_trained(targets)?;
        }
        Ok(Some(count))
    }

    /// Asks the system to read the masks of these samples from the disk, without waiting.
    pub fn read_masks_ahead(&self, samples: Range<u64>) {
        if !self.files.iter().any(|file| file.has_mask()) {
            return;
        }
        for number in samples {
            let (source, start) = self.locate(number);
            if let Some(mask) = self.files[source].mask() {
                read_ahead(mask.bytes(), start, self.sequence_length as u64 + 1);
            }
        }
    }

    /// Asks the system to read the tokens of these samples from the disk, without waiting.
    pub fn read_ahead(&self, samples: Range<u64>) {
        for number in samples {
            let (source, start) = self.locate(number);
            self.files[source].read_ahead(start, self.sequence_length as u64 + 1);
        }
    }

    /// Reads sample `number`: `sequence_length + 1` tokens. The last token is only a target.
    ///
    /// `document_start` receives, for each of the `sequence_length` positions, the position in the
    /// window at which its document starts, for attention within documents. A document that began
    /// before the window starts at 0.
    ///
    /// # Panics
    /// If a slice has the wrong length.
    pub fn sample(
        &self,
        number: u64,
        tokens: &mut [u32],
        document_start: Option<&mut [u32]>,
    ) -> Result<()> {
        assert_eq!(tokens.len(), self.sequence_length + 1, "inputs and one last target");
        let (source, start) = self.locate(number);
        let file = &self.files[source];
        file.read(start, tokens)?;
        let Some(document_start) = document_start else {
            return Ok(());
        };
        assert_eq!(document_start.len(), self.sequence_length, "one entry for each input");
        document_start.fill(0);
        for first in file.document_starts(start..start + self.sequence_length as u64)? {
            // Inside the window, so the index fits usize.
            let at = (first - start) as usize;
            document_start[at..].fill(at as u32);
        }
        Ok(())
    }
}
