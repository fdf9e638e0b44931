//! Training losses in addition to the cross-entropy. One list serves the device, metrics and charts, so that a further
//! loss is one more variant.

use std::ops::{Index, IndexMut};

/// A loss in addition to the cross-entropy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AuxiliaryLoss {
    /// The routers' balance loss (equation 8 of the paper), averaged over the layers that route.
    Balance,
    /// The divergence from a teacher's distribution ([`crate::Teacher`]), averaged over the targets.
    Distillation,
}

const COUNT: usize = AuxiliaryLoss::ALL.len();

impl AuxiliaryLoss {
    /// Every loss.
    pub const ALL: [AuxiliaryLoss; 2] = [AuxiliaryLoss::Balance, AuxiliaryLoss::Distillation];

    /// Returns the loss's name in metrics and TensorBoard.
    pub fn name(self) -> &'static str {
        match self {
            AuxiliaryLoss::Balance => "balance_loss",
            AuxiliaryLoss::Distillation => "distillation_loss",
        }
    }
}

/// A value for each auxiliary loss.
///
/// ```
/// use moh_model::{AuxiliaryLoss, AuxiliaryLosses};
///
/// let mut weights = AuxiliaryLosses::all(0.0);
/// weights[AuxiliaryLoss::Balance] = 0.01;
/// for (loss, weight) in weights.iter() {
///     println!("{}: {weight}", loss.name());
/// }
/// # assert_eq!(weights.map(|weight| weight * 2.0)[AuxiliaryLoss::Balance], 0.02);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct AuxiliaryLosses<V>([V; COUNT]);

impl<V: Copy> AuxiliaryLosses<V> {
    /// Returns the value of `of` for each loss.
    pub fn new(of: impl FnMut(AuxiliaryLoss) -> V) -> Self {
        AuxiliaryLosses(AuxiliaryLoss::ALL.map(of))
    }

    /// Returns the same value for each loss.
    pub const fn all(value: V) -> Self {
        AuxiliaryLosses([value; COUNT])
    }

    /// Returns each loss with its value.
    pub fn iter(&self) -> impl Iterator<Item = (AuxiliaryLoss, V)> {
        AuxiliaryLoss::ALL.into_iter().zip(self.0)
    }

    /// Returns the result of `change` for each value.
    pub fn map<W>(self, change: impl FnMut(V) -> W) -> AuxiliaryLosses<W> {
        AuxiliaryLosses(self.0.map(change))
    }
}

impl<V> Index<AuxiliaryLoss> for AuxiliaryLosses<V> {
    type Output = V;

    fn index(&self, loss: AuxiliaryLoss) -> &V {
        &self.0[loss as usize]
    }
}

impl<V> IndexMut<AuxiliaryLoss> for AuxiliaryLosses<V> {
    fn index_mut(&mut self, loss: AuxiliaryLoss) -> &mut V {
        &mut self.0[loss as usize]
    }
}
