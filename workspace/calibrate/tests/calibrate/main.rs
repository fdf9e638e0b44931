//! Calibrations.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod calibration;
mod devices;
mod support;
