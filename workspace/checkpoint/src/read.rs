//! Finds the newest valid checkpoint, on which the ranks agree.

use std::fs;
use std::path::{Path, PathBuf};

use moh_comm::World;
use moh_files::{FileError, first_free_suffixed};
use moh_kernels::{Backend, Cpu};
use moh_model::Shard;
use moh_step::Ranks;

use super::MANIFEST;
use crate::listing::{ASIDE, DAMAGED};
use crate::{Error, ReadError, Result, RunDirectory, StoredCheckpoint};

/// Receives the new path of a damaged checkpoint and the damage, on the first rank.
pub type OnDamage<'a> = &'a mut dyn FnMut(&Path, &Error);

/// Returns the newest checkpoint with a valid manifest, the same on all ranks. Its tensors are checked when they
/// are read. Renames damaged checkpoints to `damaged-step-N` and passes them to `damaged`.
///
/// # Errors
/// Fails if a directory cannot be listed or renamed, if a checkpoint cannot be read or has another
/// format, if only some ranks see its files, or if another rank has failed. On failure the
/// checkpoints are unchanged.
pub fn newest<B: Backend>(
    run: &RunDirectory,
    ranks: &mut Ranks<B>,
    damaged: OnDamage<'_>,
) -> Result<Option<StoredCheckpoint>> {
    loop {
        // Steps count from 1, so 0 stands for no checkpoint. f64 represents the steps exactly.
        let listed = || Ok(run.checkpoint_steps()?.last().copied().unwrap_or(0) as f64);
        let step = ranks.rank0_computes::<Error>(listed)? as u64;
        if step == 0 {
            return Ok(None);
        }
        let opened = StoredCheckpoint::open(&run.checkpoint(step), step);
        if let Some(stored) = quarantine_if_damaged(run, ranks, step, opened, damaged)? {
            return Ok(Some(stored));
        }
    }
}

/// Returns the newest checkpoint with good bytes, the same on all ranks. The ranks share the check of its
/// hashes. Returns `None` if no checkpoint is good. Changes nothing.
pub fn newest_good<B: Backend>(
    run: &RunDirectory,
    ranks: &mut Ranks<B>,
) -> Result<Option<StoredCheckpoint>> {
    let mut below = f64::INFINITY;
    loop {
        let listed = || {
            let steps = run.checkpoint_steps()?;
            Ok(steps.into_iter().rfind(|&step| (step as f64) < below).unwrap_or(0) as f64)
        };
        let step = ranks.rank0_computes::<Error>(listed)?;
        if step == 0.0 {
            return Ok(None);
        }
        if let Ok(stored) = examine(run, ranks, step as u64)? {
            return Ok(Some(stored));
        }
        below = step;
    }
}

/// Returns the checkpoint of `step`. The ranks share the check of its hashes.
///
/// # Errors
/// Fails if the checkpoint is missing or damaged, and for the same reasons as [`newest`]. Nothing is changed.
pub fn of_step<B: Backend>(
    run: &RunDirectory,
    ranks: &mut Ranks<B>,
    step: u64,
) -> Result<StoredCheckpoint> {
    ranks.on_rank0(|| require(run, step))?;
    let found = examine(run, ranks, step)?;
    ranks.agree(found)
}

/// Checks every byte of the checkpoint of `step`. The inner error is its damage. Changes nothing.
///
/// # Errors
/// Fails if the checkpoint is missing, cannot be read, or has another format.
pub fn verify(run: &RunDirectory, step: u64) -> Result<Result<StoredCheckpoint>> {
    require(run, step)?;
    examine(run, &mut alone()?, step)
}

/// Fails with a list of the existing steps if the run has no checkpoint of `step`.
pub fn require(run: &RunDirectory, step: u64) -> Result<()> {
    let found = run.checkpoint_steps()?;
    if found.contains(&step) {
        return Ok(());
    }
    let found: Vec<String> = found.iter().map(u64::to_string).collect();
    let found = match found.is_empty() {
        true => "it has none".to_owned(),
        false => format!("name one of {}", found.join(", ")),
    };
    let run = run.root().display();
    Err(Error::NoCheckpoint(format!("{run}: the run has no checkpoint of step {step}: {found}")))
}

/// Returns the only rank of a program that does not train.
pub fn alone() -> Result<Ranks<Cpu>> {
    Ok(Ranks::new(Cpu, World::single().group().clone())?)
}

