//! The files that addresses of datasets on Hugging Face's hub stand for. A revision is resolved to a commit once. The
//! commit is part of the files' names.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use glob::{MatchOptions, Pattern};
use moh_hf::hub::Dataset;

use super::address::{Address, at_commit};
use super::scheme;
use crate::prepare::{Error, Result};

/// How patterns match everywhere: `*` stays within a name, and matches no hidden names.
const OPTIONS: MatchOptions = MatchOptions {
    case_sensitive: true,
    require_literal_separator: true,
    require_literal_leading_dot: true,
};

pub(crate) struct Hub {
    /// Whether files stay in the cache that the hub's other programs share.
    pub(crate) keep: bool,
    /// The datasets, each with its revision as it was named.
    pub(crate) open: Vec<(Option<String>, Arc<Dataset>)>,
}

/// A file of a dataset, which is downloaded by `fetch`.
pub(crate) struct RemoteFile {
    dataset: Arc<Dataset>,
    file: moh_hf::hub::RemoteFile,
    /// The file's address with the commit, for users and for the record of a token file.
    name: PathBuf,
    keep: bool,
}

impl Hub {
    /// Returns the files that an address stands for, sorted by name.
    pub(crate) fn expand(&mut self, name: &Path) -> Result<Vec<RemoteFile>> {
        let Some(Address { id, revision, glob }) = name.to_str().and_then(Address::parse) else {
            let reason = match scheme(name) {
                Some("hf") => {
                    "is no address of a dataset: expected hf://datasets/OWNER/NAME/GLOB, or \
                     hf://datasets/OWNER/NAME@REVISION/GLOB"
                }
                Some("s3" | "gs" | "az" | "abfs" | "abfss") => {
                    "objects of stores are not read: download them first, with `aws s3 cp` or `rclone copy`"
                }
                _ => {
                    "is no address of an input, as hf://datasets/OWNER/NAME/GLOB is: download other files first"
                }
            };
            return Err(Error::unusable(name, reason));
        };
        let dataset = self.open(id, revision)?;
        let file = |file: moh_hf::hub::RemoteFile| {
            let name = at_commit(id, &dataset.commit, &file.name);
            RemoteFile { dataset: Arc::clone(&dataset), file, name, keep: self.keep }
        };
        Ok(files_of(&dataset, glob)?.into_iter().map(file).collect())
    }

    /// Returns the dataset at the commit of its revision. The first call resolves the revision.
    fn open(&mut self, id: &str, revision: Option<String>) -> Result<Arc<Dataset>> {
        let is_it =
            |(named, dataset): &&(_, Arc<Dataset>)| *named == revision && dataset.id() == id;
        if let Some((_, dataset)) = self.open.iter().find(is_it) {
            return Ok(Arc::clone(dataset));
        }
        let dataset =
            Arc::new(moh_hf::hub::Hub::from_environment().dataset(id, revision.as_deref())?);
        self.open.push((revision, Arc::clone(&dataset)));
        Ok(dataset)
    }
}

/// Returns the files of a dataset that a pattern matches. Only the folder before the first wildcard is listed.
fn files_of(dataset: &Dataset, glob: &str) -> Result<Vec<moh_hf::hub::RemoteFile>> {
    let (folder, is_deep) = folder_of(glob);
    let mut listed = dataset.list(folder, is_deep)?;
    listed.sort_by(|one, other| one.name.cmp(&other.name));
    // A file of this name has precedence over the pattern.
    if let Some(file) = listed.iter().find(|file| file.name == glob) {
        return Ok(vec![file.clone()]);
    }
    let name = at_commit(dataset.id(), &dataset.commit, glob);
    let pattern = Pattern::new(glob)
        .map_err(|error| Error::unusable(&name, format!("is no pattern: {error}")))?;
    let matches = |file: &&moh_hf::hub::RemoteFile| pattern.matches_with(&file.name, OPTIONS);
    let files: Vec<_> = listed.iter().filter(matches).cloned().collect();
    if files.is_empty() {
        let place = match (dataset.is_offline, folder) {
            (true, _) => "the cache (HF_HUB_OFFLINE is set)",
            (false, "") => "the dataset",
            (false, folder) => folder,
        };
        let there = match listed.is_empty() {
            true => format!("{place} has no files, see {}", dataset.page()),
            false => {
                let names = some_of(listed.iter().map(|file| file.name.as_str()));
                format!("{place} has {names}; the files of a folder are FOLDER/*")
            }
        };
        return Err(Error::unusable(&name, format!("matches no file: {there}")));
    }
    if dataset.is_offline {
        check_shards(&name, &files)?;
    }
    Ok(files)
}

