//! The names of inputs: files, globs, directories, `-` for standard input, and addresses of remote files. A glob or a
//! directory stands for its files, sorted by path, so the order of documents is the same on every machine.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use crate::prepare::remote::{Hub, RemoteFile, scheme};
use crate::prepare::{Error, Result};

pub(crate) const STANDARD_INPUT: &str = "-";
const DATA_ENDINGS: [&str; 6] = ["jsonl", "json", "txt", "parquet", "arrow", "ndjson"];
const COMPRESSED_ENDINGS: [&str; 4] = ["gz", "zst", "bz2", "xz"];

/// The file in which `DatasetDict.save_to_disk` lists the directories of its splits.
const SPLITS: &str = "dataset_dict.json";

/// The names of the inputs.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Files, globs, directories, `-` for standard input, and files of datasets on the hub,
    /// `hf://datasets/OWNER/NAME/GLOB`.
    pub names: &'a [PathBuf],
    /// Whether files of the hub stay in the cache that the hub's other programs share. Otherwise they are removed after
    /// use, unless they were in the cache before.
    pub keep: bool,
}

pub(crate) enum Input {
    /// A file on this machine, or `-`.
    Local(PathBuf),
    Remote(RemoteFile),
}

impl Input {
    /// Returns the input's name, for users and for records.
    pub(crate) fn name(&self) -> &Path {
        match self {
            Input::Local(path) => path,
            Input::Remote(file) => file.name(),
        }
    }

    pub(crate) fn remote(&self) -> Option<&RemoteFile> {
        match self {
            Input::Local(_) => None,
            Input::Remote(file) => Some(file),
        }
    }
}

/// Returns whether a preparation of these inputs can be resumed: no input is standard input or another pipe.
pub fn can_continue(names: &[PathBuf]) -> bool {
    // A name without a file is a pattern of files.
    let is_pipe = |name: &PathBuf| {
        is_standard_input(name)
            || name.metadata().is_ok_and(|kind| !kind.is_file() && !kind.is_dir())
    };
    !names.iter().any(is_pipe)
}

pub(crate) fn is_standard_input(path: &Path) -> bool {
    path.as_os_str() == STANDARD_INPUT
}

/// Returns the files that `inputs` stand for, in order, and `-` where it is named.
pub(crate) fn expand(inputs: Inputs<'_>) -> Result<Vec<Input>> {
    let Inputs { names, keep } = inputs;
    if names.is_empty() {
        return Err(Error::Invalid("no input: name at least one file".to_owned()));
    }
    let mut hub = Hub { keep, open: Vec::new() };
    let mut inputs = Vec::new();
    let locals = |paths: Vec<PathBuf>| paths.into_iter().map(Input::Local);
    for name in names {
        match name.metadata() {
            _ if is_standard_input(name) => inputs.push(Input::Local(name.clone())),
            Ok(kind) if kind.is_dir() => inputs.extend(locals(files_in(name)?)),
            Ok(_) => inputs.push(Input::Local(name.clone())),
            Err(_) if scheme(name).is_some() => {
                inputs.extend(hub.expand(name)?.into_iter().map(Input::Remote));
            }
            Err(_)
                if name.as_os_str().as_encoded_bytes().iter().any(|byte| b"*?[".contains(byte)) =>
            {
                inputs.extend(locals(files_of_glob(name)?));
            }
            Err(error) => return Err(moh_files::io(name)(error).into()),
        }
    }
    refuse_repeated(&inputs)?;
    Ok(inputs)
}

/// Returns the stored bytes of all inputs, or 0 if unknown, as for standard input and other pipes.
pub(crate) fn total_bytes(inputs: &[Input]) -> Result<u64> {
    let mut total = 0;
    for input in inputs {
        let path = match input {
            Input::Local(path) => path,
            Input::Remote(file) => {
                total += file.bytes();
                continue;
            }
        };
        if is_standard_input(path) {
            return Ok(0);
        }
        match path.metadata().map_err(moh_files::io(path))? {
            kind if kind.is_file() => total += kind.len(),
            _ => return Ok(0),
        }
    }
    Ok(total)
}

