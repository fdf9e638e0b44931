//! Datasets on Hugging Face's hub as inputs: `hf://datasets/OWNER/NAME[@REVISION]/GLOB`, and a split by name. Each
//! revision is resolved to a commit once, which is part of the files' names.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use moh_hub::{Dataset, Listing};

use super::front_matter::{self, Config, configs};
use super::layout::{is_data_file, splits};
use super::pattern;
use super::split::{DatasetSplit, Splits};
use super::{RemoteFile, some_of};
use crate::{Error, Result};

const DATASETS: &str = "hf://datasets/";
/// Branches on which the hub keeps the data that it has converted: a folder for each configuration.
const CONVERTED: &str = "refs/convert/";
/// How the hub names the folder of a split of which it has converted the beginning alone.
const PARTIAL: &str = "partial-";

/// The hub, with the datasets that were asked for.
pub(super) struct Hub {
    keep: bool,
    open: Vec<Opened>,
}

/// A dataset with what it has listed.
struct Opened {
    /// The revision as it was named.
    revision: Option<String>,
    dataset: Arc<Dataset>,
    listings: BTreeMap<(String, bool), Arc<Listing>>,
    keep: bool,
}

/// A file of a dataset.
struct HubFile {
    dataset: Arc<Dataset>,
    file: moh_hub::RemoteFile,
    name: PathBuf,
    /// Whether it stays in the cache.
    keep: bool,
}

/// The parts of an address.
#[derive(Debug, PartialEq)]
struct Address<'a> {
    id: &'a str,
    revision: Option<String>,
    path: &'a str,
}

impl Hub {
    pub(super) fn new(keep: bool) -> Self {
        Self { keep, open: Vec::new() }
    }

    /// See [`super::Stores::expand`].
    pub(super) fn expand(&mut self, name: &str) -> Result<Vec<Arc<dyn RemoteFile>>> {
        let Some(Address { id, revision, path }) = address(name) else {
            let reason = "is no address of a dataset: expected hf://datasets/OWNER/NAME/GLOB, or \
                          hf://datasets/OWNER/NAME@REVISION/GLOB";
            return Err(Error::input(Path::new(name), reason));
        };
        let opened = self.open(id, revision)?;
        let files = opened.files(path)?;
        Ok(opened.inputs(files))
    }

    /// See [`super::Stores::split`].
    pub(super) fn split(&mut self, split: &DatasetSplit) -> Result<Vec<Arc<dyn RemoteFile>>> {
        let opened = self.open(&split.id, split.revision.clone())?;
        let files = opened.split(split.config.as_deref(), split.split.as_deref())?;
        Ok(opened.inputs(files))
    }

    /// The dataset at the commit that its revision has at the first time.
    fn open(&mut self, id: &str, revision: Option<String>) -> Result<&mut Opened> {
        let is_it = |opened: &Opened| opened.dataset.id() == id && opened.revision == revision;
        let number = match self.open.iter().position(is_it) {
            Some(number) => number,
            None => {
                let dataset = Arc::new(moh_hub::dataset(id, revision.as_deref())?);
                let (listings, keep) = (BTreeMap::new(), self.keep);
                self.open.push(Opened { revision, dataset, listings, keep });
                self.open.len() - 1
            }
        };
        Ok(&mut self.open[number])
    }
}

/// The parts of the address `name`; `None` if it is none of a dataset.
fn address(name: &str) -> Option<Address<'_>> {
    let rest = name.strip_prefix(DATASETS)?;
    let (owner, after) = rest.split_once('/')?;
    let end = after.find(['/', '@']).unwrap_or(after.len());
    let (id, rest) = rest.split_at(owner.len() + 1 + end);
    let Some(after) = rest.strip_prefix('@') else {
        return Some(Address { id, revision: None, path: rest });
    };
    // The hub's own branches have slashes in their names, and stand in addresses as they are.
    let slashes =
        if ["refs/convert/", "refs/pr/"].iter().any(|own| after.starts_with(own)) { 2 } else { 0 };
    let end = after.match_indices('/').nth(slashes).map_or(after.len(), |(end, _)| end);
    let (revision, path) = after.split_at(end);
    let revision = revision.replace("%2F", "/").replace("%2f", "/");
    (!revision.is_empty()).then_some(Address { id, revision: Some(revision), path })
}

impl Opened {
    /// The address of a path in the repository.
    fn address(&self, path: &str) -> PathBuf {
        let (id, commit) = (self.dataset.id(), self.dataset.commit());
        PathBuf::from(format!("{DATASETS}{id}@{commit}/{path}"))
    }

    /// An error of the dataset as a whole.
    fn error(&self, reason: String) -> Error {
        let name = match &self.revision {
            Some(revision) => format!("{}@{revision}", self.dataset.id()),
            None => self.dataset.id().to_owned(),
        };
        Error::input(Path::new(&name), reason)
    }

