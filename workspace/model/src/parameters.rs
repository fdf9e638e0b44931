//! Flat buffers on a device: a model's weights, or its gradients, master copy or moments.

use moh_kernels::{Backend, Element, Scalar, View, ViewMut};

use crate::Error;
use crate::layout::{ModelLayout, Segment};

/// One device buffer for each [`crate::layout::FlatLayout`] of a model.
pub struct FlatBuffers<B: Backend, S: Scalar> {
    buffers: Vec<B::Buffer<S>>,
}

impl<B: Backend, S: Scalar> FlatBuffers<B, S> {
    /// Buffers of zeros.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn zeros(backend: &B, layout: &ModelLayout) -> Result<Self, Error> {
        let buffers =
            layout.flats.iter().map(|flat| backend.allocate(flat.len)).collect::<Result<_, _>>()?;
        Ok(FlatBuffers { buffers })
    }

    /// A part of one buffer.
    pub fn view(&self, flat: usize, range: std::ops::Range<usize>) -> View<'_, B, S> {
        B::view(&self.buffers[flat], range)
    }

    /// A part of one buffer, for writing.
    pub fn view_mut(&mut self, flat: usize, range: std::ops::Range<usize>) -> ViewMut<'_, B, S> {
        B::view_mut(&mut self.buffers[flat], range)
    }

    /// One buffer.
    pub fn flat(&self, flat: usize) -> &B::Buffer<S> {
        &self.buffers[flat]
    }

    /// One buffer, for writing.
    pub fn flat_mut(&mut self, flat: usize) -> &mut B::Buffer<S> {
        &mut self.buffers[flat]
    }

    /// Sets every number to zero.
    ///
    /// # Errors
    /// When the device fails.
    pub fn zero(&mut self, backend: &B) -> Result<(), Error> {
        for buffer in &mut self.buffers {
            let len = B::len(buffer);
            backend.zero(B::view_mut(buffer, 0..len))?;
        }
        Ok(())
    }
}

impl<B: Backend, T: Element> FlatBuffers<B, T> {
    /// Fills every tensor with what `source` writes for it, rounded to `T`.
    ///
    /// # Errors
    /// What `source` refuses, or the device.
    pub fn fill<E: From<Error>>(
        &mut self,
        backend: &B,
        layout: &ModelLayout,
        mut source: impl FnMut(&Segment, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let (mut values, mut rounded) = (Vec::new(), Vec::new());
        for (flat, segment) in layout.segments() {
            values.clear();
            values.resize(segment.range.len(), 0f32);
            source(segment, &mut values)?;
            rounded.clear();
            rounded.extend(values.iter().map(|&value| T::from_f32(value)));
            let target = B::view_mut(&mut self.buffers[flat], segment.range.clone());
            backend.upload(&rounded, target).map_err(Error::from)?;
        }
        Ok(())
    }

    /// Copies a tensor to the host as f32.
    ///
    /// # Errors
    /// When the device fails.
    pub fn read(&self, backend: &B, flat: usize, segment: &Segment) -> Result<Vec<f32>, Error> {
        let mut stored = vec![T::from_f32(0.0); segment.range.len()];
        backend.download(self.view(flat, segment.range.clone()), &mut stored)?;
        Ok(stored.iter().map(|value| value.to_f32()).collect())
    }
}
