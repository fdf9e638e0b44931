//! Where time goes: spans of the program, and the kernels that a GPU has run.

pub mod gpu_activity;
pub mod span;
