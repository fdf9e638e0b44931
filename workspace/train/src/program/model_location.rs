//! Locates the model of a run on all ranks: in a directory, or in the cache of the hub, as it was downloaded. Each rank
//! finds the same model as the first rank. For a model of the hub this is the same commit: a branch that has moved
//! between downloads does not give two ranks two models.

use std::path::{Path, PathBuf};

use anyhow::bail;
use moh_checkpoint::run_directory::{CheckpointName, RunDirectory, not_a_model};
use moh_comm::World;
use moh_hf::hub_cache::{self, DEFAULT_REVISION};
use moh_kernels::open_device::OpenDevice;
use moh_recipe::Recipe;
use moh_recipe::shell::shell_word;
use moh_train::{first_that_keeps_model, share_text};

/// Returns the directory of the recipe's `model.from` on this rank. Returns `None` if the recipe names no model, or
/// names a run. Also returns `None` if one of `runs`, this run and its parent, keeps the model's files. All ranks call
/// this together.
pub(crate) fn locate(
    recipe: &Recipe,
    runs: &[&RunDirectory],
    device: &OpenDevice,
    world: &World,
) -> anyhow::Result<Option<PathBuf>> {
    let Some(from) = recipe.model.from.as_deref() else { return Ok(None) };
    let revision = recipe.model.revision.as_deref();
    let (mut found, mut text) = (None, None);
    if world.rank() == 0 {
        if CheckpointName::parse(from).is_none()
            && first_that_keeps_model(recipe, runs.iter().copied())?.is_none()
        {
            found = Some(find(from, revision)?);
        }
        text = Some(described(found.as_deref()));
    }
    let text = share_text(device, world, text)?;
    if world.rank() != 0 {
        found = follow(&text, from, revision)?;
    }
    Ok(found)
}

/// Returns the directory of the model `from`.
pub(crate) fn find(from: &str, revision: Option<&str>) -> anyhow::Result<PathBuf> {
    if let Some(directory) = hub_cache::directory(from, revision)? {
        return match not_a_model(&directory) {
            None => Ok(directory),
            Some(kind) => bail!("{}: {kind}", directory.display()),
        };
    }
    in_cache(from, revision, hub_cache::find_model)
}

/// Returns the directory with the configuration of the model `from`.
pub(crate) fn find_config(from: &str, revision: Option<&str>) -> anyhow::Result<PathBuf> {
    match hub_cache::directory(from, revision)? {
        Some(directory) => Ok(directory),
        None => in_cache(from, revision, hub_cache::find_config),
    }
}

/// Returns the directory that `search` finds in the cache of the hub.
fn in_cache(
    id: &str,
    revision: Option<&str>,
    search: fn(&Path, &str, &str) -> Option<PathBuf>,
) -> anyhow::Result<PathBuf> {
    let (cache, named) = (hub_cache::cache_directory(), revision.unwrap_or(DEFAULT_REVISION));
    if let Some(snapshot) = search(&cache, id, named) {
        return Ok(snapshot);
    }
    let option = revision.map_or(String::new(), |name| format!(" --revision {}", shell_word(name)));
    bail!(
        "{id}: no such directory, and revision {named} of this model is not in the hub's cache {}: download it with \
         moh-convert --from {id}{option} --download",
        cache.display()
    );
}

/// Describes the first rank's result to the other ranks: nothing, a commit, or a directory.
fn described(found: Option<&Path>) -> String {
    match found {
        None => String::new(),
        Some(directory) => hub_cache::commit_of(directory).unwrap_or("/").to_owned(),
    }
}

/// Returns the model's directory on another rank than the first, which has sent `text`.
fn follow(text: &str, from: &str, revision: Option<&str>) -> anyhow::Result<Option<PathBuf>> {
    match text {
        "" => Ok(None),
        _ if Path::new(from).is_dir() => find(from, revision).map(Some),
        "/" => bail!(
            "{from}: model.from is a directory on rank 0, but not on this rank: put it on a file system that all \
             ranks share, at the same path"
        ),
        commit => find(from, Some(commit)).map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_without_a_model_have_none_to_find() {
        assert_eq!(described(None), "");
        assert_eq!(follow("", "no/such-model", None).unwrap(), None);
    }

    #[test]
    fn a_directory_of_rank_0_alone_is_an_error_and_not_a_hub_id() {
        let text = described(Some(Path::new("no/such-directory")));
        let error = follow(&text, "no/such-directory", None).unwrap_err().to_string();
        assert!(error.contains("is a directory on rank 0"), "{error}");
    }

    #[test]
    fn a_commit_of_rank_0_is_looked_for_at_that_commit() {
        let text = described(Some(Path::new("cache/models--no--model/snapshots/0ab1")));
        let error = follow(&text, "no/such-model", Some("main")).unwrap_err().to_string();
        assert!(error.contains("moh-convert --from no/such-model --revision 0ab1"), "{error}");
    }
}
