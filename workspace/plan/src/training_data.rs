//! The training data of a recipe's stages.
//!
//! Samples are numbered over the whole run. Stages with the same sources, order and sequence length continue one
//! mixture: stages with other data between them do not use its samples. A file that several mixtures read in the same
//! windows continues too: no window is repeated before all windows have been read.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use moh_data::{Source, SourceStart, TokenFile, TrainingData};
use moh_recipe::Recipe;

use crate::Error;

/// Opens the training data of each stage of `recipe`, for a model with `vocab_size` rows of its embedding. A file
/// that several stages read is opened once.
///
/// # Errors
/// Fails if a file is missing or invalid, or shorter than one window.
pub fn open_training(recipe: &Recipe, vocab_size: usize) -> Result<Vec<TrainingData>, Error> {
    let numbers = recipe.file_numbers();
    let mut files: BTreeMap<u64, Arc<TokenFile>> = BTreeMap::new();
    let mut opened: Vec<TrainingData> = Vec::new();
    for (index, (stage, numbers)) in recipe.stages.iter().zip(&numbers).enumerate() {
        let data = recipe.stage_data(stage);
        let (length, seed) = (data.sequence_length, recipe.run.seed);
        let open = |source: usize, Source { path, .. }: &Source| {
            if let Some(file) = files.get(&numbers[source]) {
                return Ok(Arc::clone(file));
            }
            let mut file = TokenFile::open(path)?;
            file.limit_vocabulary(vocab_size);
            let file = Arc::new(file);
            files.insert(numbers[source], Arc::clone(&file));
            Ok(file)
        };
        let training = TrainingData::of_files(data.sources, length, data.order, seed, open)
            .map_err(|error| error.with_length(stage.data_key("sequence_length")))?;
        let start = |&number: &u64| SourceStart { number, windows: 0 };
        let (mut first, mut starts): (u64, Vec<_>) = (0, numbers.iter().map(start).collect());
        let mut samples = 0u64..0;
        for (stage, training) in recipe.stages[..index].iter().zip(&opened) {
            samples = samples.end..samples.end.saturating_add(recipe.num_samples(stage));
            let other = recipe.stage_data(stage);
            if other.has_samples_of(&data) {
                continue;
            }
            first = first.saturating_add(samples.end - samples.start);
            if !other.visits_windows_of(&data) {
                continue;
            }
            let drawn = training.samples_by_source(samples.clone());
            for (number, drawn) in training.file_numbers().zip(drawn) {
                for start in starts.iter_mut().filter(|start| start.number == number) {
                    start.windows = start.windows.saturating_add(drawn);
                }
            }
        }
        opened.push(training.beginning_at(first, starts).by_document(data.document_mask));
    }
    Ok(opened)
}

/// The part of a token file in a run.
#[derive(Debug, Clone, PartialEq)]
pub struct SourceEpochs {
    /// The path without `.bin` and `.idx`.
    pub path: PathBuf,
    /// Tokens that the stages draw from the file.
    pub tokens_drawn: u64,
    /// Tokens of the file.
    pub tokens: u64,
    /// Sequences drawn over the sequences of the file; above 1, sequences are repeated.
    pub epochs: f64,
}

impl SourceEpochs {
    /// Returns whether some sequences are read more than once.
    pub fn repeats(&self) -> bool {
        self.epochs > 1.0
    }

    /// Returns the warning about a source that repeats.
    pub fn warning(&self) -> String {
        format!(
            "{} is read {:.2} times: add data, or lower the stages' tokens or the source's weight",
            self.path.display(),
            self.epochs
        )
    }

    /// Returns the sources of all stages of `recipe`, each file once. `data` is the stages' training data.
    pub fn of_run(recipe: &Recipe, data: &[TrainingData]) -> Vec<Self> {
        // By file number, with the drawn samples by the number of windows, which follows from the sequence length.
        let mut sources: BTreeMap<u64, (Self, BTreeMap<u64, u64>)> = BTreeMap::new();
        let mut samples = 0u64..0;
        for (stage, data) in recipe.stages.iter().zip(data) {
            samples = samples.end..samples.end.saturating_add(recipe.num_samples(stage));
            let drawn = data.samples_by_source(samples.clone());
            let files = data.file_numbers().zip(data.files()).zip(drawn).enumerate();
            for (index, ((number, file), drawn)) in files {
                let (source, samples) = sources.entry(number).or_insert_with(|| {
                    let (path, tokens) = (file.prefix().to_owned(), file.num_tokens());
                    (SourceEpochs { path, tokens_drawn: 0, tokens, epochs: 0.0 }, BTreeMap::new())
                });
                let tokens = drawn.saturating_mul(data.sequence_length() as u64);
                source.tokens_drawn = source.tokens_drawn.saturating_add(tokens);
                let samples = samples.entry(data.num_windows(index)).or_insert(0);
                *samples = drawn.saturating_add(*samples);
            }
        }
        let with_epochs = |(source, samples): (Self, BTreeMap<u64, u64>)| {
            let epochs = samples.iter().map(|(&windows, &drawn)| drawn as f64 / windows as f64);
            SourceEpochs { epochs: epochs.sum(), ..source }
        };
        sources.into_values().map(with_epochs).collect()
    }
}
