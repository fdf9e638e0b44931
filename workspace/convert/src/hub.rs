//! Finding a model: a directory, or an id on the Hugging Face hub.
//!
//! Downloads go to the cache that Hugging Face's Python library uses, in its layout (blobs,
//! snapshots, refs), so that neither fetches what the other has. Requests, login and endpoint are
//! crate hf-hub's; files are fetched here, in ranges that are appended to an `.incomplete` file,
//! because hf-hub starts a broken download over and a broken 16 GB must go on where it stopped.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use hf_hub::repository::{RepoTreeEntry, RepoTypeModel};
use hf_hub::{HFClientBuilder, HFClientSync, HFError, HFRepositorySync};
use moh_model::config_file::CONFIG_FILE;
use moh_model::weight_files::INDEX_FILE;

use crate::Error;
use crate::hf_directory::{GENERATION_FILE, TOKENIZER_FILES};

const DEFAULT_REVISION: &str = "main";
/// Bytes of one request: what a broken connection loses at most, times [`PARALLEL_REQUESTS`].
const RANGE_BYTES: u64 = 8 << 20;
/// Ranges in flight.
const PARALLEL_REQUESTS: u64 = 4;
/// Tries of a range whose connection breaks.
const TRIES: usize = 3;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest silence within an answer.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// How far a download is, over all of its files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress<'a> {
    /// The file that is being fetched.
    pub file: &'a str,
    /// Bytes that are here, those of earlier tries included.
    pub bytes: u64,
    /// Bytes of all files.
    pub total: u64,
}

/// Where models come from; the default takes everything from the environment as Hugging Face's
/// own programs do (`HF_ENDPOINT`, `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN` or a stored login,
/// `HF_HUB_OFFLINE`).
#[derive(Debug, Clone, Default)]
pub struct Hub {
    /// Instead of `HF_ENDPOINT` or `https://huggingface.co`.
    pub endpoint: Option<String>,
    /// Instead of the cache that the environment names.
    pub cache: Option<PathBuf>,
    /// Use the cache only.
    pub offline: bool,
}

/// A file to fetch.
struct RemoteFile {
    name: String,
    size: u64,
    /// Content address: name of the blob in the cache.
    blob: String,
}

/// The directory of a model: `from` itself where it is one, else the hub's model of that id in the
/// cache, fetched where it is not there yet.
///
/// # Errors
/// When `from` is neither, or the hub does not give the model; the message says what to do. What
/// was fetched until then is used by the next try.
pub fn resolve(
    from: &str,
    revision: Option<&str>,
    progress: &mut dyn FnMut(&Progress<'_>),
) -> Result<PathBuf, Error> {
    let offline = std::env::var("HF_HUB_OFFLINE").is_ok_and(|value| {
        ["1", "on", "yes", "true"].contains(&value.to_ascii_lowercase().as_str())
    });
    Hub { offline, ..Hub::default() }.resolve(from, revision, progress)
}

/// Whether `from` reads as a hub id: `name` or `organisation/name`.
fn is_hub_id(from: &str) -> bool {
    let is_part = |part: &str| {
        !part.is_empty()
            && part.len() <= 96
            && !part.starts_with(['.', '-'])
            && !part.contains("..")
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    from.split('/').count() <= 2 && from.split('/').all(is_part)
}

/// Whether a name from outside stays within the directory that it is joined to.
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
            || name.starts_with("chat_template"))
}

