//! The cache of Hugging Face's Python library. Each repository has a folder with blobs (named by their content),
//! snapshots (of a commit, with links to blobs) and refs (the commit of a branch). Locks are next to the folder. With
//! the same layout, neither program repeats the other's downloads. This module sends no requests to the hub.

use std::fs;
use std::path::{Path, PathBuf};

use crate::Error;
use crate::hub_cache::{SNAPSHOTS, is_contained, recorded_commit};

/// The kind of a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Model,
    Dataset,
}

impl Kind {
    /// Returns the name. The hub and the cache use its plural in paths.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Model => "model",
            Kind::Dataset => "dataset",
        }
    }
}

/// A file of a repository on the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteFile {
    /// The path of the file in the repository, with `/` between folders. It is safe to join to any directory.
    pub name: String,
    /// Bytes of the file.
    pub size: u64,
    /// Content address: the blob's name in the cache.
    pub blob: String,
}

/// A repository's folder in the cache.
#[derive(Debug)]
pub(crate) struct Folder {
    root: PathBuf,
    locks: PathBuf,
}

impl Folder {
    pub(crate) fn new(cache: &Path, kind: Kind, id: &str) -> Self {
        let name = format!("{}s--{}", kind.name(), id.replace('/', "--"));
        Folder { root: cache.join(&name), locks: cache.join(".locks").join(name) }
    }

    pub(crate) fn snapshot(&self, commit: &str) -> PathBuf {
        self.root.join(SNAPSHOTS).join(commit)
    }

    pub(crate) fn blobs(&self) -> PathBuf {
        self.root.join("blobs")
    }

    /// Returns the file that a download of `blob` locks.
    pub(crate) fn lock(&self, blob: &str) -> Result<PathBuf, Error> {
        fs::create_dir_all(&self.locks).map_err(Error::io(&self.locks))?;
        Ok(self.locks.join(format!("{blob}.lock")))
    }

    /// Returns the commit of a branch, a tag or a commit at its last download. The commit may be missing from the
    /// cache.
    pub(crate) fn commit(&self, revision: &str) -> Option<String> {
        let commit = recorded_commit(&self.root, revision);
        is_contained(&commit).then_some(commit)
    }

    /// Records the commit of a branch or a tag.
    pub(crate) fn refer(&self, revision: &str, commit: &str) -> Result<(), Error> {
        if revision == commit {
            return Ok(());
        }
        let reference = self.root.join("refs").join(revision);
        let parent = moh_files::parent(&reference);
        fs::create_dir_all(parent).map_err(Error::io(parent))?;
        fs::write(&reference, commit).map_err(Error::io(&reference))
    }

    /// Returns the file in the snapshot of a commit, or `None` if it is missing. Links it if its blob exists.
    pub(crate) fn cached(&self, commit: &str, file: &RemoteFile) -> Result<Option<PathBuf>, Error> {
        let has_size = |path: &Path| fs::metadata(path).is_ok_and(|found| found.len() == file.size);
        let pointer = self.snapshot(commit).join(&file.name);
        if !has_size(&pointer) {
            if !has_size(&self.blobs().join(&file.blob)) {
                return Ok(None);
            }
            self.link(commit, file)?;
        }
        Ok(Some(pointer))
    }

    /// Links the snapshot's file to the blob by a relative path, as Hugging Face's library does.
    pub(crate) fn link(&self, commit: &str, file: &RemoteFile) -> Result<PathBuf, Error> {
        let pointer = self.snapshot(commit).join(&file.name);
        let parent = moh_files::parent(&pointer);
        fs::create_dir_all(parent).map_err(Error::io(parent))?;
        moh_files::unless_missing(&pointer, fs::remove_file(&pointer))?;
        #[cfg(unix)]
        let linked = {
            // From the file's directory up to the directory of all commits, and out of that directory.
            let up = "../".repeat(file.name.split('/').count() + 1);
            std::os::unix::fs::symlink(format!("{up}blobs/{}", file.blob), &pointer)
        };
        #[cfg(not(unix))]
        let linked = fs::copy(self.blobs().join(&file.blob), &pointer).map(|_| ());
        linked.map_err(Error::io(&pointer))?;
        Ok(pointer)
    }

    /// Returns the files in the snapshot of a commit, sorted by name. Empty if the commit is not in the cache.
    pub(crate) fn files(&self, commit: &str) -> Result<Vec<RemoteFile>, Error> {
        let snapshot = self.snapshot(commit);
        let (mut files, mut folders) = (Vec::new(), vec![String::new()]);
        while let Some(folder) = folders.pop() {
            let path = snapshot.join(&folder);
            let Some(entries) = moh_files::unless_missing(&path, fs::read_dir(&path))? else {
                continue;
            };
            for entry in entries {
                let path = entry.map_err(Error::io(&path))?.path();
                let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
                let name = match folder.as_str() {
                    "" => name.to_string(),
                    folder => format!("{folder}/{name}"),
                };
                match fs::metadata(&path) {
                    Ok(found) if found.is_dir() => folders.push(name),
                    Ok(found) => {
                        let link = fs::read_link(&path).unwrap_or_default();
                        let blob = link.file_name().unwrap_or_default().to_string_lossy();
                        files.push(RemoteFile { name, size: found.len(), blob: blob.into_owned() });
                    }
                    // A link without its blob, which was removed to free disk space.
                    Err(_) => {}
                }
            }
        }
        files.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(files)
    }
}