    fn inputs(&self, files: Vec<moh_hub::RemoteFile>) -> Vec<Arc<dyn RemoteFile>> {
        let input = |file: moh_hub::RemoteFile| {
            let (name, dataset) = (self.address(&file.name), Arc::clone(&self.dataset));
            Arc::new(HubFile { dataset, file, name, keep: self.keep }) as Arc<dyn RemoteFile>
        };
        files.into_iter().map(input).collect()
    }

    fn list(&mut self, folder: &str, is_deep: bool) -> Result<Arc<Listing>> {
        let key = (folder.to_owned(), is_deep);
        if let Some(known) = self.listings.get(&key) {
            return Ok(Arc::clone(known));
        }
        let mut listing = self.dataset.list(folder, is_deep)?;
        listing.files.sort_by(|one, other| one.name.cmp(&other.name));
        let listing = Arc::new(listing);
        self.listings.insert(key, Arc::clone(&listing));
        Ok(listing)
    }

    /// The files that a path stands for, sorted by name.
    fn files(&mut self, path: &str) -> Result<Vec<moh_hub::RemoteFile>> {
        let path = pattern::Path::new(path);
        let listing = self.list(path.folder(), path.has_wildcards() && path.is_deep())?;
        let is_it = |file: &&moh_hub::RemoteFile| file.name == path.as_str();
        // A file of that name wins over the pattern.
        let mut files: Vec<_> = listing.files.iter().filter(is_it).cloned().collect();
        if files.is_empty() && path.has_wildcards() {
            let name = self.address(path.as_str());
            let matches = path.matcher().map_err(|reason| Error::input(&name, reason))?;
            files = listing.files.iter().filter(|file| matches(&file.name)).cloned().collect();
        } else if files.is_empty() {
            files = self.list(path.as_str(), true)?.files.clone();
            files.retain(|file| is_data_file(&file.name));
        }
        if files.is_empty() {
            return Err(self.nothing(&path, &listing)?);
        }
        self.check_shards(&files)?;
        Ok(files)
    }

    /// The error of a path that stands for no file.
    fn nothing(&mut self, path: &pattern::Path<'_>, listing: &Listing) -> Result<Error> {
        let top = self.list("", false)?;
        let listing =
            if listing.files.is_empty() && listing.folders.is_empty() { &*top } else { listing };
        let names = listing.folders.iter().map(|folder| format!("{folder}/"));
        let names: Vec<_> =
            names.chain(listing.files.iter().map(|file| file.name.clone())).collect();
        let what = match path.has_wildcards() {
            true => "the pattern matches no file",
            false => "there is no such file, nor a folder with data files",
        };
        let place = if self.dataset.is_offline() {
            "the cache (HF_HUB_OFFLINE is set)"
        } else {
            "the dataset"
        };
        let there = match names.is_empty() {
            true => format!("{place} has no files"),
            false => format!("{place} has {}", some_of(names.iter().map(String::as_str))),
        };
        let script = match self.script(&top) {
            Some(script) => format!("; {}", self.script_reason(&script)),
            None => String::new(),
        };
        Ok(Error::input(&self.address(path.as_str()), format!("{what}: {there}{script}")))
    }

