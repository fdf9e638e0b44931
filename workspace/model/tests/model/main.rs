//! Models against references.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod candle_reference;
mod devices;
mod generation;
mod gradients;
mod moh_reference;
mod qwen3;
mod reference_vectors;
mod routing_statistics;
