//! Memory that a GPU has beside buffers, whatever the operators. It is compiled in every build, so that it can be counted
//! on machines without a GPU.

/// Maximum blocks: several times as many as fill a large GPU.
pub(crate) const MAX_BLOCKS: usize = 4096;
/// Device memory of cuBLASLt's workspace.
pub(crate) const MATMUL: usize = 64 << 20;
/// Bytes of the counter that is 0 before and after every kernel.
pub(crate) const COUNTER: usize = size_of::<u32>();
