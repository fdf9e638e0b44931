//! A dataset on the hub at a fixed commit. Its files are listed by folder and downloaded one by one.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use crate::hub_cache::DEFAULT_REVISION;
use crate::{Error, is_hub_id};

use super::Hub;
use super::cache::{Kind, RemoteFile};
use super::repository::Repository;

/// A dataset on the hub, or in the cache with `HF_HUB_OFFLINE`, at the current commit of its revision.
pub struct Dataset {
    repository: Repository,
    /// The commit of that revision.
    pub commit: String,
    /// Whether only the cache is used. A listing then has the cached files.
    pub is_offline: bool,
}

impl Hub {
    /// Returns the dataset `id`, `OWNER/NAME`, at a branch, tag or commit. The default is `main`.
    pub fn dataset(&self, id: &str, revision: Option<&str>) -> Result<Dataset, Error> {
        if !is_hub_id(id) || !id.contains('/') {
            let reason = "is no dataset of the hub: expected OWNER/NAME, as in allenai/c4";
            return Err(Error::hub(id, reason));
        }
        let revision = revision.unwrap_or(DEFAULT_REVISION);
        let repository = self.repository(Kind::Dataset, id, revision)?;
        let commit = match self.offline {
            true => {
                let commit = repository.folder.commit(revision);
                commit.filter(|commit| repository.folder.snapshot(commit).is_dir()).ok_or_else(|| {
                    let cache = self.cache_directory();
                    let cache = cache.display();
                    let reason = format!(
                        "its revision {revision} is not in the cache {cache}, and HF_HUB_OFFLINE is set: unset it to \
                         download"
                    );
                    Error::hub(id, reason)
                })?
            }
            false => {
                repository.client.commit().map_err(|failure| repository.client.explain(failure))?
            }
        };
        Ok(Dataset { repository, commit, is_offline: self.offline })
    }
}

impl Dataset {
    /// Returns the id, `OWNER/NAME`.
    pub fn id(&self) -> &str {
        &self.repository.client.id
    }

    /// Returns the address of the dataset's page on the hub.
    pub fn page(&self) -> String {
        self.repository.client.page()
    }

    /// Returns the files in a folder (`""` for the top), and with `is_deep` also in the folders below. Empty if the
    /// folder does not exist. From the cache, returns all files.
    pub fn list(&self, folder: &str, is_deep: bool) -> Result<Vec<RemoteFile>, Error> {
        let Repository { folder: cached, client } = &self.repository;
        match self.is_offline {
            true => cached.files(&self.commit),
            false => client
                .list(&self.commit, folder, is_deep)
                .map_err(|failure| client.explain(failure)),
        }
    }

    /// Downloads a file, unless it is in the cache. Returns its path in the cache or, if `instead` is given, downloads
    /// to that path and returns it. The next attempt resumes a partial download.
    pub fn fetch(
        &self,
        file: &RemoteFile,
        instead: Option<&Path>,
        stop: &AtomicBool,
        report: &mut dyn FnMut(u64),
    ) -> Result<PathBuf, Error> {
        let Repository { folder, client } = &self.repository;
        if let Some(path) = folder.cached(&self.commit, file)? {
            report(file.size);
            return Ok(path);
        }
        if self.is_offline {
            let reason = format!(
                "{} is not in the cache, and HF_HUB_OFFLINE is set: unset it to download",
                file.name
            );
            return Err(Error::hub(&client.id, reason));
        }
        let fetched = match instead {
            Some(path) => {
                let fetched = self.repository.fetch_to(&self.commit, file, path, stop, report);
                fetched.map(|()| path.to_path_buf())
            }
            None => self.repository.fetch(&self.commit, file, stop, report),
        };
        let path = fetched.map_err(|failure| client.explain(failure))?;
        if instead.is_none() {
            folder.refer(&client.revision, &self.commit)?;
        }
        Ok(path)
    }
}