/// Returns the deepest folder that contains every match of a pattern, and whether a match can lie in a folder below it.
fn folder_of(glob: &str) -> (&str, bool) {
    let wildcard = glob.find(['*', '?', '[']).unwrap_or(glob.len());
    let end = glob[..wildcard].rfind('/').map_or(0, |slash| slash + 1);
    let rest = &glob[end..];
    (glob[..end].trim_end_matches('/'), rest.contains('/') || rest.contains("**"))
}

/// Rejects an incomplete set of shards, `NAME-00000-of-00005`, in the cache: without the hub, nothing else shows that
/// files are missing.
fn check_shards(name: &Path, files: &[moh_hf::hub::RemoteFile]) -> Result<()> {
    let mut sets: BTreeMap<(&str, u64), u64> = BTreeMap::new();
    for file in files {
        let parts = || {
            let (start, rest) = file.name.rsplit_once("-of-")?;
            let (set, number) = start.rsplit_once('-')?;
            let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
            let (_, total) = (number.parse::<u64>().ok()?, rest[..digits].parse().ok()?);
            Some((set, total))
        };
        if let Some(set) = parts() {
            *sets.entry(set).or_default() += 1;
        }
    }
    match sets.into_iter().find(|&((_, total), count)| count < total) {
        None => Ok(()),
        Some(((set, total), count)) => {
            let reason = format!(
                "{count} of the {total} files {set}-* are in the cache, and HF_HUB_OFFLINE is set: unset it to download \
                 the others"
            );
            Err(Error::unusable(name, reason))
        }
    }
}

fn some_of<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    const SHOWN: usize = 5;
    let names: Vec<_> = names.into_iter().collect();
    let shown = names[..names.len().min(SHOWN)].join(", ");
    match names.len() - names.len().min(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

impl RemoteFile {
    /// Returns the address with the commit, which identifies the file: its content cannot change.
    pub(crate) fn name(&self) -> &Path {
        &self.name
    }

    /// Returns the file's size as stored.
    pub(crate) fn bytes(&self) -> u64 {
        self.file.size
    }

    /// Returns the content address, which differs between versions of the file.
    pub(crate) fn version(&self) -> &str {
        &self.file.blob
    }

    /// Downloads the file, unless it is in the cache. Returns its path in the cache or, if files do not stay in the
    /// cache, the path `place`. `report` gets the bytes that are on this machine. The next call resumes a partial
    /// download. Fails if the hub does not provide the file or the disk is full, and with [`Error::Interrupted`] if
    /// `stop` was set.
    pub(crate) fn fetch(
        &self,
        place: &Path,
        stop: &AtomicBool,
        report: &mut dyn FnMut(u64),
    ) -> Result<PathBuf> {
        let instead = (!self.keep).then_some(place);
        self.dataset.fetch(&self.file, instead, stop, report).map_err(|error| match error {
            moh_hf::Error::Stopped => Error::Interrupted,
            error => error.into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_folder_before_the_first_wildcard_is_listed() {
        for (glob, folder, is_deep) in [
            ("en/c4-train.*.json.gz", "en", false),
            ("*.parquet", "", false),
            ("data/**/*.jsonl", "data", true),
            ("**", "", true),
            ("data/*/x.txt", "data", true),
            ("a/b/c?.txt", "a/b", false),
            ("data/train.jsonl", "data", false),
            ("train.jsonl", "", false),
            ("", "", false),
        ] {
            assert_eq!(folder_of(glob), (folder, is_deep), "{glob}");
        }
    }
}
