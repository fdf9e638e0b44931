//! Conversions, from the library and from the program.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod calibration;
mod convert;
mod released;
mod runs;
mod training;
