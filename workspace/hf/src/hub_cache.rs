//! Models in the cache of Hugging Face's programs: a folder for each repository, with snapshots of its commits, and a
//! file with the commit of each branch and tag. Module `hub` downloads to the same cache.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::config_file::CONFIG_FILE;
use crate::{Error, WeightFiles, is_hub_id};

/// The revision of a repository if no revision is named.
pub const DEFAULT_REVISION: &str = "main";
/// The folder of a repository's commits.
pub const SNAPSHOTS: &str = "snapshots";

/// Returns the cache: `HF_HUB_CACHE`, `HUGGINGFACE_HUB_CACHE`, or `hub` in [`home`].
pub fn cache_directory() -> PathBuf {
    let named = ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"].into_iter().find_map(path);
    named.unwrap_or_else(|| home().join("hub"))
}

/// Returns the directory of Hugging Face's programs: `HF_HOME`, or else `huggingface` in the user's cache.
pub fn home() -> PathBuf {
    path("HF_HOME").unwrap_or_else(|| {
        let user = path("XDG_CACHE_HOME").unwrap_or_else(|| {
            path("HOME").unwrap_or_else(|| PathBuf::from("/tmp")).join(".cache")
        });
        user.join("huggingface")
    })
}

/// Returns the path in an environment variable.
pub fn path(name: &str) -> Option<PathBuf> {
    std::env::var(name).ok().map(PathBuf::from)
}

/// Returns the directory that `from` names, or `None` if `from` is the id of a repository. A directory has no
/// revisions.
pub fn directory(from: &str, revision: Option<&str>) -> Result<Option<PathBuf>, Error> {
    let path = Path::new(from);
    match (fs::metadata(path), revision) {
        (Ok(found), None) if found.is_dir() => Ok(Some(path.to_path_buf())),
        (Ok(found), Some(revision)) if found.is_dir() => {
            let reason = format!("revision {revision} was given, but only hub ids have revisions");
            Err(Error::file(path, format!("is a directory: {reason}")))
        }
        (Ok(_), _) => Err(Error::file(path, "is a file, expected a model directory or a hub id")),
        (Err(error), _) if error.kind() == ErrorKind::PermissionDenied => {
            Err(Error::io(path)(error))
        }
        (Err(_), _) if is_hub_id(from) => Ok(None),
        (Err(_), _) => {
            let reason = "no such directory, and not a hub id like meta-llama/Meta-Llama-3-8B";
            Err(Error::file(path, reason))
        }
    }
}

/// Returns the model of a repository in the cache at a branch, a tag or a commit, if all of its files exist. A
/// branch has its commit of the last download.
pub fn find_model(cache: &Path, id: &str, revision: &str) -> Option<PathBuf> {
    find_config(cache, id, revision).filter(|snapshot| WeightFiles::open(snapshot).is_ok())
}

/// Returns a model in the cache as [`find_model`] does, if its configuration exists.
pub fn find_config(cache: &Path, id: &str, revision: &str) -> Option<PathBuf> {
    if !is_hub_id(id) || !is_contained(revision) {
        return None;
    }
    let repository = cache.join(format!("models--{}", id.replace('/', "--")));
    let commit = recorded_commit(&repository, revision);
    let snapshot = repository.join(SNAPSHOTS).join(&commit);
    let is_there = || snapshot.join(CONFIG_FILE).is_file();
    (is_content_address(&commit) && is_there()).then_some(snapshot)
}

/// Returns the commit of a model that [`find_model`] has found, or `None` for other directories.
pub fn commit_of(snapshot: &Path) -> Option<&str> {
    let parent = snapshot.parent()?.file_name()?;
    let commit = snapshot.file_name()?.to_str()?;
    (parent == SNAPSHOTS && is_content_address(commit)).then_some(commit)
}

/// Returns the commit of a branch, a tag or a commit at its last download, as the folder of its repository records it.
/// The commit is not checked.
pub fn recorded_commit(repository: &Path, revision: &str) -> String {
    let recorded = fs::read_to_string(repository.join("refs").join(revision));
    recorded.map_or_else(|_| revision.to_owned(), |text| text.trim().to_owned())
}

/// Returns whether an untrusted name stays within any directory to which it is joined.
pub fn is_contained(name: &str) -> bool {
    !name.is_empty()
        && name.split('/').all(|part| !part.is_empty() && part != "." && part != "..")
        && !name.contains(['\\', ':', '\0'])
}

/// Returns whether a text may be the name of a commit or a blob.
pub fn is_content_address(text: &str) -> bool {
    !text.is_empty() && text.len() <= 128 && text.chars().all(|c| c.is_ascii_alphanumeric())
}

#[cfg(test)]
mod tests {
    use moh_kernels::DType;

    use super::*;
    use crate::config_file::tests::small_llama;
    use crate::write_random_model;

    #[test]
    fn a_model_is_found_at_its_commit_and_at_its_branch_once_its_weights_are_there() {
        let dir = tempfile::tempdir().unwrap();
        let cache = dir.path();
        let repository = cache.join("models--some--model");
        let snapshot = repository.join("snapshots/0ab1");
        write_random_model(&snapshot, &small_llama(false), DType::F32, u64::MAX, 1).unwrap();
        assert_eq!(find_model(cache, "some/model", "0ab1"), Some(snapshot.clone()));
        assert_eq!(find_model(cache, "some/model", "main"), None);
        fs::create_dir_all(repository.join("refs/refs/pr")).unwrap();
        fs::write(repository.join("refs/main"), "0ab1\n").unwrap();
        fs::write(repository.join("refs/refs/pr/2"), "../../other").unwrap();
        assert_eq!(find_model(cache, "some/model", "main"), Some(snapshot.clone()));
        assert_eq!(commit_of(&snapshot), Some("0ab1"));
        for (id, revision) in [
            ("some/model", "refs/pr/2"),
            ("some/model", ".."),
            ("some/model", "../refs/main"),
            ("some/other", "main"),
            ("../some/model", "main"),
        ] {
            assert_eq!(find_config(cache, id, revision), None, "{id} {revision}");
        }
        fs::remove_file(snapshot.join("model.safetensors")).unwrap();
        assert_eq!(find_model(cache, "some/model", "main"), None);
        assert_eq!(find_config(cache, "some/model", "main"), Some(snapshot));
    }

    #[test]
    fn a_directory_is_never_taken_for_a_repository() {
        let dir = tempfile::tempdir().unwrap();
        let from = dir.path().to_str().unwrap();
        assert_eq!(directory(from, None).unwrap(), Some(dir.path().to_path_buf()));
        assert_eq!(directory("some/model", Some("main")).unwrap(), None);
        let error = directory(from, Some("main")).unwrap_err().to_string();
        assert!(error.contains("only hub ids have revisions"), "{error}");
        for from in ["./no-such-dir", "a/b/c", "/nothing", "../x", "", "a/../b", "-x", "a b"] {
            let error = directory(from, None).unwrap_err().to_string();
            assert!(error.contains("no such directory, and not a hub id like"), "{error}");
        }
        fs::write(dir.path().join("f"), "").unwrap();
        let error = directory(dir.path().join("f").to_str().unwrap(), None).unwrap_err();
        assert!(error.to_string().contains("is a file"), "{error}");
    }
}
