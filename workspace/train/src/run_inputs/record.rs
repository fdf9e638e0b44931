//! `inputs.json`: the content of a run's inputs.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use moh_checkpoint::run_directory::RunDirectory;
use moh_data::{ORDER_VERSION, TokenFile, TokenFileContent, TrainingData};
use moh_recipe::{Recipe, is_below};
use serde::{Deserialize, Serialize};

use super::token_files::TokenFileState;
use crate::{Error, Result};
use moh_files::unless_missing;

/// The prefix of the keys of the validation sets' files.
pub(super) const VALIDATION: &str = "data.validation";
const FORMAT: u32 = 1;
/// Maximum bytes of a record: tens of thousands of token files.
const MAX_BYTES: u64 = 64 << 20;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    format: u32,
    /// The version of the order in which sources are mixed; 0 in files of earlier versions.
    #[serde(default)]
    order_version: u32,
    /// The token files by their keys in the recipe, such as `data.sources.0`.
    token_files: BTreeMap<String, FileRecord>,
    /// blake3 of the files of `model/`, by name.
    #[serde(default)]
    pub(super) model_files: BTreeMap<String, String>,
    /// The identity of the weights that the run was started with; `None` if they are new, and in files of earlier
    /// versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) weights: Option<String>,
    /// The identities of the stages' teachers, by their keys in the recipe.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) teachers: BTreeMap<String, String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileRecord {
    /// The path without endings.
    pub path: PathBuf,
    /// The sizes and hashes of its content.
    pub content: TokenFileContent,
    /// A number above all ids; null if the ids have not been read.
    #[serde(default)]
    pub ids_below: Option<u64>,
}

impl Record {
    /// Returns the record of these token files, the model files' hashes, the weights and the teachers.
    pub(crate) fn new(
        token_files: BTreeMap<String, FileRecord>,
        model_files: BTreeMap<String, String>,
        weights: Option<String>,
        teachers: BTreeMap<String, String>,
    ) -> Self {
        let order_version = ORDER_VERSION;
        Record { format: FORMAT, order_version, token_files, model_files, weights, teachers }
    }

    /// Reads the record at `path`. Returns `None` if it is missing, or if it cannot be used and is not `needed`.
    pub(crate) fn of_run(path: &Path, needed: bool) -> Result<Option<Self>> {
        match Self::read(path) {
            Err(error) if needed => Err(error),
            read => Ok(read.ok().flatten()),
        }
    }

    fn read(path: &Path) -> Result<Option<Self>> {
        let Some(file) = unless_missing(path, File::open(path))? else { return Ok(None) };
        let mut bytes = Vec::new();
        file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(moh_files::io(path))?;
        let unreadable = |reason: String| {
            moh_files::unusable(
                path,
                format!(
                    "{reason}: restore the file, or, with a single source, remove it to resume without comparing \
                     the run's inputs"
                ),
            )
        };
        if bytes.len() as u64 > MAX_BYTES {
            return Err(unreadable(format!("has more than {MAX_BYTES} bytes")).into());
        }
        let record: Self = serde_json::from_slice(&bytes)
            .map_err(|error| unreadable(format!("not a record of inputs: {error}")))?;
        match record.format {
            FORMAT => Ok(Some(record)),
            other => Err(moh_files::unusable(
                path,
                format!(
                    "format {other}, but this version reads {FORMAT}: use the version that wrote it"
                ),
            )
            .into()),
        }
    }

    /// Returns a number above all ids of a file with this content, at any path, if it is recorded.
    pub(super) fn ids_below(&self, content: &TokenFileContent) -> Option<u64> {
        self.token_files.values().find(|file| file.content == *content)?.ids_below
    }

    pub(super) fn token_file(&self, key: &str) -> Option<&FileRecord> {
        self.token_files.get(key)
    }

    /// Records that all ids of a key's file, and of other files with the same content, are below a number.
    pub(super) fn set_ids_below(&mut self, key: &str, ids_below: u64) {
        let Some(content) = self.token_files.get(key).map(|file| file.content.clone()) else {
            return;
        };
        for file in self.token_files.values_mut().filter(|file| file.content == content) {
            file.ids_below = Some(ids_below);
        }
    }

