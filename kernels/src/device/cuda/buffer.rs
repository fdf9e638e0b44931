//! Buffers in a device's memory and views of them.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use super::device::Device;
use crate::{Result, Scalar};

pub(crate) struct Allocation {
    device: Arc<dyn Device>,
    pub(crate) address: u64,
    pub(crate) bytes: usize,
}

impl Allocation {
    pub(crate) fn new(device: &Arc<dyn Device>, bytes: usize) -> Result<Self> {
        Ok(Allocation { device: Arc::clone(device), address: device.allocate(bytes)?, bytes })
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.device.free(self.address, self.bytes);
    }
}

/// A buffer of elements in device memory.
pub struct CudaBuffer<S> {
    memory: Allocation,
    len: usize,
    elements: PhantomData<S>,
}

impl<S: Scalar> CudaBuffer<S> {
    pub(crate) fn zeros(device: &Arc<dyn Device>, len: usize) -> Result<Self> {
        let bytes = len.saturating_mul(size_of::<S>());
        Ok(CudaBuffer { memory: Allocation::new(device, bytes)?, len, elements: PhantomData })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn address(&self) -> u64 {
        self.memory.address
    }

    pub(crate) fn view(&self, range: Range<usize>) -> CudaView<'_, S> {
        let (address, len) = self.address_of(range);
        CudaView { address, len, elements: PhantomData }
    }

    pub(crate) fn view_mut(&mut self, range: Range<usize>) -> CudaViewMut<'_, S> {
        let (address, len) = self.address_of(range);
        CudaViewMut { address, len, elements: PhantomData }
    }

    /// Returns the address and length of a range. Panics if the range exceeds the buffer, like a slice.
    fn address_of(&self, range: Range<usize>) -> (u64, usize) {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "range {range:?} of a buffer of {} elements",
            self.len
        );
        (self.address() + (range.start * size_of::<S>()) as u64, range.len())
    }
}

/// Read access to a range of a [`CudaBuffer`].
pub struct CudaView<'a, S> {
    pub(crate) address: u64,
    pub(crate) len: usize,
    elements: PhantomData<&'a [S]>,
}

impl<S> Clone for CudaView<'_, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S> Copy for CudaView<'_, S> {}

impl<S> CudaView<'_, S> {
    pub(crate) fn part(self, range: Range<usize>) -> Self {
        let Range { start, end } = range;
        assert!(start <= end && end <= self.len, "elements {start}..{end} of {}", self.len);
        let address = self.address + (start * size_of::<S>()) as u64;
        CudaView { address, len: end - start, ..self }
    }
}

/// Write access to a range of a [`CudaBuffer`].
pub struct CudaViewMut<'a, S> {
    pub(crate) address: u64,
    pub(crate) len: usize,
    elements: PhantomData<&'a mut [S]>,
}

impl<S> CudaViewMut<'_, S> {
    /// Returns read access to the same elements.
    pub(crate) fn read(&self) -> CudaView<'_, S> {
        CudaView { address: self.address, len: self.len, elements: PhantomData }
    }

    pub(crate) fn part(&mut self, range: Range<usize>) -> CudaViewMut<'_, S> {
        let CudaView { address, len, .. } = self.read().part(range);
        CudaViewMut { address, len, elements: PhantomData }
    }
}

pub(crate) fn address_or_null<S>(view: Option<CudaView<'_, S>>) -> u64 {
    view.map_or(0, |view| view.address)
}
