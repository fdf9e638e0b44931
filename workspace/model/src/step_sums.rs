//! The sums of a training step.

use moh_comm::{Group, Reduce};
use moh_kernels::Memory;

use crate::{AuxiliaryLoss, AuxiliaryLosses, Error};

/// The places of the sums; auxiliary losses begin after the last.
const CROSS_ENTROPY: usize = 0;
const SQUARED_NORM: usize = 1;
const AUXILIARY: usize = 2;
const COUNT: usize = AUXILIARY + AuxiliaryLoss::ALL.len();

/// The sums of a step, on the device; passes and the optimiser add to them.
pub struct StepSums<B: Memory>(B::Buffer<f64>);

/// The sums of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sums {
    /// Cross-entropy of the targets, in nats.
    pub cross_entropy: f64,
    /// The losses of the micro-batches.
    pub auxiliary: AuxiliaryLosses<f64>,
    /// Squared gradients.
    pub squared_norm: f64,
}

impl<B: Memory> StepSums<B> {
    /// Allocates zeros.
    ///
    /// # Errors
    /// Fails if the device is out of memory.
    pub fn new(backend: &B) -> Result<Self, Error> {
        Ok(StepSums(backend.allocate(COUNT)?))
    }

    /// Resets the sums to zero.
    ///
    /// # Errors
    /// Fails if the device fails.
    pub fn zero(&mut self, backend: &B) -> Result<(), Error> {
        Ok(backend.zero(B::whole_mut(&mut self.0))?)
    }

    pub(crate) fn cross_entropy(&mut self) -> B::ViewMut<'_, f64> {
        self.at(CROSS_ENTROPY)
    }

    pub(crate) fn auxiliary(&mut self, loss: AuxiliaryLoss) -> B::ViewMut<'_, f64> {
        self.at(AUXILIARY + loss as usize)
    }

    /// The mutable squared norm of the gradients, `[1]`.
    pub fn squared_norm_mut(&mut self) -> B::ViewMut<'_, f64> {
        self.at(SQUARED_NORM)
    }

    fn at(&mut self, place: usize) -> B::ViewMut<'_, f64> {
        B::view_mut(&mut self.0, place..place + 1)
    }

    /// All-reduces the sums over the ranks of `group`.
    ///
    /// # Errors
    /// Fails if another rank has failed.
    pub fn all_reduce(&mut self, group: &Group) -> Result<(), Error> {
        Ok(group.all_reduce::<B, f64>(B::whole_mut(&mut self.0), Reduce::Sum)?)
    }

    /// Waits for the device, and returns the sums.
    ///
    /// # Errors
    /// Fails if the device fails.
    pub fn read(&self, backend: &B) -> Result<Sums, Error> {
        let mut sums = [0f64; COUNT];
        backend.download(B::whole(&self.0), &mut sums)?;
        Ok(Sums {
            cross_entropy: sums[CROSS_ENTROPY],
            auxiliary: AuxiliaryLosses::new(|loss| sums[AUXILIARY + loss as usize]),
            squared_norm: sums[SQUARED_NORM],
        })
    }

    /// Reads the sums and resets them.
    ///
    /// # Errors
    /// Fails if the device fails.
    pub fn take(&mut self, backend: &B) -> Result<Sums, Error> {
        let sums = self.read(backend)?;
        self.zero(backend)?;
        Ok(sums)
    }
}
