//! Scratch of rayon's threads on a CPU.

use super::{WorkingSet, Workspace};
use crate::cross_entropy::{self, HeadShape};
use crate::scratch::{self, ScratchBytes};
use crate::{Cpu, Element, Result, attention, matmul, qk_norm, rms_norm};

/// Returns the maximum bytes of scratch of a thread in these passes.
pub(super) fn thread_scratch_bytes<T: Element>(passes: &WorkingSet) -> ScratchBytes {
    let WorkingSet { attention, qk_norm, training, width, widest, .. } = passes;
    let attention_bytes = attention::cpu::scratch_bytes::<T>(attention, *training);
    let forward = matmul::most_scratch_bytes::<T>(*widest).max(attention_bytes.into());
    if !training {
        return forward;
    }
    let tokens = attention.tokens();
    let qk_norm =
        if *qk_norm { qk_norm::cpu::scratch_bytes(tokens, attention.head_dim) } else { 0 };
    forward.max(rms_norm::cpu::scratch_bytes(tokens, *width).max(qk_norm).into())
}

impl Workspace for Cpu {
    fn cross_entropy_scratch(&self, shape: &HeadShape) -> usize {
        cross_entropy::cpu::scratch(shape)
    }

    fn cross_entropy_sums(&self, shape: &HeadShape, ranks: usize) -> usize {
        cross_entropy::cpu::sums(shape, ranks)
    }

    /// Reserves scratch. On the CPU, each of rayon's threads has its own scratch.
    fn reserve<T: Element>(&self, passes: &WorkingSet) -> Result<()> {
        let bytes = thread_scratch_bytes::<T>(passes);
        rayon::broadcast(|_| scratch::reserve(bytes));
        Ok(())
    }
}