fn refuse_repeated(inputs: &[Input]) -> Result<()> {
    let reason =
        "is named twice: name it once; a source's weight in a recipe reads its tokens more often";
    let mut seen = BTreeSet::new();
    for input in inputs {
        let path = input.name();
        let identity = match input {
            Input::Local(_) if is_standard_input(path) => path.to_path_buf(),
            // A pipe has no canonical path, and is a file of its own.
            Input::Local(_) if !path.metadata().is_ok_and(|kind| kind.is_file()) => continue,
            Input::Local(_) => path.canonicalize().map_err(moh_files::io(path))?,
            Input::Remote(_) => path.to_path_buf(),
        };
        if !seen.insert(identity) {
            return Err(match is_standard_input(path) {
                true => Error::unusable(path, "standard input can be read once: name it once"),
                false => Error::unusable(path, reason),
            });
        }
    }
    Ok(())
}

fn files_of_glob(name: &Path) -> Result<Vec<PathBuf>> {
    let Some(pattern) = name.to_str() else {
        return Err(Error::unusable(name, "is no file, and a pattern must be UTF-8"));
    };
    let found = glob::glob(pattern)
        .map_err(|error| Error::unusable(name, format!("is no file and no pattern: {error}")))?;
    let mut paths = Vec::new();
    for path in found {
        let path = path.map_err(|error| moh_files::io(error.path())(error.into()))?;
        // A pattern that matches a directory needs a further /* for its files.
        if !path.is_dir() {
            paths.push(path);
        }
    }
    paths.sort();
    match paths.is_empty() {
        true => Err(Error::unusable(name, "the pattern matches no file")),
        false => Ok(paths),
    }
}

/// Returns the data files below a directory. Hidden files and names that start with `_` are skipped, as programs write
/// such files beside data.
fn files_in(directory: &Path) -> Result<Vec<PathBuf>> {
    let (mut paths, mut directories) = (Vec::new(), vec![directory.to_path_buf()]);
    while let Some(directory) = directories.pop() {
        refuse_splits(&directory)?;
        let has = |name: &str| directory.join(name).exists();
        let is_dataset = has("dataset_info.json") && has("state.json") || has(SPLITS);
        for entry in fs::read_dir(&directory).map_err(moh_files::io(&directory))? {
            let path = entry.map_err(moh_files::io(&directory))?.path();
            let name = path.file_name().unwrap_or_default().as_encoded_bytes();
            // The hub's dataset repositories list the sizes and fields of their other files in this file.
            let is_information = name == b"dataset_infos.json";
            if name.starts_with(b".") || name.starts_with(b"_") || is_information {
                continue;
            }
            if path.is_dir() {
                directories.push(path);
            } else if is_data(&path) && !(is_dataset && is_beside_rows(&path)) {
                paths.push(path);
            }
        }
    }
    paths.sort();
    match paths.is_empty() {
        true => Err(Error::unusable(
            directory,
            format!(
                "the directory has no file that ends in .{}, with or without .{} after it: name files, \
                 or a pattern such as {}",
                DATA_ENDINGS.join(", ."),
                COMPRESSED_ENDINGS.join(", ."),
                directory.join("*").display()
            ),
        )),
        false => Ok(paths),
    }
}

/// Rejects the output of `DatasetDict.save_to_disk` with several splits: a split, such as the tests, may not be wanted.
fn refuse_splits(directory: &Path) -> Result<()> {
    let Ok(bytes) = fs::read(directory.join(SPLITS)) else { return Ok(()) };
    let file: serde_json::Value = serde_json::from_slice(&bytes).unwrap_or_default();
    let splits = file["splits"].as_array().into_iter().flatten();
    let splits: Vec<&str> = splits.filter_map(serde_json::Value::as_str).collect();
    match splits[..] {
        [first, _, ..] => Err(Error::unusable(
            directory,
            format!(
                "is a dataset with the splits {}: name those that are wanted, such as {}",
                splits.join(", "),
                directory.join(first).display()
            ),
        )),
        _ => Ok(()),
    }
}

/// Returns whether a file of a dataset that `save_to_disk` wrote has no rows.
fn is_beside_rows(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().as_encoded_bytes();
    name.ends_with(b".json")
        || [&b"cache-"[..], b"indices-", b"tmp"].iter().any(|&first| name.starts_with(first))
}

