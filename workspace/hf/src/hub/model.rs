//! Locates a model: a directory, or an id on the Hugging Face hub, downloaded to the hub's cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use crate::config_file::CONFIG_FILE;
use crate::hub_cache::{self, DEFAULT_REVISION};
use crate::model_card::CARD_FILE;
use crate::model_directory::{
    GENERATION_FILE, TEMPLATES_FOLDER, TOKENIZER_FILES, is_tokenizer_file,
};
use crate::other_formats::ADAPTER_FILE;
use crate::weight_files::INDEX_FILE;
use crate::{Error, is_terms_file};

use super::cache::{Kind, RemoteFile};
use super::client::{Client, Failure};
use super::environment;
use super::repository::Repository;

/// The source of models. The default reads the environment as Hugging Face's own programs do
/// (`HF_ENDPOINT`, `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN` or a stored login, `HF_HUB_OFFLINE`).
#[derive(Debug, Clone, Default)]
pub struct Hub {
    /// Overrides `HF_ENDPOINT` and `https://huggingface.co`.
    pub endpoint: Option<String>,
    /// Overrides the environment's cache.
    pub cache: Option<PathBuf>,
    /// Whether only the cache is used.
    pub offline: bool,
}

/// The files of a repository that are downloaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileSet {
    /// The files of a model and of its tokenizer.
    Model,
    /// The files of a tokenizer.
    Tokenizer,
}

impl FileSet {
    fn has(self, name: &str) -> bool {
        match self {
            FileSet::Model => is_wanted(name),
            FileSet::Tokenizer => is_tokenizer_file(name),
        }
    }

    /// Returns the file that the other files require.
    fn main_file(self) -> &'static str {
        match self {
            FileSet::Model => CONFIG_FILE,
            FileSet::Tokenizer => TOKENIZER_FILES[0],
        }
    }
}

/// Describes a missing local directory, for errors of the hub.
pub(crate) fn no_directory() -> String {
    match std::env::current_dir() {
        Ok(current) => format!("no such directory in {}", current.display()),
        Err(_) => "no such directory".to_string(),
    }
}

fn is_wanted(name: &str) -> bool {
    is_tokenizer_file(name)
        || !name.contains(['/', '\\'])
            && ([CONFIG_FILE, GENERATION_FILE, INDEX_FILE, ADAPTER_FILE].contains(&name)
                || name.ends_with(".safetensors")
                || name == CARD_FILE
                || is_terms_file(name))
}

fn has_weights(snapshot: &Path) -> bool {
    let Ok(files) = fs::read_dir(snapshot) else { return false };
    files.flatten().any(|file| file.file_name().to_string_lossy().ends_with(".safetensors"))
}

impl Hub {
    /// Returns the hub and the cache from the environment.
    pub fn from_environment() -> Self {
        Hub { offline: environment::is_offline(), ..Hub::default() }
    }

    /// Returns the directory of a model or a tokenizer: `from` itself if it is a directory, or else the cached files of
    /// that hub id, downloaded if necessary. `progress` is called with the bytes that are present, also from earlier
    /// runs, and with the bytes of all files.
    ///
    /// # Errors
    /// Fails if `from` is not a directory or a hub id, if it is a directory and a revision is given, or if the hub
    /// does not provide the model. The message names the remedy. The next attempt resumes partial downloads.
    pub fn resolve(
        &self,
        wanted: FileSet,
        from: &str,
        revision: Option<&str>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<PathBuf, Error> {
        if let Some(directory) = hub_cache::directory(from, revision)? {
            return Ok(directory);
        }
        let revision = revision.unwrap_or(DEFAULT_REVISION);
        let repository = self.repository(Kind::Model, from, revision)?;
        if self.offline {
            return wanted.cached(&repository).ok_or_else(|| {
                let (local, cache) = (no_directory(), self.cache_directory());
                let cache = cache.display();
                let reason = format!(
                    "{local}, its revision {revision} is not in the cache {cache}, and HF_HUB_OFFLINE is set"
                );
                Error::hub(from, reason)
            });
        }
        let found = wanted.download(&repository, progress);
        found.map_err(|failure| repository.client.explain(failure))
    }

    pub(crate) fn cache_directory(&self) -> PathBuf {
        self.cache.clone().unwrap_or_else(hub_cache::cache_directory)
    }

    pub(crate) fn repository(
        &self,
        kind: Kind,
        id: &str,
        revision: &str,
    ) -> Result<Repository, Error> {
        let endpoint = self.endpoint.clone().unwrap_or_else(environment::endpoint);
        Repository::new(kind, id, revision, &endpoint, &self.cache_directory())
    }
}

impl FileSet {
    fn cached(self, Repository { folder, client }: &Repository) -> Option<PathBuf> {
        let snapshot = folder.snapshot(&folder.commit(&client.revision)?);
        let is_there = snapshot.join(self.main_file()).is_file()
            // Other programs may have downloaded only the configuration.
            && (self != FileSet::Model || has_weights(&snapshot));
        is_there.then_some(snapshot)
    }

    fn download(
        self,
        repository: &Repository,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<PathBuf, Failure> {
        let Repository { folder, client } = repository;
        let commit = client.commit()?;
        let files = self.list(client, &commit)?;
        let total = files.iter().map(|file| file.size).sum();
        let (never, mut before) = (AtomicBool::new(false), 0);
        for file in &files {
            let mut report = |bytes| progress(before + bytes, total);
            repository.fetch(&commit, file, &never, &mut report)?;
            before += file.size;
        }
        folder.refer(&client.revision, &commit)?;
        Ok(folder.snapshot(&commit))
    }

    /// Returns the wanted files among the repository's top level and its named chat templates. Files in other
    /// subdirectories (`original/`, `onnx/`) are never needed.
    fn list(self, client: &Client, commit: &str) -> Result<Vec<RemoteFile>, Failure> {
        let mut files = client.list(commit, "", false)?;
        files.extend(client.list(commit, TEMPLATES_FOLDER, false)?);
        files.retain(|file| self.has(&file.name));
        let main = self.main_file();
        if !files.iter().any(|file| file.name == main) {
            return Err(Error::hub(&client.id, format!("the model has no {main}")).into());
        }
        if self == FileSet::Model && !files.iter().any(|file| file.name.ends_with(".safetensors")) {
            let reason = "the model has no weights in safetensors format: name a --revision that has \
                          them, such as refs/pr/1 of a pull request that adds them";
            return Err(Error::hub(&client.id, reason).into());
        }
        Ok(files)
    }
}

#[cfg(test)]
mod tests;
