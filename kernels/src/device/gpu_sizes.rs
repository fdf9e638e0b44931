//! Memory that a GPU needs in addition to buffers, for any operators. It is compiled in every build, so that it can be
//! counted on machines without a GPU.

/// Maximum blocks: several times the blocks that fill a large GPU.
pub(crate) const MAX_BLOCKS: usize = 4096;
/// Device memory of cuBLASLt's workspace.
pub(crate) const MATMUL: usize = 64 << 20;
/// Bytes of the counter that is 0 before and after every kernel.
pub(crate) const COUNTER: usize = size_of::<u32>();
