//! Checks where a model directory may be written: only an earlier model directory is ever replaced.
//!
//! A model directory is recognised by its files: its `config.json` describes a model that this
//! program reads, it has weight files, and every other entry has a name that
//! [`write_model`](crate::write_model) writes.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use crate::config_file::{CONFIG_FILE, ConfigFile};
use crate::model_card::{CARD_FILE, is_terms_file};
use crate::model_directory::{
    GENERATION_FILE, TEMPLATES_FOLDER, companion_name, is_tokenizer_file,
};
use crate::weight_files::{INDEX_FILE, WEIGHTS_FILE};
use crate::{Error, transformers_code};

/// Directories in which version control keeps a repository.
const REPOSITORIES: [&str; 4] = [".git", ".hg", ".jj", ".svn"];
/// Maximum number of foreign files in a message.
const MAX_NAMED_FILES: usize = 3;

/// Checks, before any work, that [`write_model`](crate::write_model) accepts the destination.
///
/// # Errors
/// Fails if `out` is a file, or contains the current directory. Without `force`, fails if `out` is not empty.
/// With `force`, fails if `out` is not a model directory, or contains other files or a repository.
pub fn check_destination(out: &Path, force: bool) -> Result<(), Error> {
    let Some(entries) = list(out)? else { return Ok(()) };
    if let (Ok(current), Ok(out)) = (std::env::current_dir(), out.canonicalize())
        && current.canonicalize().is_ok_and(|current| current.starts_with(&out))
    {
        let reason = "is the current directory or holds it: choose another --out";
        return Err(Error::file(&out, reason));
    }
    if entries.is_empty() {
        return Ok(());
    }
    if !force {
        return Err(Error::file(
            out,
            "is not empty: choose another --out, or --force to replace a model directory",
        ));
    }
    check_replaceable(out, &entries)
}

struct Entry {
    name: String,
    is_file: bool,
}

/// Returns the entries of a directory, sorted, including the entries of the folder of named chat templates. Returns
/// `None` if the directory does not exist.
fn list(out: &Path) -> Result<Option<Vec<Entry>>, Error> {
    let entries = match fs::read_dir(out) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) if error.kind() == ErrorKind::NotADirectory => {
            return Err(Error::file(out, "is a file, expected a directory or nothing"));
        }
        Err(error) => return Err(Error::io(out)(error)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(Error::io(out))?.path();
        let (name, is_file) = (companion_name(&path), path.is_file());
        match name == TEMPLATES_FOLDER && path.is_dir() {
            true => found.extend(list(&path)?.into_iter().flatten()),
            false => found.push(Entry { name, is_file }),
        }
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(Some(found))
}

fn check_replaceable(out: &Path, entries: &[Entry]) -> Result<(), Error> {
    const ONLY: &str = "only a model directory is replaced, choose another --out";
    let holds = |name: &str| entries.iter().any(|entry| entry.name == name);
    if let Some(name) = REPOSITORIES.into_iter().find(|name| holds(name)) {
        return Err(Error::file(out, format!("holds a repository, {name}: {ONLY}")));
    }
    if !holds(CONFIG_FILE) {
        return Err(Error::file(out, format!("holds no {CONFIG_FILE}: {ONLY}")));
    }
    if let Err(error) = ConfigFile::read(out) {
        return Err(Error::file(out, format!("is not a model directory ({error}): {ONLY}")));
    }
    if ![WEIGHTS_FILE, INDEX_FILE].into_iter().any(holds) {
        return Err(Error::file(out, format!("holds no {WEIGHTS_FILE}: {ONLY}")));
    }
    let foreign: Vec<&str> = entries
        .iter()
        .filter(|entry| !(entry.is_file && is_written(&entry.name)))
        .map(|entry| entry.name.as_str())
        .collect();
    if foreign.is_empty() {
        return Ok(());
    }
    let mut named = foreign[..foreign.len().min(MAX_NAMED_FILES)].join(", ");
    if foreign.len() > MAX_NAMED_FILES {
        named = format!("{named} and {} more", foreign.len() - MAX_NAMED_FILES);
    }
    let reason = format!(
        "also holds {named}, which replacing it would delete: move them away, or choose another --out"
    );
    Err(Error::file(out, reason))
}

/// Returns whether a model directory of this program may have a file of this name.
fn is_written(name: &str) -> bool {
    [CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE, GENERATION_FILE, CARD_FILE].contains(&name)
        || is_tokenizer_file(name)
        || is_terms_file(name)
        || is_shard_name(name)
        || transformers_code::is_name(name)
}

