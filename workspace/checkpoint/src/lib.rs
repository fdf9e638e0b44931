//! Checkpoints: directories that are complete or absent.
//!
//! A checkpoint contains the exact f32 weights and both moments as safetensors under Hugging Face's
//! names, with each rank's shard in its own files. Each rank lists its shards of tensors, with their
//! position and hash, in a part. A manifest records the state of the run and the parts, so that other
//! layouts of ranks can read the checkpoint: each rank reads only the shards that it needs. The
//! manifest's own hash is stored beside it. Each rank copies its state to the host's memory and writes it
//! on a background thread to a temporary name. The first rank renames the directory after every file is
//! synced. If a checkpoint's bytes are wrong, it is moved aside, and the checkpoint before it is used.
//! Any other failure to open a checkpoint ends the program and changes nothing.

mod background;
mod error;
mod flight;
mod growth;
mod listing;
mod load;
mod manifest;
mod part;
mod progress;
mod read;
mod read_error;
mod retention;
pub mod run_directory;
pub mod run_log;
mod shard_file;
mod snapshot;
mod stored;
mod tensor_file;
mod write;

pub use error::{Error, Result};
pub use flight::{CompleteCheckpoint, End, Flight, ThreadFlags, WritePart};
pub use growth::{StageExtension, steps_at};
pub use listing::{Condition, ListedCheckpoint, list};
pub use load::{gather_weights, load};
pub use manifest::{Manifest, PartFile, RunState};
pub use part::{RankPart, TensorEntry, TensorFile};
pub use read::{
    OnDamage, alone, newest, newest_good, of_step, quarantine_if_damaged, require, set_aside_later,
    verify,
};
pub use read_error::ReadError;
pub use retention::{prune, remove, superseded, superseded_by_good};
pub use run_directory::RunDirectory;
pub use snapshot::{Snapshot, staging_bytes};
pub use stored::{StoredCheckpoint, TensorRequest};
pub use write::{begin, publish, write_part};

const MANIFEST: &str = "manifest.json";
/// Name of the file with the manifest's own hash, in the format of `b3sum --check`.
const MANIFEST_HASH: &str = "manifest.json.b3";
/// Bytes that are converted, hashed and written at a time: enough for several threads to share.
const CHUNK_BYTES: usize = 8 << 20;
/// Maximum bytes of a manifest, a part or a safetensors header, for readers and writers.
const MAX_TEXT_BYTES: u64 = 100_000_000;
