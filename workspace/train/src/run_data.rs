//! The texts of a run: training data, validation data, and the tokenizer that prepared both.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use moh_checkpoint::run_log::EvaluatedText;
use moh_data::{
    DocumentEnd, TokenDecoder, TokenFile, TokenizerFile, TokenizerMatch, TrainingData, Windows,
};
use moh_plan::open_training;
use moh_recipe::shell::shell_word;
use moh_recipe::{Recipe, ValidationSet, validation_key};
use moh_step::ReadSample;

use crate::source::ModelSource;
use crate::{Error, Result};

/// The key of the windows' length.
const LENGTH: &str = "data.sequence_length";

pub(crate) struct ValidationText {
    /// Its key in the recipe.
    pub key: String,
    pub windows: Windows,
    /// The evaluated text: its content is known once the run's inputs are settled, its targets after an evaluation.
    pub evaluated: EvaluatedText,
}

struct SampleReader<'a>(&'a TrainingData);

impl ReadSample for SampleReader<'_> {
    fn read_sample(
        &self,
        number: u64,
        window: &mut [u32],
        document_start: Option<&mut [u32]>,
    ) -> Result<(), moh_step::Error> {
        let read = self.0.sample(number, window, document_start);
        read.map_err(moh_step::Error::samples)
    }

    fn read_mask(&self, number: u64, mask: &mut [u8]) -> Result<bool, moh_step::Error> {
        self.0.mask(number, mask).map_err(moh_step::Error::samples)
    }

    fn trained_targets(&self, samples: Range<u64>) -> Result<Option<u64>, moh_step::Error> {
        // The masks of the next step are read while this step is computed.
        let next = samples.end..samples.end.saturating_add(samples.end - samples.start);
        self.0.read_masks_ahead(next);
        self.0.trained_targets(samples).map_err(moh_step::Error::samples)
    }

    fn read_ahead(&self, samples: Range<u64>) {
        self.0.read_ahead(samples);
    }
}

/// The opened data, checked for the same tokenizer.
pub(crate) struct RunData {
    /// The training data of each stage.
    pub training: Vec<TrainingData>,
    /// The token files of training, each once, with their keys in the recipe.
    pub training_files: Vec<(String, Arc<TokenFile>)>,
    /// The validation sets, in the recipe's order.
    pub validation: Vec<ValidationText>,
    /// Counts the bytes of targets; `None` if the model has no tokenizer, or a tokenizer with an unknown decoder.
    pub decoder: Option<TokenDecoder>,
    /// Remarks for the user on the tokenizer, and on its match with the token files.
    pub tokenizer_remarks: Vec<String>,
}

impl RunData {
    /// Opens the data of `recipe`. Fails if a file is missing or invalid, shorter than one window, or prepared with a
    /// different tokenizer.
    pub(crate) fn open(recipe: &Recipe, source: &ModelSource) -> Result<Self> {
        let vocab_size = source.config.vocab_size;
        let training = open_training(recipe, vocab_size)?;
        let validation = open_validation(recipe, vocab_size)?;
        let training_files = training_files(recipe, &training);
        let (decoder, tokenizer_remarks) = (None, Vec::new());
        let mut data = RunData { training, training_files, validation, decoder, tokenizer_remarks };
        if let Some(tokenizer) = source.tokenizer()? {
            data.tokenizer_remarks = data.check_tokenizer(&tokenizer)?;
            data.tokenizer_remarks.extend_from_slice(tokenizer.remarks());
            data.decoder = tokenizer.decoder();
            if data.decoder.is_none() && !data.validation.is_empty() {
                data.tokenizer_remarks.push(format!(
                    "{}: has a decoder that training does not know, so losses have no bits per byte: moh-eval loss \
                     has them",
                    tokenizer.path().display()
                ));
            }
        }
        Ok(data)
    }

