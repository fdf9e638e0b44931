//! Every reader of files and messages against mutated input: no panic, no memory beyond its bound.

// A run that is made ready outside of a test function.
#![allow(clippy::unwrap_used)]

mod chat;
mod checkpoint;
mod configuration;
mod dataset;
mod documents;
mod heads;
mod model_card;
mod recipe;
mod rendezvous;
mod tokenizer;
mod tokens;
mod weights;

use std::fmt::Display;

use moh_testkit::fuzz::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// The outcome of a reader as text.
fn outcome<T, E: Display>(read: Result<T, E>) -> Result<(), String> {
    read.map(|_| ()).map_err(|error| error.to_string())
}

/// A file of the repository.
fn repository(path: &str) -> Vec<u8> {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    std::fs::read(std::path::Path::new(root).join(path)).unwrap()
}