impl Hub {
    /// See [`resolve`].
    ///
    /// # Errors
    /// As [`resolve`].
    pub fn resolve(
        &self,
        from: &str,
        revision: Option<&str>,
        progress: &mut dyn FnMut(&Progress<'_>),
    ) -> Result<PathBuf, Error> {
        let path = Path::new(from);
        if path.is_dir() {
            return Ok(path.to_path_buf());
        }
        if path.exists() {
            return Err(Error::file(path, "is a file, expected a model directory or a hub id"));
        }
        if !is_hub_id(from) {
            let reason = "no such directory, and not a hub id like meta-llama/Meta-Llama-3-8B";
            return Err(Error::file(path, reason));
        }
        let revision = revision.unwrap_or(DEFAULT_REVISION);
        if !is_contained(revision) {
            return Err(hub_error(from, format!("\"{revision}\" is not a revision")));
        }
        let cache = self.cache.clone().unwrap_or_else(hf_hub::resolve_cache_dir);
        let folder = Folder::new(&cache, from);
        if self.offline {
            return folder.cached(revision).ok_or_else(|| {
                let cache = cache.display();
                hub_error(
                    from,
                    format!(
                        "revision {revision} is not in the cache {cache}, and HF_HUB_OFFLINE is set"
                    ),
                )
            });
        }
        let client = self.client().map_err(|error| hub_error(from, error.to_string()))?;
        let (owner, name) = from.split_once('/').unwrap_or(("", from));
        let download = Download { id: from, revision, folder, repo: client.model(owner, name) };
        download.run(progress).map_err(|error| match error {
            Failure::Hub(error) => self.explain(&download, &error),
            Failure::Other(error) => error,
        })
    }

    fn client(&self) -> Result<HFClientSync, HFError> {
        let http = reqwest::Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .read_timeout(READ_TIMEOUT)
            .user_agent(concat!("moh-convert/", env!("CARGO_PKG_VERSION")))
            .build()?;
        let mut builder = HFClientBuilder::new().client(http).retry_max_attempts(TRIES);
        if let Some(endpoint) = &self.endpoint {
            builder = builder.endpoint(endpoint);
        }
        if let Some(cache) = &self.cache {
            builder = builder.cache_dir(cache);
        }
        builder.build_sync()
    }

    /// One sentence on what went wrong and what to do about it.
    fn explain(&self, download: &Download<'_>, error: &HFError) -> Error {
        let Download { id, revision, .. } = *download;
        let endpoint = self.endpoint.clone().or_else(|| std::env::var("HF_ENDPOINT").ok());
        let endpoint = endpoint.unwrap_or_else(|| "https://huggingface.co".to_string());
        let page = format!("{}/{id}", endpoint.trim_end_matches('/'));
        let reason = match error {
            HFError::AuthRequired { context }
                if context.error_code.as_deref() == Some("GatedRepo") =>
            {
                format!(
                    "the model is gated (401): accept its terms at {page}, then set HF_TOKEN to a \
                 token of your account or run `hf auth login`"
                )
            }
            HFError::AuthRequired { .. } => format!(
                "the hub asks for a login (401): check the name, or for a private or gated model \
                 ask for access at {page} and set HF_TOKEN or run `hf auth login`"
            ),
            HFError::Forbidden { .. } => format!(
                "the hub refuses access (403): ask for it at {page}, and see that the token in \
                 HF_TOKEN may read gated models"
            ),
            HFError::RevisionNotFound { context: Some(context), .. }
                if context.error_code.as_deref() == Some("RepoNotFound") =>
            {
                format!("no such model on the hub (404), see {page}")
            }
            HFError::RevisionNotFound { .. } => {
                format!("no such model, or it has no revision {revision} (404), see {page}")
            }
            HFError::RepoNotFound { .. } => format!("no such model on the hub (404), see {page}"),
            HFError::EntryNotFound { path, .. } => {
                format!("{path} is listed and missing on the hub (404), see {page}")
            }
            HFError::RateLimited { .. } => {
                "the hub asks to slow down (429): try again in a few minutes".to_string()
            }
            HFError::Request { source, .. } if source.is_body() || source.is_decode() => format!(
                "the connection to {endpoint} broke: run the same command again to go on where \
                 it stopped"
            ),
            HFError::Request { .. } => format!(
                "no answer from {endpoint}: check the network, or set HF_HUB_OFFLINE=1 to use \
                 what is in the cache"
            ),
            HFError::Http { context } => {
                format!("the hub answers {} to {}", context.status, context.url)
            }
            other => other.to_string(),
        };
        hub_error(id, reason.replace('\n', " "))
    }
}

fn hub_error(id: &str, reason: impl Into<String>) -> Error {
    Error::Hub { id: id.to_string(), reason: reason.into() }
}

enum Failure {
    Hub(HFError),
    Other(Error),
}

impl From<HFError> for Failure {
    fn from(error: HFError) -> Self {
        Failure::Hub(error)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::Other(error)
    }
}

/// A model's folder in the cache.
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
        self.root.join("snapshots").join(commit)
    }

    /// The snapshot of a revision, where the cache has it.
    fn cached(&self, revision: &str) -> Option<PathBuf> {
        let reference = fs::read_to_string(self.root.join("refs").join(revision));
        let commit =
            reference.map_or_else(|_| revision.to_string(), |text| text.trim().to_string());
        let snapshot = self.snapshot(&commit);
        (is_contained(&commit) && snapshot.join(CONFIG_FILE).is_file()).then_some(snapshot)
    }
}

