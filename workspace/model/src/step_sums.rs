//! The sums of a training step.

use moh_comm::{Group, Reduce};
use moh_kernels::Memory;

use crate::{AuxiliaryLoss, AuxiliaryLosses, Result};

/// The places of the sums.
const CROSS_ENTROPY: usize = 0;
/// After the cross-entropy: an operator adds to both.
const DISTILLATION: usize = 1;
const SQUARED_NORM: usize = 2;
const BALANCE: usize = 3;
const COUNT: usize = 2 + AuxiliaryLoss::ALL.len();

const fn place(loss: AuxiliaryLoss) -> usize {
    match loss {
        AuxiliaryLoss::Balance => BALANCE,
        AuxiliaryLoss::Distillation => DISTILLATION,
    }
}

/// The sums of a step, on the device; passes and the optimiser add to them.
pub struct StepSums<B: Memory>(B::Buffer<f64>);

/// The sums of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sums {
    /// Cross-entropy of the targets, in nats.
    pub cross_entropy: f64,
    /// The auxiliary losses, each summed over the terms of its mean: micro-batches for balance, targets for
    /// distillation.
    pub auxiliary: AuxiliaryLosses<f64>,
    /// Squared gradients.
    pub squared_norm: f64,
}

impl<B: Memory> StepSums<B> {
    /// Allocates zeros.
    pub fn new(backend: &B) -> Result<Self> {
        Ok(StepSums(backend.allocate(COUNT)?))
    }

    /// Resets the sums to zero.
    pub fn zero(&mut self, backend: &B) -> Result<()> {
        Ok(backend.zero(B::whole_mut(&mut self.0))?)
    }

    /// Returns the mutable cross-entropy, `[1]`, or with a teacher the cross-entropy and the distillation loss, `[2]`.
    pub(crate) fn of_head(&mut self, has_teacher: bool) -> B::ViewMut<'_, f64> {
        let end = if has_teacher { DISTILLATION + 1 } else { CROSS_ENTROPY + 1 };
        B::view_mut(&mut self.0, CROSS_ENTROPY..end)
    }

    pub(crate) fn auxiliary(&mut self, loss: AuxiliaryLoss) -> B::ViewMut<'_, f64> {
        self.at(place(loss))
    }

    /// Returns the mutable squared norm of the gradients, `[1]`.
    pub fn squared_norm_mut(&mut self) -> B::ViewMut<'_, f64> {
        self.at(SQUARED_NORM)
    }

    fn at(&mut self, place: usize) -> B::ViewMut<'_, f64> {
        B::view_mut(&mut self.0, place..place + 1)
    }

    /// All-reduces the sums over the ranks of `group`.
    pub fn all_reduce(&mut self, group: &Group) -> Result<()> {
        Ok(group.all_reduce::<B, f64>(B::whole_mut(&mut self.0), Reduce::Sum)?)
    }

    /// Waits for the device, and returns the sums.
    pub fn read(&self, backend: &B) -> Result<Sums> {
        let mut sums = [0f64; COUNT];
        backend.download(B::whole(&self.0), &mut sums)?;
        Ok(Sums {
            cross_entropy: sums[CROSS_ENTROPY],
            auxiliary: AuxiliaryLosses::new(|loss| sums[place(loss)]),
            squared_norm: sums[SQUARED_NORM],
        })
    }

    /// Reads the sums and resets them.
    pub fn take(&mut self, backend: &B) -> Result<Sums> {
        let sums = self.read(backend)?;
        self.zero(backend)?;
        Ok(sums)
    }
}
