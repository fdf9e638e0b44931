//! Locates a model: a directory, or an id on the Hugging Face hub.
//!
//! Downloads go to the cache of Hugging Face's Python library, in its layout (blobs, snapshots,
//! refs), so that neither repeats the other's downloads. Files are fetched in ranges and appended
//! to an `.incomplete` file, so that an interrupted download of 16 GB resumes.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc;

use moh_hf::config_file::CONFIG_FILE;
use moh_hf::is_hub_id;
use moh_hf::model_card::CARD_FILE;
use moh_hf::model_directory::{GENERATION_FILE, TOKENIZER_FILES};
use moh_hf::weight_files::INDEX_FILE;
use moh_hf::{WeightFiles, is_terms_file};

use crate::client::{Client, Failure, RemoteFile};
use crate::content::has_address;
use crate::{Error, environment};

const DEFAULT_REVISION: &str = "main";
/// The folder of a model's commits in the cache.
const SNAPSHOTS: &str = "snapshots";
/// Bytes per request: a lost connection loses at most this times [`PARALLEL_REQUESTS`].
const RANGE_BYTES: u64 = 8 << 20;
/// Ranges in flight.
const PARALLEL_REQUESTS: u64 = 4;
/// Attempts for a range whose connection is lost.
const MAX_TRIES: usize = 3;

/// The progress of a download, over all of its files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DownloadProgress<'a> {
    /// The current file.
    pub file: &'a str,
    /// Downloaded bytes, including earlier runs.
    pub bytes: u64,
    /// Bytes of all files.
    pub total: u64,
}

/// The source of models; the default reads the environment as Hugging Face's own programs do
/// (`HF_ENDPOINT`, `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN` or a stored login, `HF_HUB_OFFLINE`).
#[derive(Debug, Clone, Default)]
pub struct Hub {
    /// Overrides `HF_ENDPOINT` and `https://huggingface.co`.
    pub endpoint: Option<String>,
    /// Overrides the environment's cache.
    pub cache: Option<PathBuf>,
    /// Use the cache only.
    pub offline: bool,
}

/// The directory of a model: `from` itself if it is a directory, or else the cached model of that
/// hub id, downloaded if necessary.
///
/// # Errors
/// Fails if `from` is neither, if it is a directory and a revision is given, or if the hub does not
/// provide the model; the message names the remedy.
/// The next attempt resumes partial downloads.
pub fn resolve(
    from: &str,
    revision: Option<&str>,
    progress: &mut dyn FnMut(&DownloadProgress<'_>),
) -> Result<PathBuf, Error> {
    let offline = environment::is_offline();
    Hub { offline, ..Hub::default() }.resolve(from, revision, progress)
}

/// The directory of a tokenizer, as [`resolve`] that of a model; of a hub id only the tokenizer's
/// files are downloaded.
///
/// # Errors
/// See [`resolve`].
pub fn resolve_tokenizer(
    from: &str,
    revision: Option<&str>,
    progress: &mut dyn FnMut(&DownloadProgress<'_>),
) -> Result<PathBuf, Error> {
    let offline = environment::is_offline();
    Hub { offline, ..Hub::default() }.resolve_tokenizer(from, revision, progress)
}

/// The directory with a model's `config.json`, as [`resolve`] that of a model; of a hub id nothing else is
/// downloaded.
///
/// # Errors
/// See [`resolve`].
pub fn resolve_config(from: &str, revision: Option<&str>) -> Result<PathBuf, Error> {
    let offline = environment::is_offline();
    Hub { offline, ..Hub::default() }.resolve_config(from, revision)
}

/// The cached model of a hub id at a commit, if all of its files are there; the hub is not asked.
pub fn cached(id: &str, commit: &str) -> Option<PathBuf> {
    Hub::default().cached(id, commit)
}

/// The commit of a model that [`resolve`] has found in the cache.
pub fn commit_of(snapshot: &Path) -> Option<&str> {
    let parent = snapshot.parent()?.file_name()?;
    let commit = snapshot.file_name()?.to_str()?;
    (parent == SNAPSHOTS && is_content_address(commit)).then_some(commit)
}

/// The files of a repository that are downloaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FileSet {
    Model,
    Tokenizer,
    Config,
}

impl FileSet {
    /// Whether the file `name` is one of them.
    fn has(self, name: &str) -> bool {
        match self {
            FileSet::Model => is_wanted(name),
            FileSet::Tokenizer => TOKENIZER_FILES.contains(&name),
            FileSet::Config => name == CONFIG_FILE,
        }
    }

    /// The file without which the others are useless.
    fn main_file(self) -> &'static str {
        match self {
            FileSet::Model | FileSet::Config => CONFIG_FILE,
            FileSet::Tokenizer => TOKENIZER_FILES[0],
        }
    }
}