    /// Refuses shards of a set, `NAME-00000-of-00005`, of which the cache lacks some: without the hub, nothing else
    /// tells that files are missing.
    fn check_shards(&self, files: &[moh_hub::RemoteFile]) -> Result<()> {
        if !self.dataset.is_offline() {
            return Ok(());
        }
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
            Some(((set, total), count)) => Err(self.error(format!(
                "{count} of the {total} files {set}-* are in the cache, and HF_HUB_OFFLINE is set: unset it to download \
                 the others"
            ))),
        }
    }

    /// The files of a split of a configuration.
    fn split(
        &mut self,
        config: Option<&str>,
        split: Option<&str>,
    ) -> Result<Vec<moh_hub::RemoteFile>> {
        let config = self.config(config)?;
        let mut splits = match &config.splits {
            None => self.named_splits(&config.folder)?,
            // Only the patterns of the wanted split are looked up.
            Some(splits) => splits.keys().map(|split| (split.clone(), Vec::new())).collect(),
        };
        let found = split.and_then(|split| splits.iter().position(|(name, _)| name == split));
        let Some(number) = found else {
            let names = some_of(splits.iter().map(|(name, _)| name.as_str()));
            return Err(self.error(match split {
                Some(split) => format!("there is no split {split}: name one of {names}"),
                None => format!("name a split with --split: {names}"),
            }));
        };
        let (name, mut files) = splits.swap_remove(number);
        let is_partial = |file: &moh_hub::RemoteFile| {
            file.name.split('/').any(|part| part.strip_prefix(PARTIAL) == Some(name.as_str()))
        };
        if self.is_converted() && files.iter().any(is_partial) {
            let pattern = self.address("**/*.parquet");
            let reason = format!(
                "the hub has converted the beginning of the split {name} alone: name its files if that is enough, as in \
                 {}",
                pattern.display()
            );
            return Err(self.error(reason));
        }
        if let Some(patterns) = config.splits.as_ref().and_then(|splits| splits.get(&name)) {
            files = self.files_of(patterns, &config.folder)?;
        }
        self.check_shards(&files)?;
        Ok(files)
    }

    /// The files that the patterns of a README stand for, each once.
    fn files_of(&mut self, patterns: &[String], folder: &str) -> Result<Vec<moh_hub::RemoteFile>> {
        let mut found: Vec<moh_hub::RemoteFile> = Vec::new();
        for path in patterns {
            let path = match folder.trim_matches('/') {
                "" => path.clone(),
                folder => format!("{folder}/{path}"),
            };
            let files = self.files(path.trim_start_matches("./"))?;
            let other = files.first().map(|file| self.address(&file.name));
            let before = found.len();
            let is_new = |file: &moh_hub::RemoteFile| !found[..before].contains(file);
            let data: Vec<_> = files.into_iter().filter(|file| is_data_file(&file.name)).collect();
            if let (true, Some(other)) = (data.is_empty(), other) {
                let reason = "is of a format that is not read: name files of Parquet, Arrow, JSON or plain text with \
                              hf://datasets/OWNER/NAME/GLOB, or the branch of the hub's conversion, \
                              --dataset OWNER/NAME@refs/convert/parquet";
                return Err(Error::input(&other, reason));
            }
            let new: Vec<_> = data.into_iter().filter(is_new).collect();
            found.extend(new);
        }
        Ok(found)
    }

    /// The configuration of that name, or the one that counts if none is named.
    fn config(&mut self, name: Option<&str>) -> Result<Config> {
        let top = self.list("", false)?;
        let mut all = self.declared(&top)?;
        if all.is_empty() {
            if let Some(script) = self.script(&top) {
                return Err(self.error(self.script_reason(&script)));
            }
            let folder = |name: &str, folder: &str| Config {
                name: name.to_owned(),
                is_default: false,
                folder: folder.to_owned(),
                splits: None,
            };
            let folders = top.folders.iter().filter(|folder| !folder.starts_with('.'));
            let names = folders.map(|name| folder(name, name));
            match name {
                // Folders are configurations where the hub makes them so, or where one is named.
                _ if self.is_converted() => all.extend(names),
                Some(name) if top.folders.iter().any(|folder| folder == name) => all.extend(names),
                _ => all.push(folder("default", "")),
            }
        }
        let count = all.len();
        let is_wanted = |config: &Config| match name {
            Some(name) => config.name == name,
            None => count == 1 || config.name == "default" || config.is_default,
        };
        let names = some_of(all.iter().map(|config| config.name.as_str()));
        let reason = match name {
            Some(name) => format!("there is no configuration {name}: name one of {names}"),
            None => format!("it has several configurations: name one with --config: {names}"),
        };
        all.into_iter().find(is_wanted).ok_or_else(|| self.error(reason))
    }

    /// The configurations that the README declares.
    fn declared(&self, top: &Listing) -> Result<Vec<Config>> {
        let Some(readme) = top.files.iter().find(|file| file.name == "README.md") else {
            return Ok(Vec::new());
        };
        let name = self.address(&readme.name);
        if readme.size > front_matter::MAX_BYTES {
            let reason = format!(
                "has {} bytes, more than are read for configurations: name files with hf://datasets/OWNER/NAME/GLOB",
                readme.size
            );
            return Err(Error::input(&name, reason));
        }
        // Small, and needed again without the hub.
        let path = self.dataset.fetch(readme, None, &AtomicBool::new(false), &mut |_| ())?;
        let text = std::fs::read(&path).map_err(moh_files::io(&path))?;
        configs(&text).map_err(|reason| {
            let remedy = "name files with hf://datasets/OWNER/NAME/GLOB instead";
            Error::input(&name, format!("{reason}: {remedy}"))
        })
    }

    /// The splits that the names of files tell.
    fn named_splits(&mut self, folder: &str) -> Result<Splits> {
        let folder = folder.trim_matches('/');
        let listing = self.list(folder, true)?;
        let found = splits(&listing.files, folder);
        if found.is_empty() {
            let names: Vec<_> = listing.files.iter().map(|file| file.name.as_str()).collect();
            let reason = match names.is_empty() {
                true => "it has no files".to_owned(),
                false => format!(
                    "it has no files of Parquet, Arrow, JSON or plain text but {}: try --dataset {}@refs/convert/parquet, \
                     which has what the hub converts",
                    some_of(names),
                    self.dataset.id()
                ),
            };
            return Err(self.error(reason));
        }
        Ok(found)
    }

    fn is_converted(&self) -> bool {
        self.dataset.revision().starts_with(CONVERTED)
    }

    /// The loading script of a dataset, by its name.
    fn script(&self, top: &Listing) -> Option<String> {
        let (_, name) = self.dataset.id().split_once('/')?;
        let script = format!("{name}.py");
        top.files.iter().any(|file| file.name == script).then_some(script)
    }

    fn script_reason(&self, script: &str) -> String {
        let (id, page) = (self.dataset.id(), self.dataset.page());
        format!(
            "its data comes from a loading script, {script}, and code of datasets is not run: if the hub has converted \
             it, name that branch, {id}@refs/convert/parquet, or else files that {page} names"
        )
    }
}

