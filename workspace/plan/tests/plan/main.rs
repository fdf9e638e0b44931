//! Plans, against memory and against published figures.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod plan_buffers;
mod plan_memory;
mod recipes;
