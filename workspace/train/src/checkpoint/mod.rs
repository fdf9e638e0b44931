//! Checkpoints: directories that are complete or absent.
//!
//! A checkpoint contains the exact f32 weights and both moments as safetensors under Hugging Face's
//! names, with each rank's shard in its own files. A manifest records the state of the run and, for
//! each shard of a tensor, its file, position and hash, so that other layouts of ranks can read it;
//! the manifest's own hash is stored beside it. A checkpoint is written to a temporary name, synced
//! and renamed. One whose bytes are wrong is moved aside, and the one before it is used; any other
//! failure to open one ends the program and changes nothing.

mod fault;
mod manifest;
mod read;
mod write;

pub use manifest::{Evaluation, Manifest, Moment, RunState, TensorEntry, TensorKind};
pub use read::{StoredCheckpoint, newest};
pub(crate) use write::staging_bytes;
pub use write::{prune, write};

/// Name of the manifest in a checkpoint's directory.
const MANIFEST: &str = "manifest.json";
/// Name of the file with the manifest's own hash, in the format of `b3sum --check`.
const MANIFEST_HASH: &str = "manifest.json.b3";
