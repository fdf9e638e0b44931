//! A memory that stores nothing and counts allocations.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::{
    Error, Location, LocationMut, Memory, Purpose, Region, RegionMut, Result, Scalar, gpu_sizes,
};

/// The device that a memory is counted for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CountedDevice {
    /// [`crate::Cpu`], with the instructions and the number of threads of this process.
    Cpu,
    /// `Cuda`, on a Hopper GPU: attention on other GPUs needs less scratch.
    Gpu,
}

/// A memory that counts the bytes of a device's buffers and stores no elements: copies return an error.
/// Clones share the counts.
///
/// All passes share the operators' scratch ([`crate::Workspace::reserve`]), which therefore counts once: on a GPU
/// as [`Purpose::Scratch`], on the CPU for each thread ([`CountingMemory::thread_scratch`]).
#[derive(Debug, Clone)]
pub struct CountingMemory {
    pub(crate) device: CountedDevice,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    bytes: [AtomicU64; Purpose::ALL.len()],
    /// Index of the running constructor's purpose; the last index outside any constructor.
    purpose: AtomicUsize,
    thread_scratch: AtomicU64,
}

const UNNAMED: usize = Purpose::ALL.len() - 1;

impl CountingMemory {
    /// Creates a memory with all counts 0.
    pub fn new(device: CountedDevice) -> Self {
        let counts = Counts { purpose: AtomicUsize::new(UNNAMED), ..Counts::default() };
        CountingMemory { device, counts: Arc::new(counts) }
    }

    /// Returns the bytes allocated for a purpose, at most `u64::MAX`.
    pub fn bytes(&self, purpose: Purpose) -> u64 {
        self.counts.bytes[purpose as usize].load(Ordering::Relaxed)
    }

    /// Returns the bytes that the device reserves for matmuls when it is opened.
    pub fn matmul_workspace(&self) -> u64 {
        match self.device {
            CountedDevice::Cpu => 0,
            CountedDevice::Gpu => gpu_sizes::MATMUL as u64,
        }
    }

    /// Returns the bytes of the scratch of all threads of this process on the CPU; 0 on a GPU.
    pub fn thread_scratch(&self) -> u64 {
        let of_one = self.counts.thread_scratch.load(Ordering::Relaxed);
        of_one.saturating_mul(rayon::current_num_threads() as u64)
    }

    /// Counts scratch of this many bytes, which all passes share.
    pub(crate) fn reserve_scratch(&self, bytes: u64) {
        self.counts.bytes[Purpose::Scratch as usize].fetch_max(bytes, Ordering::Relaxed);
    }

    pub(crate) fn reserve_thread_scratch(&self, bytes: u64) {
        self.counts.thread_scratch.fetch_max(bytes, Ordering::Relaxed);
    }

    fn add(&self, purpose: usize, bytes: u64) {
        let count = &self.counts.bytes[purpose];
        count.store(count.load(Ordering::Relaxed).saturating_add(bytes), Ordering::Relaxed);
    }

    fn refuse<R>(&self, operation: &'static str) -> Result<R> {
        let reason = "it counts buffers and stores no elements";
        Err(Error::device(&self.name(), operation, reason))
    }
}

/// A buffer of a [`CountingMemory`], or a view of a buffer.
#[derive(Debug, Clone, Copy)]
pub struct Counted<S> {
    len: usize,
    elements: PhantomData<S>,
}

impl<S> Counted<S> {
    fn new(len: usize) -> Self {
        Counted { len, elements: PhantomData }
    }

    /// Panics if the range exceeds the buffer, like a slice.
    fn part(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        Counted::new(range.len())
    }
}

impl Memory for CountingMemory {
    type Buffer<S: Scalar> = Counted<S>;
    type View<'a, S: Scalar> = Counted<S>;
    type ViewMut<'a, S: Scalar> = Counted<S>;

