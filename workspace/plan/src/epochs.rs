//! How often a run reads its token files.

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

    /// The sources of all stages of `recipe`, whose training data is `data`. Samples that the run has
    /// passed over count as drawn.
    pub fn of_run(recipe: &Recipe, data: &TrainingData, passed_over: u64) -> Vec<Self> {
        let length = data.sequence_length();
        let samples = recipe
            .stages
            .iter()
            .map(|stage| stage.num_steps().saturating_mul(stage.batch_sequences(length)));
        let drawn = data.samples_by_source(samples.fold(passed_over, u64::saturating_add));
        let sources = data.files().iter().zip(drawn).enumerate();
        let of_source =
            |(index, (file, drawn)): (usize, (&moh_data::TokenFile, u64))| SourceEpochs {
                path: file.prefix().to_owned(),
                tokens_drawn: drawn.saturating_mul(length as u64),
                tokens: file.num_tokens(),
                epochs: drawn as f64 / data.num_windows(index) as f64,
            };
        sources.map(of_source).collect()
    }
}
