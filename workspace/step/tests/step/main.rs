//! Steps against references.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod adamw_reference;
mod masked_gradient;
