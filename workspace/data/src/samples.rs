//! The order of training data: sample number -> tokens, a pure function of the seed. No shuffle
//! buffer and no iterator state, so a training resumes at any step, on any number of ranks, at no
//! cost. Which source a sample comes from is decided in `mixture.rs`; each source is cut in
//! windows of sequence_length + 1 that advance by sequence_length, and each of its epochs visits
//! every window once, in the order of a keyed permutation or front to back.

use std::path::PathBuf;

use crate::mixture::Mixture;
use crate::permutation::{Permutation, key_of};
use crate::{Error, Result, TextTokenizer, TokenFile};

/// One token file of a mixture.
#[derive(Clone, Debug, PartialEq)]
pub struct Source {
    /// The token file's path without its endings.
    pub path: PathBuf,
    /// Its share, relative to the others'.
    pub weight: f64,
}

/// The order in which windows are visited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Order {
    /// A new permutation of each source's windows for each of its epochs.
    #[default]
    Shuffled,
    /// Front to back, starting over at the end.
    Sequential,
}

/// Token files, mixed and ordered.
#[derive(Debug)]
pub struct TrainingData {
    files: Vec<TokenFile>,
    mixture: Mixture,
    sequence_length: usize,
    order: Order,
    seed: u64,
}

impl TrainingData {
    /// Opens the token files; ids that are not under `vocab_size` are errors when read.
    ///
    /// Fails when a file is unsound or shorter than one window, or when a weight is not a
    /// positive number.
    pub fn open(
        sources: &[Source],
        sequence_length: usize,
        order: Order,
        seed: u64,
        vocab_size: usize,
    ) -> Result<Self> {
        if sequence_length == 0 {
            return Err(Error::Argument {
                name: "sequence_length",
                value: 0,
                reason: "must be at least 1".to_owned(),
            });
        }
        let weights: Vec<_> =
            sources.iter().map(|source| (source.path.as_path(), source.weight)).collect();
        let mixture = Mixture::new(&weights, order, seed)?;
        let mut files = Vec::with_capacity(sources.len());
        for source in sources {
            let mut file = TokenFile::open(&source.path)?;
            file.limit_vocabulary(vocab_size);
            if file.num_tokens() <= sequence_length as u64 {
                return Err(Error::TooShort {
                    path: source.path.clone(),
                    tokens: file.num_tokens(),
                    needed: sequence_length as u64 + 1,
                });
            }
            files.push(file);
        }
        Ok(Self { files, mixture, sequence_length, order, seed })
    }

    /// The token files, in the order of the sources.
    pub fn files(&self) -> &[TokenFile] {
        &self.files
    }

    /// Tokens of a sample that have a target.
    pub fn sequence_length(&self) -> usize {
        self.sequence_length
    }

    /// Windows of a source, that is, samples of one of its epochs.
    ///
    /// # Panics
    /// When there is no such source.
    pub fn num_windows(&self, source: usize) -> u64 {
        (self.files[source].num_tokens() - 1) / self.sequence_length as u64
    }

    /// Fails when a source records another tokenizer than this one.
    pub fn check_tokenizer(&self, tokenizer: &TextTokenizer) -> Result<()> {
        self.files.iter().try_for_each(|file| file.check_tokenizer(tokenizer))
    }

    /// The source of sample `number`, and the position of its first token in that source.
    pub fn locate(&self, number: u64) -> (usize, u64) {
        let (source, index) = self.mixture.locate(number);
        let windows = self.num_windows(source);
        let (epoch, place) = (index / windows, index % windows);
        let window = match self.order {
            Order::Sequential => place,
            Order::Shuffled => {
                let key = key_of(&[self.seed, source as u64, epoch]);
                Permutation::new(windows, key).apply(place)
            }
        };
        (source, window * self.sequence_length as u64)
    }

    /// Reads sample `number`: `sequence_length + 1` tokens, of which the last is only a target.
    ///
    /// `document_start` receives, for each of the `sequence_length` positions, where in the window its
    /// document starts: what attention that stops at document bounds needs. The document that
    /// was already running at the window's start counts from 0.
    ///
    /// Fails on an id outside the vocabulary.
    ///
    /// # Panics
    /// When a slice has another length.
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
            // Inside the window, whose length is a usize.
            let at = (first - start) as usize;
            document_start[at..].fill(at as u32);
        }
        Ok(())
    }
}
