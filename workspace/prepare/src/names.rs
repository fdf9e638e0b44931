//! The names of inputs: files, globs, directories, and `-` for standard input. A glob and a directory stand
//! for the files in them, sorted by path, so the order of documents is the same on every machine.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// The name of standard input.
const STANDARD_INPUT: &str = "-";
/// The endings of files that a directory stands for.
const DATA_ENDINGS: [&str; 6] = ["jsonl", "json", "txt", "parquet", "arrow", "ndjson"];
/// Endings of compressed files, after one of the others.
const COMPRESSED_ENDINGS: [&str; 4] = ["gz", "zst", "bz2", "xz"];

/// Whether a preparation of these inputs can be continued: not if one of them is standard input or another
/// pipe.
pub fn can_continue(names: &[PathBuf]) -> bool {
    // A name that is not there is a pattern of files.
    let is_pipe = |name: &PathBuf| {
        is_standard_input(name)
            || name.metadata().is_ok_and(|kind| !kind.is_file() && !kind.is_dir())
    };
    !names.iter().any(is_pipe)
}

/// Whether `path` names standard input.
pub(crate) fn is_standard_input(path: &Path) -> bool {
    path.as_os_str() == STANDARD_INPUT
}

/// The files that `names` stand for, in order, and `-` where it is named.
///
/// # Errors
/// Fails if there is no name, if a file cannot be read, if a glob or a directory has no file, or if a file is
/// named twice.
pub(crate) fn expand(names: &[PathBuf]) -> Result<Vec<PathBuf>> {
    if names.is_empty() {
        return Err(Error::options("no input: name at least one file"));
    }
    let mut paths = Vec::new();
    for name in names {
        match name.metadata() {
            _ if is_standard_input(name) => paths.push(name.clone()),
            Ok(kind) if kind.is_dir() => paths.extend(files_in(name)?),
            Ok(_) => paths.push(name.clone()),
            Err(_) if is_glob(name) => paths.extend(files_of_glob(name)?),
            Err(error) => return Err(moh_files::io(name)(error).into()),
        }
    }
    refuse_repeated(&paths)?;
    Ok(paths)
}

/// Bytes of all inputs as they are stored; 0 if that is unknown, as of standard input and other pipes.
pub(crate) fn total_bytes(paths: &[PathBuf]) -> Result<u64> {
    let mut total = 0;
    for path in paths {
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

fn refuse_repeated(paths: &[PathBuf]) -> Result<()> {
    let mut seen = BTreeSet::new();
    for path in paths {
        if is_standard_input(path) {
            if !seen.insert(path.clone()) {
                return Err(Error::input(path, "standard input can be read once: name it once"));
            }
            continue;
        }
        // A pipe has no canonical path, and is a file of its own.
        let is_file = path.metadata().is_ok_and(|kind| kind.is_file());
        if is_file && !seen.insert(path.canonicalize().map_err(moh_files::io(path))?) {
            let reason = "is named twice: name it once; a source's weight in a recipe reads its tokens more often";
            return Err(Error::input(path, reason));
        }
    }
    Ok(())
}

fn is_glob(name: &Path) -> bool {
    name.as_os_str().as_encoded_bytes().iter().any(|byte| b"*?[".contains(byte))
}

fn files_of_glob(name: &Path) -> Result<Vec<PathBuf>> {
    let Some(pattern) = name.to_str() else {
        return Err(Error::input(name, "is no file, and a pattern must be UTF-8"));
    };
    let found = glob::glob(pattern)
        .map_err(|error| Error::input(name, format!("is no file and no pattern: {error}")))?;
    let mut paths = Vec::new();
    for path in found {
        let path = path.map_err(|error| moh_files::io(error.path())(error.into()))?;
        // A pattern that names a directory names its files with a further /*.
        if !path.is_dir() {
            paths.push(path);
        }
    }
    paths.sort();
    match paths.is_empty() {
        true => Err(Error::input(name, "the pattern matches no file")),
        false => Ok(paths),
    }
}

/// The data files below a directory. Hidden ones and those whose name starts with `_` are left out, as
/// programs write such files beside data.
fn files_in(directory: &Path) -> Result<Vec<PathBuf>> {
    let (mut paths, mut directories) = (Vec::new(), vec![directory.to_path_buf()]);
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory).map_err(moh_files::io(&directory))? {
            let path = entry.map_err(moh_files::io(&directory))?.path();
            let name = path.file_name().unwrap_or_default().as_encoded_bytes();
            if name.starts_with(b".") || name.starts_with(b"_") {
                continue;
            }
            if path.is_dir() {
                directories.push(path);
            } else if is_data(&path) {
                paths.push(path);
            }
        }
    }
    paths.sort();
    match paths.is_empty() {
        true => Err(Error::input(
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

/// Whether the name of a file says that it holds data.
fn is_data(path: &Path) -> bool {
    let ends_in = |path: &Path, endings: &[&str]| {
        path.extension()
            .is_some_and(|end| endings.iter().any(|known| end.eq_ignore_ascii_case(known)))
    };
    match ends_in(path, &COMPRESSED_ENDINGS) {
        true => ends_in(&path.with_extension(""), &DATA_ENDINGS),
        false => ends_in(path, &DATA_ENDINGS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory with these files.
    fn files(names: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for name in names {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, b"").unwrap();
        }
        dir
    }

    fn expanded(dir: &Path, names: &[&str]) -> Result<Vec<String>> {
        let names: Vec<_> = names.iter().map(|name| dir.join(name)).collect();
        let shown = |path: PathBuf| path.strip_prefix(dir).unwrap().display().to_string();
        Ok(expand(&names)?.into_iter().map(shown).collect())
    }

    #[test]
    fn directories_and_globs_stand_for_sorted_files() {
        let dir = files(&[
            "d/b.jsonl.zst",
            "d/a.PARQUET",
            "d/deep/c.txt",
            "d/.hidden.txt",
            "d/_SUCCESS.txt",
            "d/README.md",
            "d/x.gz",
            "e[1].txt",
            "f.txt",
        ]);
        let found = expanded(dir.path(), &["f.txt", "d"]).unwrap();
        assert_eq!(found, ["f.txt", "d/a.PARQUET", "d/b.jsonl.zst", "d/deep/c.txt"]);
        assert_eq!(expanded(dir.path(), &["d/*.jsonl*"]).unwrap(), ["d/b.jsonl.zst"]);
        assert_eq!(expanded(dir.path(), &["**/*.txt"]).unwrap().len(), 5);
        // A file of that name wins over the pattern.
        assert_eq!(expanded(dir.path(), &["e[1].txt"]).unwrap(), ["e[1].txt"]);
    }

    #[test]
    fn names_without_files_are_errors() {
        let dir = files(&["d/README.md", "a.txt"]);
        let refuse = |names: &[&str]| expanded(dir.path(), names).unwrap_err().to_string();
        assert!(refuse(&["d"]).contains("has no file that ends in .jsonl, "));
        assert!(refuse(&["*.parquet"]).ends_with("the pattern matches no file"));
        assert!(refuse(&["[.txt"]).contains("is no file and no pattern: "));
        assert!(refuse(&["missing.txt"]).contains("missing.txt: "));
        assert!(refuse(&["a.txt", "*.txt"]).contains("a.txt: is named twice"));
        assert!(expand(&[]).is_err());
        let dash = PathBuf::from("-");
        assert_eq!(expand(std::slice::from_ref(&dash)).unwrap(), std::slice::from_ref(&dash));
        assert!(expand(&[dash.clone(), dash]).unwrap_err().to_string().contains("name it once"));
    }
}