    /// Returns the keys of validation sets with other content than recorded.
    pub(super) fn changed_sets<'a>(
        &self,
        files: &'a [(String, &TokenFile)],
        found: &[TokenFileState],
    ) -> Vec<&'a str> {
        let is_changed = |key: &str, found: &TokenFileState| {
            is_below(key, VALIDATION)
                && self.token_files.get(key).is_some_and(|known| known.content != found.content)
        };
        let changed = files.iter().zip(found).filter(|((key, _), found)| is_changed(key, found));
        changed.map(|((key, _), _)| key.as_str()).collect()
    }

    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let mut text =
            serde_json::to_vec_pretty(self).map_err(|error| moh_files::io(path)(error.into()))?;
        text.push(b'\n');
        Ok(moh_files::write(path, &text).map_err(moh_files::io(path))?)
    }

    /// Fails if a teacher of `recipe`, or the weights of `model.from` where they are read, differ from the record at
    /// `path`.
    pub(super) fn check_models(
        &self,
        path: &Path,
        recipe: &Recipe,
        weights: Option<&String>,
        teachers: &BTreeMap<String, String>,
    ) -> Result<()> {
        let is_changed = |recorded: Option<&String>, found: Option<&String>| {
            recorded.zip(found).is_some_and(|(recorded, found)| recorded != found)
        };
        if is_changed(self.weights.as_ref(), weights) {
            let from = recipe.model.from.as_deref().unwrap_or_default();
            return Err(input_changed(from.as_ref(), "model.from", "it has other weights", path));
        }
        for stage in &recipe.stages {
            let (key, Some(options)) = (stage.teacher_key(), &stage.distill) else { continue };
            if is_changed(self.teachers.get(&key), teachers.get(&key)) {
                let teacher = options.teacher.as_ref();
                return Err(input_changed(teacher, &key, "it is another teacher", path));
            }
        }
        Ok(())
    }

    /// Fails with the first training file that differs from the record at `path`.
    pub(super) fn check_training_files(
        &self,
        path: &Path,
        files: &[(String, &TokenFile)],
        found: &[TokenFileState],
    ) -> Result<()> {
        for ((key, file), found) in files.iter().zip(found) {
            // The recipe's other keys were compared before: the number of sources is unchanged.
            let recorded = self.token_files.get(key).filter(|_| !is_below(key, VALIDATION));
            let Some(FileRecord { content, .. }) = recorded else { continue };
            let (ending, difference) = match (content, &found.content) {
                (was, is) if was == is => continue,
                (was, is) if was.idx_bytes != is.idx_bytes => {
                    (".idx", format!("{} bytes, not {}", is.idx_bytes, was.idx_bytes))
                }
                (was, is) if was.idx_blake3 != is.idx_blake3 => {
                    (".idx", "its documents have other lengths".to_owned())
                }
                (was, is) if was.bin_bytes != is.bin_bytes => {
                    (".bin", format!("{} bytes, not {}", is.bin_bytes, was.bin_bytes))
                }
                _ => (".bin", "it has other tokens".to_owned()),
            };
            let name = moh_data::with_ending(file.prefix(), ending);
            return Err(input_changed(&name, key, &difference, path));
        }
        Ok(())
    }
}

/// Returns the error of an input, a file or directory, that differs from the content of its key in `record`.
pub(super) fn input_changed(input: &Path, key: &str, difference: &str, record: &Path) -> Error {
    let reason = format!(
        "{key} is not the file that the run was started with ({difference}), as {} records: put that file back or name \
         its path, or use another run.dir",
        record.display()
    );
    moh_files::unusable(input, reason).into()
}

/// Fails if a run with several sources has no record of this version's order of samples.
pub(crate) fn check_order(run: &RunDirectory, training: &[TrainingData]) -> Result<()> {
    let path = run.inputs();
    let is_mixture = training.iter().any(|data| data.files().len() > 1);
    if !is_mixture
        || Record::of_run(&path, true)?.is_some_and(|record| record.order_version == ORDER_VERSION)
    {
        return Ok(());
    }
    let reason = "does not record that the run mixes data.sources in the order of this version: go on with the \
                  version that began the run, or give --begin-anew";
    Err(moh_files::unusable(&path, reason).into())
}

#[cfg(test)]
mod tests {
    use moh_testkit::assert_refused;

    use super::*;

    fn record() -> Record {
        let content = TokenFileContent {
            idx_bytes: 50,
            idx_blake3: "ab".to_owned(),
            bin_bytes: 8,
            bin_sample_blake3: "cd".to_owned(),
            mask_sample_blake3: None,
        };
        let file = FileRecord { path: "data/text".into(), content, ids_below: Some(9) };
        let model = BTreeMap::from([("config.json".to_owned(), "ef".to_owned())]);
        let token_files = BTreeMap::from([("data.sources.0".to_owned(), file)]);
        let teachers =
            BTreeMap::from([("stage.adapt.distill.teacher".to_owned(), "23".to_owned())]);
        Record::new(token_files, model, Some("01".to_owned()), teachers)
    }

    #[test]
    fn a_record_reads_back_equal() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("inputs.json");
        assert_eq!(Record::of_run(&path, true).unwrap(), None);
        record().write(&path).unwrap();
        assert_eq!(Record::of_run(&path, true).unwrap(), Some(record()));
    }

    #[test]
    fn a_record_that_cannot_be_used_is_an_error_only_for_a_run_that_resumes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("inputs.json");
        record().write(&path).unwrap();
        let sound = std::fs::read(&path).unwrap();
        let mut hostile: Vec<Vec<u8>> =
            (0..sound.len() - 1).map(|end| sound[..end].to_vec()).collect();
        hostile.push(b"{\"format\": 1, \"token_files\": 7}".to_vec());
        hostile.push(b"[[[[".to_vec());
        hostile.push(vec![0xff; 100]);
        for bytes in hostile {
            std::fs::write(&path, &bytes).unwrap();
            assert_refused(Record::of_run(&path, true), "inputs.json: not a record of inputs");
            assert_eq!(Record::of_run(&path, false).unwrap(), None);
        }
        let other = String::from_utf8(sound).unwrap().replace("\"format\": 1", "\"format\": 2");
        std::fs::write(&path, other).unwrap();
        assert_refused(Record::of_run(&path, true), "format 2, but this version reads 1");
    }

    #[test]
    fn a_record_that_is_too_long_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("inputs.json");
        std::fs::File::create(&path).unwrap().set_len(MAX_BYTES + 9).unwrap();
        assert_refused(Record::of_run(&path, true), "has more than");
    }
}