impl RemoteFile for HubFile {
    fn name(&self) -> &Path {
        &self.name
    }

    fn bytes(&self) -> u64 {
        self.file.size
    }

    fn version(&self) -> &str {
        &self.file.blob
    }

    fn fetch(
        &self,
        place: &Path,
        stop: &AtomicBool,
        report: &mut dyn FnMut(u64),
    ) -> Result<PathBuf> {
        let instead = (!self.keep).then_some(place);
        self.dataset.fetch(&self.file, instead, stop, report).map_err(|error| match error {
            moh_hub::Error::Stopped => Error::Interrupted,
            error => error.into(),
        })
    }
}

/// The datasets that two lists of inputs have at different commits, as a sentence; `None` if they differ otherwise.
pub(crate) fn moved<'a>(
    before: impl Iterator<Item = &'a str>,
    now: impl Iterator<Item = &'a str>,
) -> Option<String> {
    let commits = |names: &mut dyn Iterator<Item = &'a str>| -> BTreeMap<&'a str, Vec<String>> {
        let mut of: BTreeMap<_, Vec<String>> = BTreeMap::new();
        for address in names.filter_map(address) {
            let (commits, commit) = (of.entry(address.id).or_default(), address.revision);
            commits.extend(commit.filter(|commit| !commits.contains(commit)));
        }
        of
    };
    let (before, now) = (commits(&mut { before }), commits(&mut { now }));
    let moved = |(id, commits): (&&str, &Vec<String>)| {
        let gone =
            commits.iter().find(|commit| !now.get(*id).is_some_and(|now| now.contains(commit)))?;
        let new = now.get(*id)?.iter().find(|commit| !commits.contains(commit))?;
        Some(format!("the dataset {id} was at commit {gone} and is now at {new}: name {id}@{gone}"))
    };
    before.iter().find_map(moved)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_revisions_of_any_name() {
        let parts = |name: &str| {
            let Address { id, revision, path } = address(name)?;
            Some(format!("{id} {} {path}", revision.as_deref().unwrap_or("-")))
        };
        for (name, expected) in [
            ("hf://datasets/o/n", "o/n - "),
            ("hf://datasets/o/n/a/*.txt", "o/n - /a/*.txt"),
            ("hf://datasets/o/n@v1/a@b.txt", "o/n v1 /a@b.txt"),
            ("hf://datasets/o/n@refs%2Fpr%2F1/a", "o/n refs/pr/1 /a"),
            (
                "hf://datasets/o/n@refs/convert/parquet/default/train/0.parquet",
                "o/n refs/convert/parquet /default/train/0.parquet",
            ),
            ("hf://datasets/o/n@refs/pr/7", "o/n refs/pr/7 "),
        ] {
            assert_eq!(parts(name).as_deref(), Some(expected), "{name}");
        }
        for name in ["hf://o/n/a.txt", "hf://datasets/o", "hf://datasets/o/n@", "hf://models/o/n/x"]
        {
            assert_eq!(parts(name), None, "{name}");
        }
    }

    #[test]
    fn a_dataset_that_moved_is_told_from_other_inputs() {
        let moved = |before: &[&'static str], now: &[&'static str]| {
            moved(before.iter().copied(), now.iter().copied())
        };
        let (one, two) = ("hf://datasets/o/n@1/a.txt", "hf://datasets/o/n@2/a.txt");
        let expected = "the dataset o/n was at commit 1 and is now at 2: name o/n@1";
        assert_eq!(moved(&["x.txt", one], &["x.txt", two]).as_deref(), Some(expected));
        assert_eq!(moved(&["x.txt", one], &["y.txt", one]), None);
        assert_eq!(moved(&[one], &["x.txt"]), None);
    }
}