/// A local model, which has no revisions.
fn directory(path: &Path, revision: Option<&str>) -> Result<PathBuf, Error> {
    match revision {
        None => Ok(path.to_path_buf()),
        Some(revision) => {
            let reason = format!("revision {revision} was given, but only hub ids have revisions");
            Err(Error::file(path, format!("is a directory: {reason}")))
        }
    }
}

/// Says that a model is no local directory, for errors of the hub.
pub(crate) fn no_directory() -> String {
    match std::env::current_dir() {
        Ok(current) => format!("no such directory in {}", current.display()),
        Err(_) => "no such directory".to_string(),
    }
}

/// Whether an untrusted name stays within the directory that it is joined to.
fn is_contained(name: &str) -> bool {
    !name.is_empty()
        && name.split('/').all(|part| !part.is_empty() && part != "." && part != "..")
        && !name.contains(['\\', ':', '\0'])
}

fn is_content_address(text: &str) -> bool {
    !text.is_empty() && text.len() <= 128 && text.chars().all(|c| c.is_ascii_alphanumeric())
}

fn is_wanted(name: &str) -> bool {
    !name.contains(['/', '\\'])
        && ([CONFIG_FILE, GENERATION_FILE, INDEX_FILE].contains(&name)
            || TOKENIZER_FILES.contains(&name)
            || name.ends_with(".safetensors")
            || name.starts_with("chat_template")
            || name == CARD_FILE
            || is_terms_file(name))
}

/// Whether a snapshot has a file of weights.
fn has_weights(snapshot: &Path) -> bool {
    let Ok(files) = fs::read_dir(snapshot) else { return false };
    files.flatten().any(|file| file.file_name().to_string_lossy().ends_with(".safetensors"))
}

