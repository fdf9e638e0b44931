//! Scratch that is counted, with the size that the counted device would reserve.

use super::{WorkingSet, Workspace, cpu, gpu};
use crate::cross_entropy::{self, HeadShape};
use crate::{CountedDevice, CountingMemory, Element, Result, gpu_sizes};

impl Workspace for CountingMemory {
    fn cross_entropy_scratch(&self, shape: &HeadShape) -> usize {
        match self.device {
            CountedDevice::Cpu => cross_entropy::cpu::scratch(shape),
            CountedDevice::Gpu => gpu::cross_entropy_scratch(shape),
        }
    }

    fn cross_entropy_sums(&self, shape: &HeadShape, ranks: usize) -> usize {
        match self.device {
            CountedDevice::Cpu => cross_entropy::cpu::sums(shape, ranks),
            CountedDevice::Gpu => gpu::cross_entropy_sums(shape, ranks),
        }
    }

    fn reserve<T: Element>(&self, passes: &WorkingSet) -> Result<()> {
        match self.device {
            CountedDevice::Cpu => {
                let bytes = cpu::thread_scratch_bytes::<T>(passes).total() as u64;
                self.reserve_thread_scratch(bytes);
            }
            CountedDevice::Gpu => {
                let WorkingSet { attention, routed, .. } = passes;
                let backward = gpu::attention::backward_bytes::<T>(attention, *routed);
                let scratch = gpu::scratch_bytes(passes, backward);
                let bytes = (scratch + gpu_sizes::COUNTER) as u64;
                self.reserve_scratch(bytes);
            }
        }
        Ok(())
    }
}
