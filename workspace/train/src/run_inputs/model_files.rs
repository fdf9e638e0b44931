//! The files of a run's model that resuming needs besides the checkpoint: its configuration, its tokenizers, the files
//! that an export copies, and the sources of its card. They are stored in `model/` of the run directory, so that a run
//! resumes without its initial weights, and without the hub.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use moh_data::TokenizerFile;
use moh_files::PendingDirectory;
use moh_hf::config_file::CONFIG_FILE;
use moh_hf::is_terms_file;
use moh_hf::model_card::CARD_FILE;
use moh_hf::model_directory::{TOKENIZER_FILE, companion_files, companion_name};
use moh_recipe::Recipe;

use super::record::input_changed;
use crate::{ModelSource, Result};

pub(super) struct ModelFiles {
    files: BTreeMap<String, ModelFile>,
}

struct ModelFile {
    path: PathBuf,
    key: &'static str,
    bytes: Vec<u8>,
}

impl ModelFiles {
    pub(super) fn read(source: &ModelSource, recipe: &Recipe) -> Result<Self> {
        let mut files = BTreeMap::new();
        if let Some(directory) = source.directory.as_deref() {
            let (path, key) = (directory.join(CONFIG_FILE), "model.from");
            // The configuration as read: whether the model is tied may differ from the file.
            let fields = &source.config_file().fields;
            let mut bytes = serde_json::to_vec_pretty(fields)
                .map_err(|error| moh_files::io(&path)(error.into()))?;
            bytes.push(b'\n');
            files.insert(CONFIG_FILE.to_owned(), ModelFile { path, key, bytes });
            // An origin that is a run may not have kept files.
            if directory.is_dir() {
                let tokenizer = source.first_tokenizer.as_deref().unwrap_or(directory);
                add_companions(&mut files, directory, tokenizer, "", key)?;
            }
            add_card(&mut files, source, directory)?;
        }
        if recipe.model.tokenizer.is_some()
            && let Some(directory) = source.tokenizer_directory.as_deref()
        {
            let (prefix, key) = ("tokenizer/", "model.tokenizer");
            add_companions(&mut files, directory, directory, prefix, key)?;
        }
        Ok(ModelFiles { files })
    }

    /// Returns the blake3 of each file that the run's results depend on, in hexadecimal.
    pub(super) fn hashes(&self) -> BTreeMap<String, String> {
        let hash = |file: &ModelFile| blake3::hash(&file.bytes).to_hex().to_string();
        let counts = |name: &str| name != CARD_FILE && !is_terms_file(name);
        let files = self.files.iter().filter(|(name, _)| counts(name));
        files.map(|(name, file)| (name.clone(), hash(file))).collect()
    }

    /// Compares the files with their hashes in `record`, and with the files in the directory `kept`. Returns a sentence
    /// for each tokenizer with other bytes but the same content. Fails with the first file of other content.
    pub(super) fn check(
        &self,
        recorded: &BTreeMap<String, String>,
        record: &Path,
        kept: &Path,
    ) -> Result<Vec<String>> {
        let found = self.hashes();
        let mut remarks = Vec::new();
        let names: BTreeSet<&String> = found.keys().chain(recorded.keys()).collect();
        for name in names {
            let (path, key) = match self.files.get(name) {
                Some(file) => (file.path.clone(), file.key),
                None => (PathBuf::from(name), "model"),
            };
            let difference = match (recorded.get(name), found.get(name)) {
                (Some(recorded), Some(found)) if recorded == found => continue,
                (Some(recorded), Some(_)) => match self.tokenizers(name, recorded, kept) {
                    Some((now, before)) => match now.first_difference(&before) {
                        Some(difference) => format!("it has other content: {difference}"),
                        None => {
                            remarks.push(format!(
                                "{}: has other bytes than {}, and the same content",
                                path.display(),
                                before.path().display()
                            ));
                            continue;
                        }
                    },
                    None => "it has other content".to_owned(),
                },
                (Some(_), None) => "it is missing".to_owned(),
                (None, _) => "the run had no such file".to_owned(),
            };
            return Err(input_changed(&path, key, &difference, record));
        }
        Ok(remarks)
    }

    /// Returns the tokenizer in the file `name`, and the tokenizer that the run keeps. Returns `None` if the file is
    /// not a tokenizer, or if the kept tokenizer is not the recorded one.
    fn tokenizers(
        &self,
        name: &str,
        recorded: &str,
        kept: &Path,
    ) -> Option<(TokenizerFile, TokenizerFile)> {
        let kept = kept.join(name);
        if kept.file_name()? != TOKENIZER_FILE {
            return None;
        }
        let before = std::fs::read(&kept).ok()?;
        let before = (blake3::hash(&before).to_hex().as_str() == recorded).then_some(&kept)?;
        let before = TokenizerFile::load(before).ok()?;
        Some((TokenizerFile::load(&self.files.get(name)?.path).ok()?, before))
    }

    /// Writes the files to `place`, complete or not at all. Without files, removes `place`.
    pub(super) fn write(&self, place: &Path) -> Result<()> {
        if self.files.is_empty() {
            return Ok(moh_files::remove_directory(place).map_err(moh_files::io(place))?);
        }
        let pending = PendingDirectory::create(place).map_err(moh_files::io(place))?;
        for (name, file) in &self.files {
            let path = pending.path().join(name);
            moh_files::create_parents(&path).map_err(moh_files::io(&path))?;
            moh_files::write_synced(&path, &file.bytes).map_err(moh_files::io(&path))?;
        }
        Ok(pending.replace().map_err(moh_files::io(place))?)
    }
}

/// Adds the source's part of an export's card, and the terms of its licence.
fn add_card(
    files: &mut BTreeMap<String, ModelFile>,
    source: &ModelSource,
    directory: &Path,
) -> Result<()> {
    let (card, key) = (&source.card, "model.from");
    let bytes = card.kept_readme().into_bytes();
    let path = directory.join(CARD_FILE);
    files.insert(CARD_FILE.to_owned(), ModelFile { path, key, bytes });
    for path in &card.terms {
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        let bytes = std::fs::read(path).map_err(moh_files::io(path))?;
        files.insert(name.to_owned(), ModelFile { path: path.clone(), key, bytes });
    }
    Ok(())
}

/// Adds the generation files of a directory and the tokenizer of another directory, under names that start with
/// `prefix`.
fn add_companions(
    files: &mut BTreeMap<String, ModelFile>,
    directory: &Path,
    tokenizer: &Path,
    prefix: &str,
    key: &'static str,
) -> Result<()> {
    for path in companion_files(directory, tokenizer)? {
        let bytes = std::fs::read(&path).map_err(moh_files::io(&path))?;
        files.insert(format!("{prefix}{}", companion_name(&path)), ModelFile { path, key, bytes });
    }
    Ok(())
}
