//! Locates the model of a run on all ranks. The first rank asks the hub which commit a revision is, and the
//! others take that commit: from the cache that they share with it, or else by a download of their own, one
//! rank of each host at a time. So a revision that moves meanwhile does not give two ranks two models.

use std::path::{Path, PathBuf};

use anyhow::bail;
use moh_comm::World;
use moh_device::OpenDevice;
use moh_recipe::Recipe;
use moh_run_directory::{CheckpointName, RunDirectory};
use moh_train::{first_that_keeps_model, share_text};

use moh_program::models;

/// Where the first rank has found the model.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Location {
    /// In a run directory: a run keeps the files of its model for itself and for runs that start from it.
    Kept,
    /// In the directory that the recipe names.
    Directory,
    /// In the cache of the hub, at this commit.
    Commit(String),
}

impl Location {
    fn to_text(&self) -> String {
        match self {
            Location::Kept => "kept".to_owned(),
            Location::Directory => "directory".to_owned(),
            Location::Commit(commit) => format!("commit {commit}"),
        }
    }

    fn from_text(text: &str) -> anyhow::Result<Self> {
        match (text, text.strip_prefix("commit ")) {
            ("kept", _) => Ok(Location::Kept),
            ("directory", _) => Ok(Location::Directory),
            (_, Some(commit)) => Ok(Location::Commit(commit.to_owned())),
            _ => bail!(
                "rank 0 sent {text:?} for the place of its model: start every rank with the same program"
            ),
        }
    }
}

/// The directory of the recipe's `model.from` on this rank; `None` if there is none, or if one of `runs`, this
/// run or the one that it continues, keeps what it needs of it. All ranks call this together.
///
/// # Errors
/// Fails if the model is not found on this rank or another.
pub fn locate(
    recipe: &Recipe,
    runs: &[&RunDirectory],
    device: &OpenDevice,
    world: &World,
) -> anyhow::Result<Option<PathBuf>> {
    let Some(from) = recipe.model.from.as_deref() else { return Ok(None) };
    let revision = recipe.model.revision.as_deref();
    let (mut located, mut text) = (None, None);
    if world.rank() == 0 {
        let place = find(recipe, from, runs)?;
        text = Some(place.0.to_text());
        located = place.1;
    }
    let place = Location::from_text(&share_text(device, world, text)?)?;
    let is_leader = world.local_rank() == 0;
    if world.rank() != 0 && is_leader {
        located = follow(&place, from, revision)?;
    }
    world.group().barrier()?;
    if !is_leader && world.rank() != 0 {
        located = follow(&place, from, revision)?;
    }
    Ok(located)
}

/// The first rank's search.
fn find(
    recipe: &Recipe,
    from: &str,
    runs: &[&RunDirectory],
) -> anyhow::Result<(Location, Option<PathBuf>)> {
    // Before a download: the run would not begin.
    RunDirectory::new(&recipe.run.dir).check()?;
    if first_that_keeps_model(recipe, runs.iter().copied())?.is_some() {
        return Ok((Location::Kept, None));
    }
    if CheckpointName::parse(from).is_some() {
        return Ok((Location::Kept, None));
    }
    let directory = models::locate(from, recipe.model.revision.as_deref())?;
    let place = match moh_hub::commit_of(&directory) {
        Some(commit) if directory != Path::new(from) => Location::Commit(commit.to_owned()),
        _ => Location::Directory,
    };
    Ok((place, Some(directory)))
}

/// On another rank: the first one's result.
fn follow(place: &Location, from: &str, revision: Option<&str>) -> anyhow::Result<Option<PathBuf>> {
    match place {
        Location::Kept => Ok(None),
        Location::Directory if Path::new(from).is_dir() => models::locate(from, revision).map(Some),
        Location::Directory => bail!(
            "{from}: model.from is a directory on rank 0, but not on this rank: put it on a file system \
             that all ranks share, at the same path"
        ),
        Location::Commit(commit) => match moh_hub::cached(from, commit) {
            Some(directory) => Ok(Some(directory)),
            None => models::locate(from, Some(commit)).map(Some),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_location_reads_back_and_other_texts_are_refused() {
        for place in [Location::Kept, Location::Directory, Location::Commit("0ab1".to_owned())] {
            assert_eq!(Location::from_text(&place.to_text()).unwrap(), place);
        }
        for text in ["", "commit", "keep"] {
            assert!(Location::from_text(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_directory_of_rank_0_alone_is_an_error_and_not_a_hub_id() {
        let error =
            follow(&Location::Directory, "no/such-directory", None).unwrap_err().to_string();
        assert!(error.contains("is a directory on rank 0"), "{error}");
    }

    #[test]
    fn a_directory_is_never_taken_for_a_commit_of_the_hub() {
        let dir = tempfile::tempdir().unwrap();
        let from = dir.path().to_str().unwrap();
        assert!(follow(&Location::Commit("0ab1".to_owned()), from, None).is_err());
    }
}