/// Returns the name of weight file `number` of `count`, from 1, as transformers writes it.
pub(crate) fn shard_name(number: usize, count: usize) -> String {
    format!("model-{number:05}-of-{count:05}.safetensors")
}

/// Returns whether [`shard_name`] returns this name for some numbers.
fn is_shard_name(text: &str) -> bool {
    let numbers = text
        .strip_prefix("model-")
        .and_then(|rest| rest.strip_suffix(".safetensors"))
        .and_then(|rest| rest.split_once("-of-"));
    let Some((number, count)) = numbers else { return false };
    match (number.parse(), count.parse()) {
        (Ok(number), Ok(count)) => text == shard_name(number, count),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config_file::tests::small_llama;

    /// Returns a directory with these files. `config.json` is a Llama's.
    fn directory(files: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let config = serde_json::json!(small_llama(false).fields);
        for name in files {
            let text = if *name == CONFIG_FILE { config.to_string() } else { "mine".to_string() };
            let path = dir.path().join(name);
            moh_files::create_parents(&path).unwrap();
            fs::write(path, text).unwrap();
        }
        dir
    }

    /// Returns the error of a directory that `force` may not replace. Checks that no file is lost.
    fn refused(dir: &Path) -> String {
        let before = list(dir).unwrap().unwrap().len();
        let message = check_destination(dir, true).unwrap_err().to_string();
        assert_eq!(list(dir).unwrap().unwrap().len(), before);
        message
    }

    #[test]
    fn a_model_directory_is_recognised() {
        for files in [
            &["config.json", "model.safetensors"][..],
            &["config.json", INDEX_FILE, "model-00001-of-00002.safetensors", "tokenizer.json"],
            &["config.json", WEIGHTS_FILE, "chat_template.jinja", "generation_config.json"],
            &["config.json", WEIGHTS_FILE, "README.md", "LICENSE", "modeling_moh_llama.py"],
            &["config.json", WEIGHTS_FILE, "additional_chat_templates/rag.jinja"],
        ] {
            let dir = directory(files);
            check_destination(dir.path(), true).unwrap();
            let message = check_destination(dir.path(), false).unwrap_err().to_string();
            assert!(
                message.contains("is not empty: choose another --out, or --force"),
                "{message}"
            );
        }
        check_destination(&directory(&[]).path().join("new"), false).unwrap();
        check_destination(directory(&[]).path(), false).unwrap();
    }

    #[test]
    fn another_directory_is_refused() {
        let dir = directory(&["diary"]);
        assert!(refused(dir.path()).contains("holds no config.json: only a model directory"));
        let dir = directory(&["index.html"]);
        fs::write(dir.path().join(CONFIG_FILE), "{\"port\": 8080}").unwrap();
        let message = refused(dir.path());
        assert!(message.contains("is not a model directory") && message.contains("model_type"));
        let dir = directory(&[CONFIG_FILE]);
        assert!(refused(dir.path()).contains("holds no model.safetensors: only a model directory"));
        let dir = directory(&["diary"]);
        let message = check_destination(&dir.path().join("diary"), true).unwrap_err().to_string();
        assert!(message.contains("is a file"), "{message}");
    }

    #[test]
    fn foreign_files_are_named() {
        let model = ["config.json", "model.safetensors"];
        for (files, expected) in [
            (&["thesis.txt"][..], "also holds thesis.txt, which"),
            (&["README.txt", "LICENSE.py"], "also holds LICENSE.py, README.txt, which"),
            (&["a", "b", "c", "d", "e"], "also holds a, b, c and 2 more, which"),
            (&["model-1-of-2.safetensors"], "also holds model-1-of-2.safetensors, which"),
            (&["additional_chat_templates/a.txt"], "holds additional_chat_templates/a.txt, which"),
            (&[".git"], "holds a repository, .git: only a model directory"),
        ] {
            let message = refused(directory(&[&model[..], files].concat()).path());
            assert!(message.contains(expected), "{message}");
        }
        for name in ["checkpoint-500", "tokenizer.json", ".jj"] {
            let dir = directory(&model);
            fs::create_dir(dir.path().join(name)).unwrap();
            let message = refused(dir.path());
            assert!(message.contains(name), "{message}");
        }
    }

    #[test]
    fn the_current_directory_and_its_parents_are_refused() {
        let current = std::env::current_dir().unwrap();
        for out in [Path::new("."), current.as_path(), current.parent().unwrap(), Path::new("/")] {
            for force in [false, true] {
                let message = check_destination(out, force).unwrap_err().to_string();
                assert!(message.contains("is the current directory or holds it"), "{message}");
            }
        }
    }
}
