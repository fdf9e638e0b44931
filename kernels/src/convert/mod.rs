//! Copies numbers to another type of number.

pub(crate) mod cpu;
#[cfg(gpu)]
pub(crate) mod cuda;
