//! The inputs of a run besides its recipe, by content. The record, `inputs.json` of the run directory, is written when
//! the run starts. A run that resumes must find the same content, at any path. Token ids outside the vocabulary are
//! found here, before the first step. Files are skipped if the record, their type or `PREFIX.json` proves their ids.

pub(crate) mod model_files;
mod record;
mod token_files;

use std::sync::atomic::AtomicBool;

use moh_checkpoint::run_directory::RunDirectory;
use moh_data::TokenFile;
use moh_kernels::Backend;
use moh_recipe::{Recipe, is_below};
use moh_step::Ranks;

use self::model_files::ModelFiles;
pub(crate) use self::record::check_order;
use self::record::{FileRecord, Record, VALIDATION};
use self::token_files::TokenFileState;
use crate::run_data::RunData;
use crate::teacher::Teachers;
use crate::{Error, Event, ModelSource, Result};

/// A run, to compare its inputs with its record.
pub(crate) struct RunInputs<'a> {
    pub run: &'a RunDirectory,
    pub recipe: &'a Recipe,
    pub source: &'a ModelSource,
    pub data: &'a RunData,
    /// `None` if they are not read, in a run that has finished.
    pub teachers: Option<&'a Teachers>,
    /// Whether the run has completed a checkpoint, which makes other inputs an error; on the first rank.
    pub resumes: bool,
    pub stop: &'a AtomicBool,
}

/// Whether the inputs can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InputCheck {
    Passed,
    /// The run was asked to stop during the check.
    Stopped,
}

