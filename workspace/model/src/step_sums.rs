//! The sums of a training step.

use moh_comm::{Group, Reduce};
use moh_kernels::Memory;

use crate::Error;

/// The sums of a step, on the device; passes and the optimiser add to them.
pub struct StepSums<B: Memory> {
    /// Cross-entropy of the targets, balance loss averaged over layers, squared gradients.
    sums: B::Buffer<f64>,
}

impl<B: Memory> StepSums<B> {
    /// Allocates zeros.
    ///
    /// # Errors
    /// Fails if the device is out of memory.
    pub fn new(backend: &B) -> Result<Self, Error> {
        Ok(StepSums { sums: backend.allocate(3)? })
    }

    /// Resets the sums to zero.
    ///
    /// # Errors
    /// Fails if the device fails.
    pub fn zero(&mut self, backend: &B) -> Result<(), Error> {
        Ok(backend.zero(B::whole_mut(&mut self.sums))?)
    }

    pub(crate) fn cross_entropy(&mut self) -> B::ViewMut<'_, f64> {
        B::view_mut(&mut self.sums, 0..1)
    }

    pub(crate) fn balance(&mut self) -> B::ViewMut<'_, f64> {
        B::view_mut(&mut self.sums, 1..2)
    }

    /// The mutable squared norm of the gradients, `[1]`.
    pub fn squared_norm_mut(&mut self) -> B::ViewMut<'_, f64> {
        B::view_mut(&mut self.sums, 2..3)
    }

    /// All-reduces the sums over the ranks of `group`.
    ///
    /// # Errors
    /// Fails if another rank has failed.
    pub fn all_reduce(&mut self, group: &Group) -> Result<(), Error> {
        Ok(group.all_reduce::<B, f64>(B::whole_mut(&mut self.sums), Reduce::Sum)?)
    }

    /// Waits for the device; returns the sums of the targets' cross-entropy, of the micro-batches'
    /// balance loss, and of the squared gradients.
    ///
    /// # Errors
    /// Fails if the device fails.
    pub fn read(&self, backend: &B) -> Result<[f64; 3], Error> {
        let mut sums = [0f64; 3];
        backend.download(B::whole(&self.sums), &mut sums)?;
        Ok(sums)
    }

    /// Reads the two losses like [`Self::read`] and resets all sums.
    ///
    /// # Errors
    /// Fails if the device fails.
    pub fn take(&mut self, backend: &B) -> Result<(f64, f64), Error> {
        let [cross_entropy, balance, _] = self.read(backend)?;
        self.zero(backend)?;
        Ok((cross_entropy, balance))
    }
}