/// Opens a checkpoint and checks its hashes, which the ranks share. All ranks return the same verdict. The
/// inner error says that bytes are wrong. Where only another rank has found the damage, the error says so.
fn examine<B: Backend>(
    run: &RunDirectory,
    ranks: &mut Ranks<B>,
    step: u64,
) -> Result<Result<StoredCheckpoint>> {
    let directory = run.checkpoint(step);
    let opened = StoredCheckpoint::open(&directory, step).and_then(|stored| {
        stored.check_share(Shard::from_group(ranks.group()))?;
        Ok(stored)
    });
    let opened = agree_on_damage(ranks, &directory, opened)?.map_err(Error::from);
    Ok(match ranks.any(opened.is_err())? {
        true => Err(opened.err().unwrap_or_else(|| damaged_elsewhere(&directory))),
        false => opened,
    })
}

/// Returns the data in `read`, which this rank has read from the checkpoint of `step`. If any rank has found
/// wrong bytes, renames the checkpoint and returns `None` on all ranks.
pub fn quarantine_if_damaged<B: Backend, R>(
    run: &RunDirectory,
    ranks: &mut Ranks<B>,
    step: u64,
    read: Result<R, ReadError>,
    damaged: OnDamage<'_>,
) -> Result<Option<R>> {
    let directory = run.checkpoint(step);
    let read = agree_on_damage(ranks, &directory, read)?.map_err(Error::from);
    if !ranks.any(read.is_err())? {
        return read.map(Some);
    }
    let aside = free_name(run, DAMAGED, step);
    ranks.on_rank0(|| rename(run, step, &aside))?;
    if ranks.is_first() {
        // The first rank reports, even if another rank has found the damage.
        let error = read.err().unwrap_or_else(|| damaged_elsewhere(&aside));
        damaged(&aside, &error);
    }
    Ok(None)
}

fn damaged_elsewhere(directory: &Path) -> Error {
    moh_files::unusable(&directory.join(MANIFEST), "another rank found a damaged file").into()
}

/// Returns this rank's `read` if the ranks together can tell whether the bytes are good.
fn agree_on_damage<B: Backend, R>(
    ranks: &mut Ranks<B>,
    directory: &Path,
    read: Result<R, ReadError>,
) -> Result<Result<R, ReadError>> {
    let read = ranks.agree(match read {
        Err(ReadError::Unusable(error)) => Err(error),
        read => Ok(read),
    })?;
    let missing = match &read {
        Err(ReadError::Missing(Error::File(FileError::Io { path, .. }))) => path.file_name(),
        _ => None,
    };
    let missing = missing.map(|name| name.as_encoded_bytes().to_vec());
    let Some(name) = ranks.first_that_has(missing)? else { return Ok(read) };
    // Not every rank needs the file, but all can look for it.
    let path = directory.join(String::from_utf8_lossy(&name).as_ref());
    let is_seen = ranks.any(path.exists())?;
    ranks.agree(match read {
        Err(ReadError::Missing(Error::File(FileError::Io { path, source }))) if is_seen => {
            let reason = format!(
                "{source}, but other ranks see the checkpoint: put the run directory on a file system that all ranks \
                 share"
            );
            Err(moh_files::unusable(&path, reason).into())
        }
        read => Ok(read),
    })
}

/// Renames the checkpoints after `step` to `aside-step-N`, so that no run resumes from them. Returns the new paths.
pub fn set_aside_later(run: &RunDirectory, step: u64) -> Result<Vec<PathBuf>> {
    let steps = run.checkpoint_steps()?;
    let mut renamed = Vec::new();
    // Newest first: after an interruption the remaining checkpoints are the earliest ones.
    for later in steps.into_iter().rev().take_while(|&later| later > step) {
        let aside = free_name(run, ASIDE, later);
        rename(run, later, &aside)?;
        renamed.push(aside);
    }
    Ok(renamed)
}

/// Returns a free name for a checkpoint that is moved aside, next to earlier ones of the same step.
fn free_name(run: &RunDirectory, prefix: &str, step: u64) -> PathBuf {
    first_free_suffixed(|suffix| run.checkpoints().join(format!("{prefix}{step}{suffix}")))
}

fn rename(run: &RunDirectory, step: u64, aside: &Path) -> Result<()> {
    fs::rename(run.checkpoint(step), aside).map_err(moh_files::io(aside))?;
    Ok(moh_files::sync_directory(&run.checkpoints()).map_err(moh_files::io(&run.checkpoints()))?)
}
