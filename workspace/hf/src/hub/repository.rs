//! A repository on the hub with its folder in the cache. Bytes are appended to an `.incomplete` file, so that an
//! interrupted download of 16 GB resumes. The complete file is renamed.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use crate::Error;
use crate::hub_cache::is_contained;

use super::cache::{Folder, Kind, RemoteFile};
use super::client::{Client, Failure};

/// Maximum number of consecutive lost connections of a file without new bytes.
const MAX_TRIES: usize = 3;

/// A repository of models or of datasets.
pub(crate) struct Repository {
    pub(crate) folder: Folder,
    pub(crate) client: Client,
}

impl Repository {
    /// Returns the repository `id` at `endpoint`, with its folder in `cache`.
    pub(crate) fn new(
        kind: Kind,
        id: &str,
        revision: &str,
        endpoint: &str,
        cache: &Path,
    ) -> Result<Self, Error> {
        if !is_contained(revision) {
            return Err(Error::hub(id, format!("\"{revision}\" is not a revision")));
        }
        let folder = Folder::new(cache, kind, id);
        let client = Client::new(kind, id, revision, endpoint)?;
        Ok(Self { folder, client })
    }

    /// Downloads a file to the cache, unless it exists, and returns its path in the snapshot.
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

    /// Downloads a file to `path`, unless it exists.
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
        let incomplete = path.with_added_extension("incomplete");
        self.fetch_rest(commit, file, &incomplete, stop, report)?;
        fs::rename(&incomplete, path).map_err(Error::io(&incomplete))?;
        Ok(())
    }

    /// Appends the missing bytes to the file, which may have any number of its first bytes.
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
        let mut tries = 0;
        while have < file.size {
            let before = have;
            let mut append = |bytes: &[u8]| {
                out.write_all(bytes).map_err(|error| self.write_error(file, path, error))?;
                have += bytes.len() as u64;
                report(have);
                Ok(())
            };
            let read = self.client.read(commit, file, before, stop, &mut append);
            tries = if have > before { 1 } else { tries + 1 };
            match read {
                Err(Failure::NoAnswer | Failure::Broken) if tries < MAX_TRIES => {}
                read => read?,
            }
        }
        out.sync_all().map_err(|error| self.write_error(file, path, error))?;
        Ok(())
    }

    /// Returns the error of a failed write. If the disk is full, the error has a remedy.
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
                Error::hub(&self.client.id, reason)
            }
            _ => Error::io(path)(error),
        }
    }
}