    /// Compares the tokenizer with the tokenizer of each token file. Returns remarks for the user.
    fn check_tokenizer(&self, tokenizer: &TokenizerFile) -> Result<Vec<String>> {
        let mut files: BTreeMap<TokenizerMatch, BTreeSet<&Path>> = BTreeMap::new();
        let mut others: BTreeMap<&Path, String> = BTreeMap::new();
        let (hash, vocab_size) = (tokenizer.hash(), tokenizer.vocab_size());
        for (_, file) in self.token_files() {
            let content = || Ok::<_, Error>(tokenizer.content());
            match file.compare_tokenizer(hash, vocab_size, content)? {
                Ok(found) => drop(files.entry(found).or_default().insert(file.prefix())),
                Err(difference) => drop(others.insert(file.prefix(), difference)),
            }
        }
        if let Some((prefix, difference)) = others.first_key_value() {
            let word = |path: &Path| shell_word(&path.to_string_lossy());
            let prefixes: Vec<String> = others.keys().map(|prefix| word(prefix)).collect();
            let reason = format!(
                "prepared with another tokenizer than {}: {difference}: use the tokenizer of the token file, prepare \
                 the text again with this one, or accept it if it gives the same ids on a sample of the text: moh-data \
                 accept --tokenizer {} {}",
                tokenizer.path().display(),
                word(tokenizer.path()),
                prefixes.join(" ")
            );
            return Err(moh_files::unusable(prefix, reason).into());
        }
        let remarks = files.iter().filter_map(|(found, files)| {
            let (remark, first) = (found.remark()?, files.first()?.display());
            let others = match files.len() - 1 {
                0 => String::new(),
                others => format!(" and {others} more"),
            };
            Some(format!("{}: {remark}: {first}{others}", tokenizer.path().display()))
        });
        Ok(remarks.collect())
    }

    /// Returns a reader of the samples of stage `index`.
    pub(crate) fn sample_reader(&self, index: usize) -> impl ReadSample + Send {
        SampleReader(&self.training[index])
    }

    /// Returns all token files with their keys in the recipe, training files first.
    pub(crate) fn token_files(&self) -> Vec<(String, &TokenFile)> {
        let sources = self.training_files.iter().map(|(key, file)| (key.clone(), &**file));
        let validation = self.validation.iter();
        let validation = validation.map(|set| (set.key.clone(), set.windows.file()));
        sources.chain(validation).collect()
    }

    pub(crate) fn training_windows(&self, recipe: &Recipe, vocab_size: usize) -> Result<Windows> {
        // A stage has at least one source.
        let prefix = self.training_files.first().map_or(Path::new(""), |(_, file)| file.prefix());
        open_windows(prefix, recipe, vocab_size)
    }

    /// Returns the token files that record documents without an end-of-text token, each once.
    pub(crate) fn without_end_of_text(&self) -> BTreeSet<&Path> {
        let validation = self.validation.iter().map(|set| set.windows.file());
        let files = self.training_files.iter().map(|(_, file)| &**file).chain(validation);
        let has_none = |file: &&TokenFile| {
            file.info().is_some_and(|info| info.eos_token == DocumentEnd::Nothing)
        };
        files.filter(has_none).map(TokenFile::prefix).collect()
    }
}

/// Returns the token files of all stages, each once, with their keys in the recipe.
fn training_files(recipe: &Recipe, training: &[TrainingData]) -> Vec<(String, Arc<TokenFile>)> {
    let mut files = BTreeMap::new();
    for (stage, data) in recipe.stages.iter().zip(training) {
        let sources = stage.data_key("sources");
        for (index, (number, file)) in data.file_numbers().zip(data.files()).enumerate() {
            files.entry(number).or_insert_with(|| (format!("{sources}.{index}"), Arc::clone(file)));
        }
    }
    files.into_values().collect()
}

fn open_validation(recipe: &Recipe, vocab_size: usize) -> Result<Vec<ValidationText>> {
    let sets = &recipe.data.validation;
    let open = |set: &ValidationSet| {
        let windows = open_windows(&set.path, recipe, vocab_size)?;
        let evaluated = EvaluatedText { content: String::new(), targets: 0 };
        Ok(ValidationText { key: validation_key(sets, set), windows, evaluated })
    };
    sets.iter().map(open).collect()
}

fn open_windows(prefix: &Path, recipe: &Recipe, vocab_size: usize) -> Result<Windows> {
    let mut file = TokenFile::open(prefix)?;
    file.limit_vocabulary(vocab_size);
    let windows = Windows::new(file, recipe.data.sequence_length);
    Ok(windows.map_err(|error| error.with_length(LENGTH))?)
}
