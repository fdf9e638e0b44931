//! A repository on the hub with its folder in the cache. Files are fetched in ranges and appended to an
//! `.incomplete` file, so that an interrupted download of 16 GB resumes.

use std::fs::{self, File};
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

use hf_hub::{Repo, RepoType};

use crate::Error;
use crate::cache::{Folder, is_contained, is_content_address};
use crate::client::{Client, Failure, RemoteFile};
use crate::content::has_address;

/// Bytes per request: a lost connection loses at most this times [`PARALLEL_REQUESTS`].
pub(crate) const RANGE_BYTES: u64 = 8 << 20;
/// Ranges in flight.
pub(crate) const PARALLEL_REQUESTS: u64 = 4;
/// Attempts for a range whose connection is lost.
const MAX_TRIES: usize = 3;

/// A repository of models or of datasets.
pub(crate) struct Repository {
    pub(crate) id: String,
    pub(crate) revision: String,
    pub(crate) folder: Folder,
    pub(crate) client: Client,
}

impl Repository {
    /// The repository `id` at `endpoint`, with its folder in `cache`.
    ///
    /// # Errors
    /// Fails if `revision` is none, or the endpoint is not a URL.
    pub(crate) fn new(
        kind: RepoType,
        id: &str,
        revision: &str,
        endpoint: &str,
        cache: &Path,
    ) -> Result<Self, Error> {
        if !is_contained(revision) {
            return Err(Error::hub(id, format!("\"{revision}\" is not a revision")));
        }
        let folder = Folder::new(cache, &Repo::new(id.to_string(), kind).folder_name());
        let client = Client::new(kind, id, revision, endpoint, cache.to_path_buf())?;
        Ok(Self { id: id.to_string(), revision: revision.to_string(), folder, client })
    }

    /// The revision's commit on the hub.
    pub(crate) fn commit(&self) -> Result<String, Failure> {
        let commit = self.client.commit()?;
        match is_content_address(&commit) {
            true => Ok(commit),
            false => Err(Error::hub(&self.id, "the hub names no commit for the revision").into()),
        }
    }

    /// Downloads one file to the cache, unless it is there, and returns its path in the snapshot.
    pub(crate) fn fetch(
        &self,
        commit: &str,
        file: &RemoteFile,
        stop: &AtomicBool,
        report: &mut dyn FnMut(u64),
    ) -> Result<PathBuf, Failure> {
        if let Some(path) = self.folder.cached(commit, file)? {
            report(file.size);
            return Ok(path);
        }
        let lock_path = self.folder.lock(&file.blob)?;
        let lock = File::create(&lock_path).map_err(Error::io(&lock_path))?;
        lock.lock().map_err(Error::io(&lock_path))?;
        self.fetch_to(commit, file, &self.folder.blobs().join(&file.blob), stop, report)?;
        Ok(self.folder.link(commit, file)?)
    }

    /// Downloads one file to `path`, unless it is there.
    pub(crate) fn fetch_to(
        &self,
        commit: &str,
        file: &RemoteFile,
        path: &Path,
        stop: &AtomicBool,
        report: &mut dyn FnMut(u64),
    ) -> Result<(), Failure> {
        if fs::metadata(path).is_ok_and(|found| found.len() == file.size) {
            report(file.size);
            return Ok(());
        }
        moh_files::create_parents(path).map_err(Error::io(path))?;
        let mut incomplete = path.as_os_str().to_owned();
        incomplete.push(".incomplete");
        let incomplete = PathBuf::from(incomplete);
        self.fetch_rest(commit, file, &incomplete, stop, report)?;
        self.check(file, &incomplete)?;
        fs::rename(&incomplete, path).map_err(Error::io(&incomplete))?;
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
        Err(Error::hub(&self.id, reason).into())
    }

    /// Appends the missing bytes to the file, in batches of parallel ranges.
    fn fetch_rest(
        &self,
        commit: &str,
        file: &RemoteFile,
        path: &Path,
        stop: &AtomicBool,
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
                        let _ = sender.send(self.fetch_range(commit, file, range, stop));
                    });
                    pieces.push(receiver);
                }
                for receiver in pieces {
                    let Ok(piece) = receiver.recv() else { break };
                    let piece = piece?;
                    if let Err(error) = out.write_all(&piece) {
                        // The next run would take a partial range for complete data.
                        let _ = out.set_len(have);
                        return Err(self.write_error(file, path, error).into());
                    }
                    have += piece.len() as u64;
                    report(have);
                }
                Ok::<_, Failure>(())
            })?;
        }
        out.sync_all().map_err(|error| self.write_error(file, path, error))?;
        Ok(())
    }

    /// The error of a file that cannot be written to; a full disk has a remedy.
    fn write_error(&self, file: &RemoteFile, path: &Path, error: std::io::Error) -> Error {
        use std::io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
        match error.kind() {
            StorageFull | QuotaExceeded | FileTooLarge => {
                let (name, directory) = (&file.name, moh_files::parent(path).display());
                let reason = format!(
                    "no space for {name}, of {} bytes, in {directory} ({error}): free some, then the same command \
                     resumes the download",
                    file.size
                );
                Error::hub(&self.id, reason)
            }
            _ => Error::io(path)(error),
        }
    }

    fn fetch_range(
        &self,
        commit: &str,
        file: &RemoteFile,
        range: Range<u64>,
        stop: &AtomicBool,
    ) -> Result<Vec<u8>, Failure> {
        let length = range.end - range.start;
        let mut tries = 0;
        let bytes = loop {
            tries += 1;
            match self.client.read(commit, file, range.clone(), stop) {
                Ok(bytes) => break bytes,
                Err(Failure::NoAnswer | Failure::Broken)
                    if tries < MAX_TRIES && !stop.load(Ordering::Relaxed) => {}
                Err(failure) => return Err(failure),
            }
        };
        if bytes.len() as u64 == length {
            return Ok(bytes);
        }
        let reason = format!(
            "the hub sent {} bytes of {} instead of {length}: run the same command again",
            bytes.len(),
            file.name
        );
        Err(Error::hub(&self.id, reason).into())
    }
}
