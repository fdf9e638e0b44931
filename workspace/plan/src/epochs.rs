//! How often a run reads its token files.

use std::collections::BTreeMap;
use std::path::PathBuf;

use moh_data::TrainingData;
use moh_recipe::Recipe;

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
    /// Whether some sequences are read more than once.
    pub fn repeats(&self) -> bool {
        self.epochs > 1.0
    }

    /// The warning about a source that repeats.
    pub fn warning(&self) -> String {
        format!(
            "{} is read {:.2} times: add data, or lower the stages' tokens or the source's weight",
            self.path.display(),
            self.epochs
        )
    }

    /// The sources of all stages of `recipe`, whose training data are `data`, each file once.
    pub fn of_run(recipe: &Recipe, data: &[TrainingData]) -> Vec<Self> {
        // By number, with the samples drawn by the number of windows, which follows from the sequence length.
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
