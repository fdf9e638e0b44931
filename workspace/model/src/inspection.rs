//! Reads back a forward pass's activations, to find where values grow: magnitudes of the residual stream, and routings.

use moh_kernels::{AnyBuffer, Backend};

use crate::activations::{Activations, PassActivations, PassSlot, Recompute};
use crate::router::RoutingStatistics;
use crate::{Error, Model, Result};

/// The magnitude of many values.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Magnitude {
    count: u64,
    squares: f64,
    /// The largest magnitude; NaN if any value is NaN.
    pub largest: f32,
}

impl Magnitude {
    /// Adds values.
    pub fn add(&mut self, values: impl IntoIterator<Item = f32>) {
        for value in values {
            self.count += 1;
            self.squares += f64::from(value).powi(2);
            let magnitude = value.abs();
            // A comparison with NaN is false, which would lose the NaN.
            if !self.largest.is_nan() && (magnitude.is_nan() || magnitude > self.largest) {
                self.largest = magnitude;
            }
        }
    }

    /// Returns the root of the mean square; 0 without values, and not finite if any value is not finite.
    pub fn rms(&self) -> f64 {
        (self.squares / self.count.max(1) as f64).sqrt()
    }
}

/// The residual stream in one block.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct BlockMagnitudes {
    /// After attention.
    pub attention: Magnitude,
    /// After the MLP: the block's output.
    pub mlp: Magnitude,
}

impl<B: Backend> Model<B> {
    /// Adds the residual stream of the last forward pass to `blocks`, which has an entry for each
    /// layer of the pass.
    ///
    /// # Errors
    /// Fails for activations that recompute whole blocks: only the last block's activations exist then.
    pub fn add_magnitudes(
        &self,
        activations: &Activations<B>,
        slot: PassSlot,
        blocks: &mut [BlockMagnitudes],
    ) -> Result<()> {
        let pass = saved(activations, slot)?;
        let add = |buffer: &AnyBuffer<B>, magnitude: &mut Magnitude| {
            magnitude.add(buffer.whole().to_f32(self.backend())?);
            Ok::<_, Error>(())
        };
        let outputs = pass.stream.iter().skip(1);
        for ((saved, output), block) in pass.blocks.saved.iter().zip(outputs).zip(blocks) {
            add(&saved.h, &mut block.attention)?;
            add(output, &mut block.mlp)?;
        }
        Ok(())
    }

    /// Adds the routings of the last forward pass of all layers to `statistics`.
    pub fn add_routings(
        &self,
        activations: &Activations<B>,
        slot: PassSlot,
        statistics: &mut RoutingStatistics,
    ) -> Result<()> {
        let pass = saved(activations, slot)?;
        for (layer, routing) in pass.blocks.routings().enumerate() {
            // A layer that does not route has a buffer, but no statistics.
            if let Some(routing) = routing {
                statistics.add(self.backend(), layer, routing, usize::MAX)?;
            }
        }
        Ok(())
    }
}

/// Returns the activations of all blocks of a pass; fails if the blocks share them.
fn saved<B: Backend>(activations: &Activations<B>, slot: PassSlot) -> Result<&PassActivations<B>> {
    match activations.recompute {
        Recompute::Block => {
            Err(Error::invalid("activations that recompute whole blocks do not keep each block's"))
        }
        _ => Ok(&activations.passes[slot.slot]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_mean_square_and_the_largest_magnitude_are_of_all_values() {
        let mut magnitude = Magnitude::default();
        assert_eq!((magnitude.rms(), magnitude.largest), (0.0, 0.0));
        magnitude.add([3.0, -5.0]);
        magnitude.add([1.0, 1.0]);
        assert_eq!((magnitude.rms(), magnitude.largest), (3.0, 5.0));
        magnitude.add([f32::NAN, 9.0]);
        assert!(magnitude.rms().is_nan() && magnitude.largest.is_nan());
        let mut infinite = Magnitude::default();
        infinite.add([f32::NEG_INFINITY, 1.0]);
        assert_eq!((infinite.rms(), infinite.largest), (f64::INFINITY, f32::INFINITY));
    }
}
