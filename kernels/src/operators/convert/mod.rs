//! Copies elements to another type.

mod cpu;
#[cfg(gpu)]
mod cuda;

use crate::{Element, Memory, Result, View, ViewMut};

/// The conversion as an operator of a device.
pub trait Convert: Memory {
    /// Computes `y = x`, rounded to the type of y; both have the same length.
    fn convert<X: Element, Y: Element>(
        &self,
        x: View<'_, Self, X>,
        y: ViewMut<'_, Self, Y>,
    ) -> Result<()>;
}
