//! Token embedding: a gather forward, a scatter-add backward.

pub(crate) mod cpu;
