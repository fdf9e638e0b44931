//! The addresses of files in datasets on the hub: `hf://datasets/OWNER/NAME[@REVISION]/GLOB`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const DATASETS: &str = "hf://datasets/";
/// Prefixes of the hub's own branches, which have slashes in their names and occur in addresses unescaped.
const OWN_BRANCHES: [&str; 2] = ["refs/convert/", "refs/pr/"];

#[derive(Debug, PartialEq)]
pub(super) struct Address<'a> {
    pub(super) id: &'a str,
    pub(super) revision: Option<String>,
    pub(super) glob: &'a str,
}

impl<'a> Address<'a> {
    /// Returns the parts of `name`, or `None` if it is not an address of files in a dataset.
    pub(super) fn parse(name: &'a str) -> Option<Self> {
        let rest = name.strip_prefix(DATASETS)?;
        let (owner, after) = rest.split_once('/')?;
        let end = after.find(['/', '@']).unwrap_or(after.len());
        let (id, rest) = rest.split_at(owner.len() + 1 + end);
        let Some(after) = rest.strip_prefix('@') else {
            return Some(Address { id, revision: None, glob: rest.trim_matches('/') });
        };
        let slashes = if OWN_BRANCHES.iter().any(|own| after.starts_with(own)) { 2 } else { 0 };
        let end = after.match_indices('/').nth(slashes).map_or(after.len(), |(end, _)| end);
        let (revision, glob) = after.split_at(end);
        let revision = revision.replace("%2F", "/").replace("%2f", "/");
        let glob = glob.trim_matches('/');
        (!revision.is_empty()).then_some(Address { id, revision: Some(revision), glob })
    }
}

pub(super) fn at_commit(id: &str, commit: &str, path: &str) -> PathBuf {
    PathBuf::from(format!("{DATASETS}{id}@{commit}/{path}"))
}

/// Returns the part of an address before `://`, or `None` if `name` is not an address.
pub(crate) fn scheme(name: &Path) -> Option<&str> {
    let (scheme, _) = name.to_str()?.split_once("://")?;
    let is_one = !scheme.is_empty() && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric());
    is_one.then_some(scheme)
}

/// Returns the first dataset that two lists of inputs have at different commits, as a sentence. Returns `None` if the
/// lists differ otherwise.
pub(crate) fn moved<'a>(
    before: impl Iterator<Item = &'a str>,
    now: impl Iterator<Item = &'a str>,
) -> Option<String> {
    let commits = |names: &mut dyn Iterator<Item = &'a str>| -> BTreeMap<&'a str, Vec<String>> {
        let mut of: BTreeMap<_, Vec<String>> = BTreeMap::new();
        for address in names.filter_map(Address::parse) {
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
            let Address { id, revision, glob } = Address::parse(name)?;
            Some(format!("{id} {} {glob}", revision.as_deref().unwrap_or("-")))
        };
        for (name, expected) in [
            ("hf://datasets/o/n", "o/n - "),
            ("hf://datasets/o/n/a/*.txt", "o/n - a/*.txt"),
            ("hf://datasets/o/n@v1/a@b.txt", "o/n v1 a@b.txt"),
            ("hf://datasets/o/n@refs%2Fpr%2F1/a", "o/n refs/pr/1 a"),
            (
                "hf://datasets/o/n@refs/convert/parquet/default/train/0.parquet",
                "o/n refs/convert/parquet default/train/0.parquet",
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