impl RunInputs<'_> {
    /// Compares the inputs with the record of a run that resumes, and writes the record. Checks ids that are not known
    /// to be in the vocabulary. All ranks call this, and the first rank calls `events`. Returns a hash of the content
    /// of each validation set, or `None` if the run was asked to stop. Fails with the first training file of other
    /// content, or with the first id outside the vocabulary.
    pub(crate) fn settle<B: Backend>(
        &self,
        ranks: &mut Ranks<B>,
        events: &mut dyn FnMut(Event<'_>),
    ) -> Result<Option<Vec<String>>> {
        let files = self.data.token_files();
        let found = token_files::find(ranks, &files, self.stop)?;
        let Some(found) = found else { return Ok(None) };
        let record = ranks.on_rank0(|| self.record(&files, &found, events))?;
        if self.check_ids(ranks, &files, record, events)? == InputCheck::Stopped {
            return Ok(None);
        }
        let sets = found.get(self.data.training_files.len()..).unwrap_or_default();
        token_files::share_contents(ranks, sets).map(Some)
    }

    /// Compares the inputs of a run that has no work to do with its record, and records their paths. Does nothing
    /// without a record. All ranks call this, and the first rank calls `events`. Fails as [`Self::settle`], except for
    /// ids, which are not read.
    pub(crate) fn compare<B: Backend>(
        &self,
        ranks: &mut Ranks<B>,
        events: &mut dyn FnMut(Event<'_>),
    ) -> Result<InputCheck> {
        if !ranks.rank0_decides::<Error>(|| Ok(self.run.inputs().is_file()))? {
            return Ok(InputCheck::Passed);
        }
        let files = self.data.token_files();
        let found = token_files::find(ranks, &files, self.stop)?;
        let Some(found) = found else { return Ok(InputCheck::Stopped) };
        ranks.on_rank0(|| self.record(&files, &found, events))?;
        Ok(InputCheck::Passed)
    }

    /// Compares the token files with the stored record, and writes the new record. Called on the first rank.
    fn record(
        &self,
        files: &[(String, &TokenFile)],
        found: &[TokenFileState],
        events: &mut dyn FnMut(Event<'_>),
    ) -> Result<Record> {
        let path = self.run.inputs();
        let stored = Record::of_run(&path, self.resumes)?;
        let model = ModelFiles::read(self.source, self.recipe)?;
        let weights = self.source.identity();
        let mut teachers = self.teachers.map(|all| all.identities(self.recipe)).unwrap_or_default();
        if self.resumes {
            check_order(self.run, &self.data.training)?;
        }
        match &stored {
            Some(stored) if self.resumes => {
                stored.check_training_files(&path, files, found)?;
                let kept = self.run.model();
                for text in model.check(&stored.model_files, &path, &kept)? {
                    events(Event::Warning { text: &text });
                }
                stored.check_models(&path, self.recipe, weights.as_ref(), &teachers)?;
                teachers.extend(stored.teachers.clone());
                for key in stored.changed_sets(files, found) {
                    let text = format!(
                        "{key} has another text than before, so its losses cannot be compared with the earlier ones"
                    );
                    events(Event::Warning { text: &text });
                }
            }
            None if self.resumes => {
                let text = format!(
                    "{} is missing, so whether the token files and the model are those that the run was \
                     started with is not known; it is written now",
                    path.display()
                );
                events(Event::Warning { text: &text });
            }
            _ => {}
        }
        let known = |found: &TokenFileState| {
            let stored = stored.as_ref().and_then(|stored| stored.ids_below(&found.content));
            [stored, found.ids_below].into_iter().flatten().min()
        };
        let token_files = files.iter().zip(found).map(|((key, file), found)| {
            let (path, content) = (file.prefix().to_owned(), found.content.clone());
            (key.clone(), FileRecord { path, content, ids_below: known(found) })
        });
        // The files of `model/` stay: a tokenizer of the same content does not replace them.
        let (model_files, weights) = match &stored {
            Some(stored) if self.resumes => (stored.model_files.clone(), stored.weights.clone()),
            // The weights that the run was started with are not known.
            None if self.resumes => (model.hashes(), None),
            _ => (model.hashes(), weights),
        };
        let record = Record::new(token_files.collect(), model_files, weights, teachers);
        for text in trained_and_validated(files, found) {
            events(Event::Warning { text: &text });
        }
        if !self.resumes || stored.is_none() || !self.run.model().is_dir() {
            model.write(&self.run.model())?;
        }
        record.write(&path)?;
        Ok(record)
    }

    /// Reads the files with ids that are not known to be in the vocabulary; `record` is the first rank's.
    fn check_ids<B: Backend>(
        &self,
        ranks: &mut Ranks<B>,
        files: &[(String, &TokenFile)],
        mut record: Option<Record>,
        events: &mut dyn FnMut(Event<'_>),
    ) -> Result<InputCheck> {
        for (key, file) in files {
            let are_valid = ranks.rank0_decides::<Error>(|| {
                let known = record.as_ref().and_then(|record| record.token_file(key)?.ids_below);
                Ok(known.is_some_and(|ids| ids <= self.source.config.vocab_size as u64))
            })?;
            if are_valid {
                continue;
            }
            let is_first = ranks.is_first();
            let (path, total) = (file.prefix(), file.num_tokens());
            let mut progress = |done| {
                if is_first {
                    events(Event::CheckingIds { path, done, total });
                }
            };
            let Some(ids_below) = token_files::scan(ranks, file, self.stop, &mut progress)? else {
                return Ok(InputCheck::Stopped);
            };
            progress(total);
            ranks.on_rank0::<_, Error>(|| {
                let Some(record) = &mut record else { return Ok(()) };
                record.set_ids_below(key, ids_below);
                record.write(&self.run.inputs())
            })?;
        }
        Ok(InputCheck::Passed)
    }
}

/// Returns warnings for validation sets with the content of a training file.
fn trained_and_validated(files: &[(String, &TokenFile)], found: &[TokenFileState]) -> Vec<String> {
    let all = files.iter().zip(found).map(|((key, file), found)| (key, file, &found.content));
    let (sources, sets): (Vec<_>, Vec<_>) = all.partition(|(key, ..)| !is_below(key, VALIDATION));
    let mut warnings = Vec::new();
    for (key, file, content) in sets {
        if let Some((source, ..)) = sources.iter().find(|(_, _, trained)| *trained == content) {
            warnings.push(format!(
                "{key}: {} is the text of {source}, on which the run trains: its loss does not say how the \
                 model does on other text",
                file.prefix().display()
            ));
        }
    }
    warnings
}
