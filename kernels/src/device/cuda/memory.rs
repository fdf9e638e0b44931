//! The memory of a [`Cuda`].

use std::ops::Range;

use super::{Cuda, CudaBuffer, CudaView, CudaViewMut};
use crate::error::check_len;
use crate::{Location, LocationMut, Memory, MemoryInfo, Region, RegionMut, Result, Scalar};

impl Memory for Cuda {
    type Buffer<S: Scalar> = CudaBuffer<S>;
    type View<'a, S: Scalar> = CudaView<'a, S>;
    type ViewMut<'a, S: Scalar> = CudaViewMut<'a, S>;

    fn name(&self) -> String {
        self.device.name()
    }

    fn memory_info(&self) -> Option<MemoryInfo> {
        self.device.memory_info()
    }

    fn allocate<S: Scalar>(&self, len: usize) -> Result<CudaBuffer<S>> {
        CudaBuffer::zeros(&self.device, len)
    }

    fn len<S: Scalar>(buffer: &CudaBuffer<S>) -> usize {
        buffer.len()
    }

    fn view<S: Scalar>(buffer: &CudaBuffer<S>, range: Range<usize>) -> CudaView<'_, S> {
        buffer.view(range)
    }

    fn view_mut<S: Scalar>(buffer: &mut CudaBuffer<S>, range: Range<usize>) -> CudaViewMut<'_, S> {
        buffer.view_mut(range)
    }

    fn part<'v, 'long: 'v, S: Scalar>(
        view: CudaView<'long, S>,
        range: Range<usize>,
    ) -> CudaView<'v, S> {
        view.part(range)
    }

    fn part_mut<'v, S: Scalar>(
        view: &'v mut CudaViewMut<'_, S>,
        range: Range<usize>,
    ) -> CudaViewMut<'v, S> {
        view.part(range)
    }

    fn as_view<'v, S: Scalar>(view: &'v CudaViewMut<'_, S>) -> CudaView<'v, S> {
        view.read()
    }

    fn region<'a, S: Scalar>(view: Self::View<'a, S>) -> Region<'a> {
        Region { dtype: S::DTYPE, len: view.len, location: Location::Device(view.address) }
    }

    fn region_mut<'a, S: Scalar>(view: Self::ViewMut<'a, S>) -> RegionMut<'a> {
        RegionMut { dtype: S::DTYPE, len: view.len, location: LocationMut::Device(view.address) }
    }

    fn upload<S: Scalar>(&self, source: &[S], destination: CudaViewMut<'_, S>) -> Result<()> {
        check_len("upload", "destination", destination.len, source.len())?;
        self.device.upload(bytemuck::cast_slice(source), destination.address)
    }

    fn download<S: Scalar>(&self, source: CudaView<'_, S>, destination: &mut [S]) -> Result<()> {
        check_len("download", "destination", destination.len(), source.len)?;
        self.device.download(source.address, bytemuck::cast_slice_mut(destination))
    }

    fn on_host<S: Scalar>(
        &self,
        elements: CudaViewMut<'_, S>,
        change: impl FnOnce(&mut [S]) -> Result<()>,
    ) -> Result<()> {
        let mut host = vec![S::zeroed(); elements.len];
        self.device.download(elements.address, bytemuck::cast_slice_mut(&mut host))?;
        change(&mut host)?;
        self.upload(&host, elements)
    }

    fn copy<S: Scalar>(
        &self,
        source: CudaView<'_, S>,
        destination: CudaViewMut<'_, S>,
    ) -> Result<()> {
        check_len("copy", "destination", destination.len, source.len)?;
        self.device.copy(source.address, destination.address, source.len * size_of::<S>())
    }

    fn zero<S: Scalar>(&self, destination: CudaViewMut<'_, S>) -> Result<()> {
        self.device.zero(destination.address, destination.len * size_of::<S>())
    }

    fn synchronize(&self) -> Result<()> {
        self.device.synchronize()
    }
}
