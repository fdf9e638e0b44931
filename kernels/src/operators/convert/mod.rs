//! Copies elements to another type.

mod cpu;
#[cfg(gpu)]
mod cuda;

use crate::error::Result;
use crate::memory::{Memory, View, ViewMut};
use crate::scalar::Element;

/// The conversion as an operator of a device.
pub trait Convert: Memory {
    /// `y = x`, rounded to the type of y; both have the same length.
    fn convert<X: Element, Y: Element>(
        &self,
        x: View<'_, Self, X>,
        y: ViewMut<'_, Self, Y>,
    ) -> Result<()>;
}