/// One model that is being fetched.
struct Download<'a> {
    id: &'a str,
    revision: &'a str,
    folder: Folder,
    repo: HFRepositorySync<RepoTypeModel>,
}

impl Download<'_> {
    fn run(&self, progress: &mut dyn FnMut(&Progress<'_>)) -> Result<PathBuf, Failure> {
        let commit = self.repo.info().revision(self.revision).send()?.sha.unwrap_or_default();
        if !is_content_address(&commit) {
            return Err(hub_error(self.id, "the hub names no commit of the revision").into());
        }
        let files = self.list(&commit)?;
        let snapshot = self.folder.snapshot(&commit);
        fs::create_dir_all(&snapshot).map_err(Error::io(&snapshot))?;
        let total = files.iter().map(|file| file.size).sum();
        let mut before = 0;
        for file in &files {
            let mut report = |bytes| {
                progress(&Progress { file: &file.name, bytes: before + bytes, total });
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
        // Not recursive: what lies deeper (`original/`, `onnx/`) is never wanted.
        for entry in self.repo.list_tree().revision(commit).send()? {
            let RepoTreeEntry::File { oid, size, path, lfs, .. } = entry else {
                continue;
            };
            if !is_wanted(&path) {
                continue;
            }
            let blob = lfs.and_then(|lfs| lfs.sha256).unwrap_or(oid);
            if !is_content_address(&blob) || !is_contained(&path) {
                return Err(hub_error(self.id, format!("the hub lists {path} oddly")).into());
            }
            files.push(RemoteFile { name: path, size, blob });
        }
        if !files.iter().any(|file| file.name == CONFIG_FILE) {
            return Err(hub_error(self.id, format!("the model has no {CONFIG_FILE}")).into());
        }
        if !files.iter().any(|file| file.name.ends_with(".safetensors")) {
            let reason = "the model has no weights in safetensors format";
            return Err(hub_error(self.id, reason).into());
        }
        Ok(files)
    }

    /// Brings one file to its place in the snapshot.
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
            fs::rename(&incomplete, &blob).map_err(Error::io(&incomplete))?;
        }
        link(&file.blob, &blob, pointer).map_err(Error::io(pointer))?;
        Ok(())
    }

    /// Appends to the file what it lacks, in windows of parallel ranges.
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
            // Each range has a channel of its own, so that they are appended in order as they come.
            std::thread::scope(|scope| {
                let mut pieces = Vec::new();
                for start in (have..end).step_by(RANGE_BYTES as usize) {
                    let (sender, receiver) = mpsc::sync_channel(1);
                    let range = start..end.min(start + RANGE_BYTES);
                    scope.spawn(move || {
                        // The receiver is gone only when an earlier range has failed.
                        let _ = sender.send(self.fetch_range(commit, file, range));
                    });
                    pieces.push(receiver);
                }
                for receiver in pieces {
                    let Ok(piece) = receiver.recv() else { break };
                    let piece = piece?;
                    if let Err(error) = out.write_all(&piece) {
                        // A torn piece would be taken for the file's beginning next time.
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
            let request = self
                .repo
                .download_file_to_bytes()
                .filename(file.name.as_str())
                .revision(commit)
                .maybe_range(Some(range.clone()).filter(|_| !whole));
            match request.send() {
                Ok(bytes) => break bytes,
                Err(HFError::Request { .. }) if tries < TRIES => {}
                Err(error) => return Err(error.into()),
            }
        };
        let (start, length) = (range.start as usize, (range.end - range.start) as usize);
        if bytes.len() == length {
            return Ok(bytes.to_vec());
        }
        // A server (or a mirror) that knows no ranges sends the whole file.
        match bytes.get(start..start + length) {
            Some(part) if bytes.len() as u64 == file.size => Ok(part.to_vec()),
            _ => {
                let reason = format!(
                    "the hub sent {} bytes of {} where {length} were asked for: run the same \
                     command again",
                    bytes.len(),
                    file.name
                );
                Err(hub_error(self.id, reason).into())
            }
        }
    }
}

/// Makes the snapshot's file a relative link to the blob, as Hugging Face's library does.
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
