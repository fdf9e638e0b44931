//! Memory that operators need in addition to their arguments. It is allocated with the buffers and never during a
//! step.
//! Each device computes the total of its operators' needs.

mod counting;
mod cpu;
#[cfg(gpu)]
mod cuda;
pub(crate) mod gpu;

use crate::attention::AttentionShape;
use crate::cross_entropy::HeadShape;
use crate::{Element, Memory, Result};

/// Passes and a step that a device can reserve memory for ([`Workspace::reserve`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkingSet {
    /// Attention of a micro-batch.
    pub attention: AttentionShape,
    /// Whether a router selects heads.
    pub routed: bool,
    /// Whether queries and keys are normed.
    pub qk_norm: bool,
    /// Whether the passes include backward passes and updates.
    pub training: bool,
    /// Width of the residual stream, C.
    pub width: usize,
    /// Maximum rows, columns or terms of a matmul.
    pub widest: usize,
    /// Maximum tensors of a call of [`crate::adamw::Optimizer::squared_norms`].
    pub tensors: usize,
}

/// The scratch that operators need.
pub trait Workspace: Memory {
    /// Returns the length of the scratch buffer of [`crate::cross_entropy::CrossEntropy::cross_entropy`].
    fn cross_entropy_scratch(&self, shape: &HeadShape) -> usize;

    /// Returns the length of the sums of [`crate::cross_entropy::HeadRanks`] if `ranks` ranks share the rows of
    /// the head.
    fn cross_entropy_sums(&self, shape: &HeadShape, ranks: usize) -> usize;

    /// Allocates the scratch memory of operators in these passes, with elements of type `T`, so
    /// that no scratch is allocated or freed while they run. Without this call operators allocate on first
    /// use.
    fn reserve<T: Element>(&self, passes: &WorkingSet) -> Result<()>;
}
