//! Every reader of files and messages with mutated input: no panic, and no memory beyond its bound.

// A run is prepared outside of a test function.
#![allow(clippy::unwrap_used)]

mod chat;
mod checkpoint;
mod configuration;
mod documents;
mod heads;
mod model_card;
mod rendezvous;
mod tokens;
mod weights;

use std::fmt::Display;
use std::path::Path;

use moh_testkit::fuzz::{PeakAlloc, Target};

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Returns a reader that may use `mebibytes` MiB in addition to its input.
fn target<'a>(name: &'a str, seeds: &'a [Vec<u8>], mebibytes: usize) -> Target<'a> {
    Target { name, seeds, memory: mebibytes << 20, allocator: &ALLOCATOR }
}

/// Runs a target with a reader of a file of this name.
fn run_on_file(target: Target<'_>, name: &str, read: impl Fn(&Path) -> Result<(), String>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    target.run(|input| {
        std::fs::write(&path, input).unwrap();
        read(&path)
    });
}

/// Returns the outcome of a reader as text.
fn outcome<T, E: Display>(read: Result<T, E>) -> Result<(), String> {
    read.map(|_| ()).map_err(|error| error.to_string())
}

fn repository(path: &str) -> Vec<u8> {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    std::fs::read(Path::new(root).join(path)).unwrap()
}
