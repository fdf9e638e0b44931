//! The CPU: buffers are vectors, operators run on rayon's threads.

pub(crate) mod compiled;
pub(crate) mod disjoint;
mod freed_memory;
mod huge_pages;
pub(crate) mod math;
pub(crate) mod scratch;
pub(crate) mod simd;

use std::cell::Cell;
use std::ops::Range;

use rayon::prelude::*;

use crate::error::check_len;
use crate::{Error, Location, LocationMut, Memory, Region, RegionMut, Result, Scalar, span};

/// Elements that one task copies or sets to zero.
const PART: usize = 256 * 1024;

/// The CPU as a [`crate::Backend`]; its thread count is rayon's (`RAYON_NUM_THREADS`).
#[derive(Debug, Clone, Copy, Default)]
pub struct Cpu;

impl Memory for Cpu {
    type Buffer<S: Scalar> = Vec<S>;
    type View<'a, S: Scalar> = &'a [S];
    type ViewMut<'a, S: Scalar> = &'a mut [S];

    fn name(&self) -> String {
        "the CPU".into()
    }

    fn install<R: Send>(&self, operators: impl FnOnce() -> R + Send) -> R {
        let sink = span::of_thread();
        rayon::scope(|_| span::on_behalf(sink, operators))
    }

    fn allocate<S: Scalar>(&self, len: usize) -> Result<Vec<S>> {
        let refuse = || Error::no_room(&self.name(), len.saturating_mul(size_of::<S>()));
        ALLOCATED.set(
            ALLOCATED.get().saturating_add((len as u64).saturating_mul(size_of::<S>() as u64)),
        );
        // Zeroed memory directly from the system; if memory is short, the call returns an error
        // instead of aborting.
        let mut buffer = bytemuck::try_zeroed_slice_box(len).map_err(|()| refuse())?;
        huge_pages::request(&mut buffer);
        Ok(buffer.into_vec())
    }

    fn len<S: Scalar>(buffer: &Vec<S>) -> usize {
        buffer.len()
    }

    fn view<S: Scalar>(buffer: &Vec<S>, range: Range<usize>) -> &[S] {
        &buffer[range]
    }

    fn view_mut<S: Scalar>(buffer: &mut Vec<S>, range: Range<usize>) -> &mut [S] {
        &mut buffer[range]
    }

    fn part<'v, 'long: 'v, S: Scalar>(view: &'long [S], range: Range<usize>) -> &'v [S] {
        &view[range]
    }

    fn part_mut<'v, S: Scalar>(view: &'v mut &mut [S], range: Range<usize>) -> &'v mut [S] {
        &mut view[range]
    }

    fn as_view<'v, S: Scalar>(view: &'v &mut [S]) -> &'v [S] {
        view
    }

    fn region<'a, S: Scalar>(view: Self::View<'a, S>) -> Region<'a> {
        let location = Location::Host(bytemuck::cast_slice(view));
        Region { dtype: S::DTYPE, len: view.len(), location }
    }

    fn region_mut<'a, S: Scalar>(view: Self::ViewMut<'a, S>) -> RegionMut<'a> {
        let len = view.len();
        let location = LocationMut::Host(bytemuck::cast_slice_mut(view));
        RegionMut { dtype: S::DTYPE, len, location }
    }

    fn upload<S: Scalar>(&self, source: &[S], destination: &mut [S]) -> Result<()> {
        self.copy(source, destination)
    }

    fn download<S: Scalar>(&self, source: &[S], destination: &mut [S]) -> Result<()> {
        self.copy(source, destination)
    }

    fn on_host<S: Scalar>(
        &self,
        elements: &mut [S],
        change: impl FnOnce(&mut [S]) -> Result<()>,
    ) -> Result<()> {
        change(elements)
    }

    fn copy<S: Scalar>(&self, source: &[S], destination: &mut [S]) -> Result<()> {
        check_len("copy", "destination", destination.len(), source.len())?;
        let parts = destination.par_chunks_mut(PART).zip(source.par_chunks(PART));
        parts.for_each(|(to, from)| to.copy_from_slice(from));
        Ok(())
    }

    fn zero<S: Scalar>(&self, destination: &mut [S]) -> Result<()> {
        destination.par_chunks_mut(PART).for_each(|part| part.fill(S::zeroed()));
        Ok(())
    }

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
}

thread_local! {
    static ALLOCATED: Cell<u64> = const { Cell::new(0) };
}

impl Cpu {
    /// Returns the total bytes of buffers that the calling thread has allocated, including freed ones.
    pub fn allocated(&self) -> u64 {
        ALLOCATED.get()
    }

    /// Makes the process return freed memory to the system, for servers with requests of any size.
    /// Buffers of at least 1 MiB then get new pages at each allocation.
    pub fn return_freed_memory(&self) {
        freed_memory::return_to_system();
    }

    /// Returns the current bytes of scratch of each of rayon's threads, in any order. Buffers are not included.
    pub fn thread_scratch(&self) -> Vec<usize> {
        rayon::broadcast(|_| scratch::held())
    }
}
