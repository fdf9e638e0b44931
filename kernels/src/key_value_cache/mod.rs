//! The cache of keys and values that generation appends to.

pub(crate) mod cpu;