fn is_data(path: &Path) -> bool {
    let ends_in = |path: &Path, endings: &[&str]| {
        let is_end = |end: &OsStr| endings.iter().any(|known| end.eq_ignore_ascii_case(known));
        path.extension().is_some_and(is_end)
    };
    match ends_in(path, &COMPRESSED_ENDINGS) {
        true => ends_in(&path.with_extension(""), &DATA_ENDINGS),
        false => ends_in(path, &DATA_ENDINGS),
    }
}

#[cfg(test)]
mod tests {
    use moh_testkit::assert_refused;

    use super::*;

    fn files(names: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for name in names.split(' ') {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, b"").unwrap();
        }
        dir
    }

    fn expanded(dir: &Path, names: &[&str]) -> Result<Vec<String>> {
        let names: Vec<_> = names.iter().map(|name| dir.join(name)).collect();
        let shown = |input: Input| input.name().strip_prefix(dir).unwrap().display().to_string();
        let inputs = Inputs { names: &names, keep: true };
        Ok(expand(inputs)?.into_iter().map(shown).collect())
    }

    #[test]
    fn directories_and_globs_stand_for_sorted_files() {
        let dir = files(
            "d/b.jsonl.zst d/a.PARQUET d/deep/c.txt d/.hidden.txt d/_SUCCESS.txt d/README.md d/x.gz e[1].txt f.txt \
             d/dataset_infos.json d/set/dataset_info.json d/set/state.json d/set/cache-1.arrow d/set/data-00000-of-00001.arrow",
        );
        let found = expanded(dir.path(), &["f.txt", "d"]).unwrap();
        let data = "f.txt d/a.PARQUET d/b.jsonl.zst d/deep/c.txt d/set/data-00000-of-00001.arrow";
        assert_eq!(found.join(" "), data);
        let splits = dir.path().join("d/dataset_dict.json");
        fs::write(&splits, r#"{"splits": ["set"]}"#).unwrap();
        assert_eq!(expanded(dir.path(), &["d"]).unwrap(), found[1..]);
        fs::write(&splits, r#"{"splits": ["set", "test"]}"#).unwrap();
        assert_refused(
            expanded(dir.path(), &["d"]),
            "is a dataset with the splits set, test: name those",
        );
        assert_eq!(expanded(dir.path(), &["d/*.jsonl*"]).unwrap(), ["d/b.jsonl.zst"]);
        assert_eq!(expanded(dir.path(), &["**/*.txt"]).unwrap().len(), 5);
        // A file of this name has precedence over the pattern.
        assert_eq!(expanded(dir.path(), &["e[1].txt"]).unwrap(), ["e[1].txt"]);
    }

    #[test]
    fn names_without_files_are_errors() {
        let dir = files("d/README.md a.txt");
        let refuse = |names: &[&str]| expanded(dir.path(), names).unwrap_err().to_string();
        assert!(refuse(&["d"]).contains("has no file that ends in .jsonl, "));
        assert!(refuse(&["*.parquet"]).ends_with("the pattern matches no file"));
        assert!(refuse(&["[.txt"]).contains("is no file and no pattern: "));
        assert!(refuse(&["missing.txt"]).contains("missing.txt: "));
        for again in ["*.txt", "./a.txt"] {
            assert!(refuse(&["a.txt", again]).contains("a.txt: is named twice: name it once"));
        }
        let expand = |names: &[&str]| {
            let names: Vec<_> = names.iter().map(PathBuf::from).collect();
            let shown = |inputs: Vec<Input>| -> Vec<_> {
                inputs.iter().map(|input| input.name().to_owned()).collect()
            };
            let inputs = Inputs { names: &names, keep: true };
            expand(inputs).map(shown).map_err(|error| error.to_string())
        };
        assert!(expand(&[]).is_err());
        assert_eq!(expand(&["-"]).unwrap(), [Path::new("-")]);
        assert!(expand(&["-", "-"]).unwrap_err().contains("name it once"));
        let error = expand(&["https://host/a.txt"]).unwrap_err();
        assert!(
            error.starts_with("https://host/a.txt: is no address of an input, as hf://"),
            "{error}"
        );
        for name in ["s3://b/data/*.jsonl", "gs://b/x", "az://b/x", "abfs://b/x"] {
            let expected = format!(
                "{name}: objects of stores are not read: download them first, with `aws s3 cp` or `rclone copy`"
            );
            assert_eq!(expand(&[name]).unwrap_err(), expected);
        }
    }
}