    fn name(&self) -> String {
        "a memory that counts".into()
    }

    fn allocate<S: Scalar>(&self, len: usize) -> Result<Counted<S>> {
        let bytes = (len as u64).saturating_mul(size_of::<S>() as u64);
        self.add(self.counts.purpose.load(Ordering::Relaxed), bytes);
        Ok(Counted::new(len))
    }

    fn for_purpose<R>(&self, purpose: Purpose, construct: impl FnOnce() -> R) -> R {
        let current = &self.counts.purpose;
        let outer = current.load(Ordering::Relaxed);
        if outer == UNNAMED {
            current.store(purpose as usize, Ordering::Relaxed);
        }
        let constructed = construct();
        current.store(outer, Ordering::Relaxed);
        constructed
    }

    fn len<S: Scalar>(buffer: &Counted<S>) -> usize {
        buffer.len
    }

    fn view<S: Scalar>(buffer: &Counted<S>, range: Range<usize>) -> Counted<S> {
        buffer.part(range)
    }

    fn view_mut<S: Scalar>(buffer: &mut Counted<S>, range: Range<usize>) -> Counted<S> {
        buffer.part(range)
    }

    fn part<'v, 'long: 'v, S: Scalar>(view: Counted<S>, range: Range<usize>) -> Counted<S> {
        view.part(range)
    }

    fn part_mut<S: Scalar>(view: &mut Counted<S>, range: Range<usize>) -> Counted<S> {
        view.part(range)
    }

    fn as_view<S: Scalar>(view: &Counted<S>) -> Counted<S> {
        *view
    }

    fn region<'a, S: Scalar>(view: Counted<S>) -> Region<'a> {
        Region { dtype: S::DTYPE, len: view.len, location: Location::Device(0) }
    }

    fn region_mut<'a, S: Scalar>(view: Counted<S>) -> RegionMut<'a> {
        RegionMut { dtype: S::DTYPE, len: view.len, location: LocationMut::Device(0) }
    }

    fn upload<S: Scalar>(&self, _: &[S], _: Counted<S>) -> Result<()> {
        self.refuse("upload")
    }

    fn download<S: Scalar>(&self, _: Counted<S>, _: &mut [S]) -> Result<()> {
        self.refuse("download")
    }

    fn on_host<S: Scalar>(
        &self,
        _: Counted<S>,
        _: impl FnOnce(&mut [S]) -> Result<()>,
    ) -> Result<()> {
        self.refuse("change on the host")
    }

    fn copy<S: Scalar>(&self, _: Counted<S>, _: Counted<S>) -> Result<()> {
        self.refuse("copy")
    }

    fn zero<S: Scalar>(&self, _: Counted<S>) -> Result<()> {
        self.refuse("zero")
    }

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_count_for_the_outer_purpose() {
        let memory = CountingMemory::new(CountedDevice::Cpu);
        memory.allocate::<u8>(3).unwrap();
        memory.for_purpose(Purpose::Evaluation, || {
            memory.allocate::<f32>(5).unwrap();
            memory.for_purpose(Purpose::Logits, || memory.allocate::<f64>(7).unwrap());
        });
        memory.for_purpose(Purpose::Logits, || memory.allocate::<u32>(1).unwrap());
        memory.allocate::<u8>(2).unwrap();
        let found = Purpose::ALL.map(|purpose| memory.bytes(purpose));
        assert_eq!(found.iter().sum::<u64>(), 3 + 20 + 56 + 4 + 2);
        assert_eq!(memory.bytes(Purpose::Evaluation), 76);
        assert_eq!(memory.bytes(Purpose::Logits), 4);
        assert_eq!(memory.bytes(Purpose::Other), 5);
        memory.allocate::<f64>(usize::MAX).unwrap();
        memory.allocate::<f64>(usize::MAX).unwrap();
        assert_eq!(memory.bytes(Purpose::Other), u64::MAX);
    }
}
