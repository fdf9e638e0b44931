//! Linear layers: y = x W^T with W `[outputs, inputs]`, as checkpoints store it.
//!
//! Backward: d_x = d_y W, and d_W += d_y^T x straight into the gradient buffer.

pub(crate) mod cpu;
