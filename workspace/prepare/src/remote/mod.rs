//! Files that are not on this machine: what is known of one before it is here, and how it comes here. Inputs name
//! them by addresses such as `hf://datasets/OWNER/NAME/GLOB`; each comes from one of its [stores](Stores), and all
//! of them are [downloaded ahead of their use](Downloads).

mod ahead;
mod front_matter;
mod hub;
mod layout;
mod pattern;
mod split;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

pub(crate) use ahead::Downloads;
pub(crate) use hub::moved;
pub use split::DatasetSplit;

use crate::{Error, Result};

/// A file that is not on this machine until it is fetched.
pub(crate) trait RemoteFile: Send + Sync {
    /// Its address, for users and for the record of a token file; it says all that identifies a file that cannot
    /// change.
    fn name(&self) -> &Path;
    /// Its bytes as stored.
    fn bytes(&self) -> u64;
    /// What tells its content from that of another version.
    fn version(&self) -> &str;
    /// Downloads it to `place`, unless it is there or elsewhere on this machine, and returns its path. `report` gets
    /// the bytes that are there. The next call resumes a partial download.
    ///
    /// # Errors
    /// Fails if its store does not provide it, if its content is not the one that was listed, or if the disk is
    /// full; with [`Error::Interrupted`] if `stop` was set.
    fn fetch(
        &self,
        place: &Path,
        stop: &AtomicBool,
        report: &mut dyn FnMut(u64),
    ) -> Result<PathBuf>;
}

/// The stores of remote files that were asked so far, so that each is asked once what it has.
pub(crate) struct Stores {
    hub: hub::Hub,
}

impl Stores {
    /// `keep` is whether files stay in the cache that the hub's other programs share.
    pub(crate) fn new(keep: bool) -> Self {
        Self { hub: hub::Hub::new(keep) }
    }

    /// The files that an address stands for, in order.
    ///
    /// # Errors
    /// Fails if it is no address, if its store does not answer, or if it has no such file.
    pub(crate) fn expand(&mut self, name: &Path) -> Result<Vec<Arc<dyn RemoteFile>>> {
        let address = scheme(name).and_then(|scheme| Some((scheme, name.to_str()?)));
        match address {
            Some(("hf", name)) => self.hub.expand(name),
            Some(("s3" | "gs" | "az" | "abfs" | "abfss", _)) => {
                let reason = "objects of stores are not read: download them first, with `aws s3 cp` or `rclone copy`";
                Err(Error::input(name, reason))
            }
            _ => {
                let reason = "is no address of an input, as hf://datasets/OWNER/NAME/GLOB is: download other files first";
                Err(Error::input(name, reason))
            }
        }
    }

    /// The files of a split of a dataset on the hub, in order.
    ///
    /// # Errors
    /// Fails if the hub does not answer, or if the dataset has no such split.
    pub(crate) fn split(&mut self, split: &DatasetSplit) -> Result<Vec<Arc<dyn RemoteFile>>> {
        self.hub.split(split)
    }
}

/// The part of an address before `://`; `None` if `name` is none.
pub(crate) fn scheme(name: &Path) -> Option<&str> {
    let (scheme, _) = name.to_str()?.split_once("://")?;
    let is_one = !scheme.is_empty() && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric());
    is_one.then_some(scheme)
}

/// Where a remote file lies in the directory of downloads: by address and version, so that another version never
/// continues it, and under its own name, whose ending may be what tells its format.
fn place(directory: &Path, file: &dyn RemoteFile) -> PathBuf {
    let mut hasher = blake3::Hasher::new();
    hasher.update(file.name().as_os_str().as_encoded_bytes());
    hasher.update(b"\0").update(file.version().as_bytes());
    let folder = hasher.finalize().to_hex();
    directory.join(&folder[..16]).join(file.name().file_name().unwrap_or_default())
}

/// Reads the front matter of a dataset's README, for tests with hostile input; the number of its configurations.
///
/// # Errors
/// Says what is wrong with it.
#[doc(hidden)]
pub fn read_configs(readme: &[u8]) -> Result<usize, String> {
    front_matter::configs(readme).map(|configs| configs.len())
}

/// Some of many names, for messages.
fn some_of<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    const SHOWN: usize = 5;
    let names: Vec<_> = names.into_iter().collect();
    let shown = names[..names.len().min(SHOWN)].join(", ");
    match names.len() - names.len().min(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}
