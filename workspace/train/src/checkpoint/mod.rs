//! Checkpoints: directories that are complete or absent.
//!
//! A checkpoint holds the exact f32 weights and both moments as safetensors under Hugging Face's
//! names, each rank's shard in files of its own, and a manifest with the state of the run and, for each
//! part of a tensor, its file, place and hash, so that a training on other ranks can read it; the
//! manifest's own hash lies beside it. It is written beside its place, synced and renamed; one whose
//! hashes do not fit is set aside and the one before it is used.

mod manifest;
mod read;
mod write;

pub use manifest::{Evaluation, Manifest, Moment, RunState, TensorEntry, TensorKind};
pub use read::{StoredCheckpoint, newest};
pub(crate) use write::staging_bytes;
pub use write::{prune, write};

/// Name of the manifest in a checkpoint's directory.
const MANIFEST: &str = "manifest.json";
/// Name of the file with the manifest's own hash, as `b3sum --check` reads it.
const MANIFEST_HASH: &str = "manifest.json.b3";
