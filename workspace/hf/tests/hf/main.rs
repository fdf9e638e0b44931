//! Tests of the hub.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod datasets;