impl Hub {
    /// Resolves a model; see [`resolve`].
    ///
    /// # Errors
    /// See [`resolve`].
    pub fn resolve(
        &self,
        from: &str,
        revision: Option<&str>,
        progress: &mut dyn FnMut(&DownloadProgress<'_>),
    ) -> Result<PathBuf, Error> {
        self.find(FileSet::Model, from, revision, progress)
    }

    /// Resolves a tokenizer; see [`resolve_tokenizer`].
    ///
    /// # Errors
    /// See [`resolve`].
    pub fn resolve_tokenizer(
        &self,
        from: &str,
        revision: Option<&str>,
        progress: &mut dyn FnMut(&DownloadProgress<'_>),
    ) -> Result<PathBuf, Error> {
        self.find(FileSet::Tokenizer, from, revision, progress)
    }

    /// Finds a model's `config.json`; see [`resolve_config`].
    ///
    /// # Errors
    /// See [`resolve`].
    pub fn resolve_config(&self, from: &str, revision: Option<&str>) -> Result<PathBuf, Error> {
        self.find(FileSet::Config, from, revision, &mut |_| ())
    }

    /// See [`cached`].
    pub fn cached(&self, id: &str, commit: &str) -> Option<PathBuf> {
        if !is_hub_id(id) || !is_content_address(commit) {
            return None;
        }
        let cache = self.cache.clone().unwrap_or_else(environment::cache_directory);
        let snapshot = Folder::new(&cache, id).snapshot(commit);
        let is_complete =
            || snapshot.join(CONFIG_FILE).is_file() && WeightFiles::open(&snapshot).is_ok();
        is_complete().then_some(snapshot)
    }

    fn find(
        &self,
        wanted: FileSet,
        from: &str,
        revision: Option<&str>,
        progress: &mut dyn FnMut(&DownloadProgress<'_>),
    ) -> Result<PathBuf, Error> {
        let path = Path::new(from);
        match fs::metadata(path) {
            Ok(found) if found.is_dir() => return directory(path, revision),
            Ok(_) => {
                return Err(Error::file(path, "is a file, expected a model directory or a hub id"));
            }
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                return Err(Error::io(path)(error));
            }
            Err(_) => {}
        }
        if !is_hub_id(from) {
            let reason = "no such directory, and not a hub id like meta-llama/Meta-Llama-3-8B";
            return Err(Error::file(path, reason));
        }
        let revision = revision.unwrap_or(DEFAULT_REVISION);
        if !is_contained(revision) {
            return Err(Error::hub(from, format!("\"{revision}\" is not a revision")));
        }
        let cache = self.cache.clone().unwrap_or_else(environment::cache_directory);
        let folder = Folder::new(&cache, from);
        if self.offline {
            return folder.cached(revision, wanted).ok_or_else(|| {
                let cache = cache.display();
                let reason = format!(
                    "{}, its revision {revision} is not in the cache {cache}, and HF_HUB_OFFLINE is set",
                    no_directory()
                );
                Error::hub(from, reason)
            });
        }
        let endpoint = self.endpoint.clone().unwrap_or_else(environment::endpoint);
        let client = Client::new(&endpoint, cache, from)?;
        let download = Download { id: from, revision, wanted, folder, client };
        download.run(progress).map_err(|failure| failure.explain(from, revision, &endpoint))
    }
}

/// A model's directory in the cache.
struct Folder {
    root: PathBuf,
    locks: PathBuf,
}

impl Folder {
    fn new(cache: &Path, id: &str) -> Self {
        let name = format!("models--{}", id.replace('/', "--"));
        Folder { root: cache.join(&name), locks: cache.join(".locks").join(&name) }
    }

    fn snapshot(&self, commit: &str) -> PathBuf {
        self.root.join(SNAPSHOTS).join(commit)
    }

    /// The snapshot of a revision, if it is cached.
    fn cached(&self, revision: &str, wanted: FileSet) -> Option<PathBuf> {
        let reference = fs::read_to_string(self.root.join("refs").join(revision));
        let commit =
            reference.map_or_else(|_| revision.to_string(), |text| text.trim().to_string());
        let snapshot = self.snapshot(&commit);
        let is_there = is_contained(&commit)
            && snapshot.join(wanted.main_file()).is_file()
            // A configuration alone may have been fetched for a plan.
            && (wanted != FileSet::Model || has_weights(&snapshot));
        is_there.then_some(snapshot)
    }
}

/// A download of one model.
struct Download<'a> {
    id: &'a str,
    revision: &'a str,
    wanted: FileSet,
    folder: Folder,
    client: Client,
}

impl Download<'_> {
    fn run(&self, progress: &mut dyn FnMut(&DownloadProgress<'_>)) -> Result<PathBuf, Failure> {
        let commit = self.client.commit(self.revision)?;
        if !is_content_address(&commit) {
            return Err(Error::hub(self.id, "the hub names no commit for the revision").into());
        }
        let files = self.list(&commit)?;
        let snapshot = self.folder.snapshot(&commit);
        fs::create_dir_all(&snapshot).map_err(Error::io(&snapshot))?;
        let total = files.iter().map(|file| file.size).sum();
        let mut before = 0;
        for file in &files {
            let mut report = |bytes| {
                progress(&DownloadProgress { file: &file.name, bytes: before + bytes, total });
            };
            self.fetch(&commit, file, &snapshot.join(&file.name), &mut report)?;
            before += file.size;
        }
        let reference = self.folder.root.join("refs").join(self.revision);
        if let Some(parent) = reference.parent() {
            fs::create_dir_all(parent).map_err(Error::io(parent))?;
        }
        if self.revision != commit {
            fs::write(&reference, &commit).map_err(Error::io(&reference))?;
        }
        Ok(snapshot)
    }

    fn list(&self, commit: &str) -> Result<Vec<RemoteFile>, Failure> {
        let mut files = Vec::new();
        for file in self.client.list(commit)? {
            if !self.wanted.has(&file.name) {
                continue;
            }
            if !is_content_address(&file.blob) || !is_contained(&file.name) {
                let reason = format!("the hub's listing of {} is invalid", file.name);
                return Err(Error::hub(self.id, reason).into());
            }
            files.push(file);
        }
        let main = self.wanted.main_file();
        if !files.iter().any(|file| file.name == main) {
            return Err(Error::hub(self.id, format!("the model has no {main}")).into());
        }
        if self.wanted == FileSet::Model
            && !files.iter().any(|file| file.name.ends_with(".safetensors"))
        {
            let reason = "the model has no weights in safetensors format: name a --revision that has \
                          them, such as refs/pr/1 of a pull request that adds them";
            return Err(Error::hub(self.id, reason).into());
        }
        Ok(files)
    }

    /// Downloads one file and links it into the snapshot.
    fn fetch(
        &self,
        commit: &str,
        file: &RemoteFile,
        pointer: &Path,
        report: &mut dyn FnMut(u64),
    ) -> Result<(), Failure> {
        if fs::metadata(pointer).is_ok_and(|found| found.len() == file.size) {
            report(file.size);
            return Ok(());
        }
        let blobs = self.folder.root.join("blobs");
        for dir in [&blobs, &self.folder.locks] {
            fs::create_dir_all(dir).map_err(Error::io(dir))?;
        }
        let lock_path = self.folder.locks.join(format!("{}.lock", file.blob));
        let lock = File::create(&lock_path).map_err(Error::io(&lock_path))?;
        lock.lock().map_err(Error::io(&lock_path))?;
        let blob = blobs.join(&file.blob);
        if !fs::metadata(&blob).is_ok_and(|found| found.len() == file.size) {
            let incomplete = blobs.join(format!("{}.incomplete", file.blob));
            self.fetch_rest(commit, file, &incomplete, report)?;
            self.check(file, &incomplete)?;
            fs::rename(&incomplete, &blob).map_err(Error::io(&incomplete))?;
        }
        link(&file.blob, &blob, pointer).map_err(Error::io(pointer))?;
        Ok(())
    }

    /// Checks the content of a complete download, and removes one that is wrong: the next run must
    /// not continue it.
    fn check(&self, file: &RemoteFile, path: &Path) -> Result<(), Failure> {
        if has_address(path, &file.blob).map_err(Error::io(path))? != Some(false) {
            return Ok(());
        }
        fs::remove_file(path).map_err(Error::io(path))?;
        let reason = format!(
            "{} does not have the hash that the hub lists, and was removed: run the same command again",
            file.name
        );
        Err(Error::hub(self.id, reason).into())
    }

    /// Appends the missing bytes to the file, in batches of parallel ranges.
    fn fetch_rest(
        &self,
        commit: &str,
        file: &RemoteFile,
        path: &Path,
        report: &mut dyn FnMut(u64),
    ) -> Result<(), Failure> {
        let mut out =
            File::options().create(true).append(true).open(path).map_err(Error::io(path))?;
        let mut have = out.metadata().map_err(Error::io(path))?.len();
        if have > file.size {
            out.set_len(0).map_err(Error::io(path))?;
            have = 0;
        }
        report(have);
        while have < file.size {
            let end = file.size.min(have + PARALLEL_REQUESTS * RANGE_BYTES);
            // One channel per range, so that ranges are appended in order while they arrive.
            std::thread::scope(|scope| {
                let mut pieces = Vec::new();
                for start in (have..end).step_by(RANGE_BYTES as usize) {
                    let (sender, receiver) = mpsc::sync_channel(1);
                    let range = start..end.min(start + RANGE_BYTES);
                    scope.spawn(move || {
                        // The receiver is dropped only when an earlier range has failed.
                        let _ = sender.send(self.fetch_range(commit, file, range));
                    });
                    pieces.push(receiver);
                }
                for receiver in pieces {
                    let Ok(piece) = receiver.recv() else { break };
                    let piece = piece?;
                    if let Err(error) = out.write_all(&piece) {
                        // The next run would take a partial range for complete data.
                        let _ = out.set_len(have);
                        return Err(Failure::Other(Error::io(path)(error)));
                    }
                    have += piece.len() as u64;
                    report(have);
                }
                Ok(())
            })?;
        }
        out.sync_all().map_err(Error::io(path))?;
        Ok(())
    }

    fn fetch_range(
        &self,
        commit: &str,
        file: &RemoteFile,
        range: std::ops::Range<u64>,
    ) -> Result<Vec<u8>, Failure> {
        let mut tries = 0;
        let bytes = loop {
            tries += 1;
            let whole = range.start == 0 && range.end == file.size;
            match self.client.read(commit, file, Some(range.clone()).filter(|_| !whole)) {
                Ok(bytes) => break bytes,
                Err(Failure::NoAnswer | Failure::Broken) if tries < MAX_TRIES => {}
                Err(failure) => return Err(failure),
            }
        };
        let (start, length) = (range.start as usize, (range.end - range.start) as usize);
        if bytes.len() == length {
            return Ok(bytes);
        }
        // A server or mirror without range support sends the whole file.
        match bytes.get(start..start + length) {
            Some(part) if bytes.len() as u64 == file.size => Ok(part.to_vec()),
            _ => {
                let reason = format!(
                    "the hub sent {} bytes of {} instead of {length}: run the same \
                     command again",
                    bytes.len(),
                    file.name
                );
                Err(Error::hub(self.id, reason).into())
            }
        }
    }
}

/// Links the snapshot's file to the blob, relatively, as Hugging Face's library does.
fn link(name: &str, blob: &Path, pointer: &Path) -> std::io::Result<()> {
    match fs::remove_file(pointer) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    #[cfg(unix)]
    {
        let _ = blob;
        std::os::unix::fs::symlink(Path::new("../../blobs").join(name), pointer)
    }
    #[cfg(not(unix))]
    {
        let _ = name;
        fs::copy(blob, pointer).map(|_| ())
    }
}

#[cfg(test)]
mod tests;
