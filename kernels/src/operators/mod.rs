//! The operators, one folder each: the formula, the trait and the arguments in `mod.rs`, and an implementation for
//! each device. `kernels.cu` includes all of their CUDA code as one unit.

pub mod adamw;
pub mod add;
pub mod attention;
pub mod convert;
pub mod cross_entropy;
pub mod embedding;
pub mod key_value_cache;
pub mod linear;
pub mod qk_norm;
pub mod rms_norm;
pub mod rope;
pub mod router;
pub mod sampling;
pub mod swiglu;
