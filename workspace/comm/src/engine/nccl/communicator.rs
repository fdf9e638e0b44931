//! An NCCL communicator with its own stream, ordered after the compute stream: an operation starts
//! after the operators launched so far. Later operators wait for the operation once its event is joined.
//! No call waits for the GPU.

use std::ffi::CStr;
use std::fmt::Display;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{DriverError, result, sys as driver};
use cudarc::nccl::sys;
use moh_kernels::{Cuda, CudaStream};

use super::library;
use crate::error::{Error, Result};
use crate::watchdog::{Health, Outstanding};

pub(super) fn failed(operation: &'static str, reason: impl Display) -> Error {
    Error::engine("NCCL", operation, reason)
}

pub(super) struct Device {
    pub cuda: Cuda,
    compute: CudaStream,
    pub health: Arc<Health>,
}

// SAFETY: any thread may use the stream's handle after it has bound the context, which `run` does
// first; the stream lives as long as `cuda`.
#[allow(unsafe_code)]
unsafe impl Send for Device {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for Device {}

impl Device {
    pub(super) fn new(cuda: Cuda, health: Arc<Health>) -> Result<Arc<Self>> {
        let compute = cuda.stream();
        let compute = compute.ok_or_else(|| failed("start", "the GPU is emulated"))?;
        Ok(Arc::new(Device { cuda, compute, health }))
    }

    /// Binds the GPU to this thread and runs `work` with the compute stream.
    fn run<R>(
        &self,
        operation: &'static str,
        work: impl FnOnce(driver::CUstream) -> Result<R, DriverError>,
    ) -> Result<R> {
        let bound = self.compute.context.bind_to_thread();
        let done = bound.and_then(|()| work(self.compute.stream));
        done.map_err(|error| failed(operation, error))
    }

    /// Copies within the GPU, in order with the operators.
    ///
    /// # Safety
    /// Both addresses are valid for `bytes` bytes until the later operators are done.
    #[allow(unsafe_code)]
    pub(super) unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()> {
        self.run("copying a message", |compute| {
            // SAFETY: the caller's promise.
            unsafe { result::memcpy_dtod_async(to, from, bytes, compute) }
        })
    }
}

/// A point in a communicator's stream.
pub(super) struct Event {
    raw: driver::CUevent,
    device: Arc<Device>,
}

// SAFETY: as for `Device`.
#[allow(unsafe_code)]
unsafe impl Send for Event {}
// SAFETY: as for `Device`.
#[allow(unsafe_code)]
unsafe impl Sync for Event {}

impl Event {
    fn new(device: &Arc<Device>) -> Result<Self> {
        let flags = driver::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        let raw = device.run("creating an event", |_| result::event::create(flags))?;
        Ok(Event { raw, device: Arc::clone(device) })
    }
}

impl Outstanding for Event {
    fn is_done(&self) -> bool {
        // An error counts as done: the next operator also reports it.
        // SAFETY: the event lives as long as this value.
        #[allow(unsafe_code)]
        let query = self.device.run("querying an event", |_| unsafe {
            Ok(result::event::query(self.raw) != Err(NOT_READY))
        });
        query.unwrap_or(true)
    }

    fn join(&self) -> Result<()> {
        self.device.run("waiting for an event", |compute| {
            let flags = driver::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
            // SAFETY: stream and event live as long as this value.
            #[allow(unsafe_code)]
            unsafe {
                result::stream::wait_event(compute, self.raw, flags)
            }
        })
    }
}

const NOT_READY: DriverError = DriverError(driver::cudaError_enum::CUDA_ERROR_NOT_READY);

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: nobody uses the event any more. Drop cannot report errors.
        #[allow(unsafe_code)]
        let _ =
            self.device.run("destroying an event", |_| unsafe { result::event::destroy(self.raw) });
    }
}

pub(super) struct NcclCommunicator {
    raw: sys::ncclComm_t,
    stream: driver::CUstream,
    device: Arc<Device>,
    /// Locked while an operation is enqueued.
    events: Mutex<Events>,
}

struct Events {
    /// The compute stream's position at the last enqueued operation.
    before: Event,
    /// The ends of operations. Events without another owner can be reused.
    after: Vec<Arc<Event>>,
}

// SAFETY: communicator and stream are used by one thread at a time, under the lock of `events`.
#[allow(unsafe_code)]
unsafe impl Send for NcclCommunicator {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for NcclCommunicator {}

impl NcclCommunicator {
    /// Creates the communicator of all ranks. Returns when all ranks have called it.
    pub(super) fn world(
        device: &Arc<Device>,
        id: sys::ncclUniqueId,
        rank: usize,
        size: usize,
    ) -> Result<Self> {
        device.run("binding the GPU", |_| Ok(()))?;
        let mut raw = ptr::null_mut();
        // SAFETY: the communicator outlives the call, and rank and size fit (`Launch`).
        #[allow(unsafe_code)]
        let code = unsafe { library::ncclCommInitRank(&mut raw, size as i32, id, rank as i32) };
        check("ncclCommInitRank", code, ptr::null_mut())?;
        Self::new(device, raw)
    }

    /// Creates the communicator of the ranks with this colour. Returns when all ranks of this communicator have called
    /// it.
    pub(super) fn split(&self, color: Option<u32>, key: u32) -> Result<Option<Self>> {
        const NO_COLOR: i32 = -1;
        self.device.run("binding the GPU", |_| Ok(()))?;
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        let mut raw = ptr::null_mut();
        // `Group::split` has checked that both are within C's int.
        let (color, key) = (color.map_or(NO_COLOR, |color| color as i32), key as i32);
        // SAFETY: this communicator is valid, the new one outlives the call, and a null
        // configuration inherits this one's.
        #[allow(unsafe_code)]
        let code = unsafe {
            let same = ptr::null_mut();
            library::ncclCommSplit(self.raw, color, key, &mut raw, same)
        };
        check("ncclCommSplit", code, self.raw)?;
        drop(events);
        if raw.is_null() {
            return Ok(None);
        }
        Self::new(&self.device, raw).map(Some)
    }

    fn new(device: &Arc<Device>, raw: sys::ncclComm_t) -> Result<Self> {
        let stream = device.run("creating a stream", |_| {
            result::stream::create(result::stream::StreamKind::NonBlocking)
        })?;
        let events = Events { before: Event::new(device)?, after: Vec::new() };
        let (device, events) = (Arc::clone(device), Mutex::new(events));
        Ok(NcclCommunicator { raw, stream, device, events })
    }

    /// Returns this rank's number in the communicator, and the number of ranks.
    pub(super) fn rank_and_size(&self) -> Result<(usize, usize)> {
        let (mut rank, mut size) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: NCCL sets both where it reports success, which is checked before they are read.
        #[allow(unsafe_code)]
        unsafe {
            let code = library::ncclCommUserRank(self.raw, rank.as_mut_ptr());
            check("ncclCommUserRank", code, self.raw)?;
            let code = library::ncclCommCount(self.raw, size.as_mut_ptr());
            check("ncclCommCount", code, self.raw)?;
            Ok((rank.assume_init() as usize, size.assume_init() as usize))
        }
    }

    /// Enqueues an operation after the operators so far. Its event is not joined yet.
    ///
    /// # Safety
    /// The addresses that `operation` passes are valid for the lengths that it passes, and nothing
    /// else accesses them, until the event is joined.
    #[allow(unsafe_code)]
    pub(super) unsafe fn start(
        &self,
        name: &'static str,
        operation: impl FnOnce(sys::ncclComm_t, sys::cudaStream_t) -> sys::ncclResult_t,
    ) -> Result<Arc<Event>> {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        self.check()?;
        let before = events.before.raw;
        let after = events.free(&self.device)?;
        self.device.run(name, |compute| {
            let flags = driver::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
            // SAFETY: streams and event live as long as this value; a wait captures the event's
            // state at the call, so the event can be recorded again.
            unsafe {
                result::event::record(before, compute)?;
                result::stream::wait_event(self.stream, before, flags)
            }
        })?;
        check(name, operation(self.raw, self.stream.cast()), self.raw)?;
        self.device.run(name, |_| {
            // SAFETY: as above.
            unsafe { result::event::record(after.raw, self.stream) }
        })?;
        Ok(after)
    }

    /// Blocks the host until an event of this communicator has completed.
    pub(super) fn await_event(&self, event: &Event) -> Result<()> {
        while !event.is_done() {
            self.device.health.check()?;
            {
                let _events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
                self.check()?;
            }
            std::thread::sleep(std::time::Duration::from_micros(20));
        }
        Ok(())
    }

    /// Blocks the host until the communicator's stream is empty.
    pub(super) fn finish(&self) -> Result<()> {
        let event = {
            let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
            let event = events.free(&self.device)?;
            self.device.run("finishing", |_| {
                // SAFETY: stream and event live as long as this value.
                #[allow(unsafe_code)]
                unsafe {
                    result::event::record(event.raw, self.stream)
                }
            })?;
            event
        };
        self.await_event(&event)
    }

    /// Fails with the communicator's asynchronous error since the last call, if there is an error.
    fn check(&self) -> Result<()> {
        let mut state = sys::ncclResult_t::ncclSuccess;
        // SAFETY: the communicator is valid, and the caller holds the lock.
        #[allow(unsafe_code)]
        let code = unsafe { library::ncclCommGetAsyncError(self.raw, &mut state) };
        check("ncclCommGetAsyncError", code, self.raw)?;
        check("an operation", state, self.raw)
    }
}

impl Events {
    fn free(&mut self, device: &Arc<Device>) -> Result<Arc<Event>> {
        if let Some(event) = self.after.iter().find(|event| Arc::strong_count(event) == 1) {
            return Ok(Arc::clone(event));
        }
        let event = Arc::new(Event::new(device)?);
        self.after.push(Arc::clone(&event));
        Ok(event)
    }
}

impl Drop for NcclCommunicator {
    fn drop(&mut self) {
        let well = self.device.health.fault().is_none();
        // Drop cannot report errors.
        // SAFETY: nobody uses communicator and stream any more. After a fault the communicator is
        // aborted, because destroying it would wait for ranks that are gone.
        #[allow(unsafe_code)]
        let _ = self.device.run("ending a communicator", |_| unsafe {
            if well {
                result::stream::synchronize(self.stream)?;
                library::ncclCommDestroy(self.raw);
            } else {
                library::ncclCommAbort(self.raw);
            }
            result::stream::destroy(self.stream)
        });
    }
}

pub(super) fn check(
    operation: &'static str,
    code: sys::ncclResult_t,
    raw: sys::ncclComm_t,
) -> Result<()> {
    if matches!(code, sys::ncclResult_t::ncclSuccess | sys::ncclResult_t::ncclInProgress) {
        return Ok(());
    }
    // SAFETY: NCCL returns static texts, or null; it accepts a null communicator.
    #[allow(unsafe_code)]
    let text = |text: *const std::ffi::c_char| {
        (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    };
    // SAFETY: as above.
    #[allow(unsafe_code)]
    let (what, last) =
        unsafe { (text(library::ncclGetErrorString(code)), text(library::ncclGetLastError(raw))) };
    let what = what.unwrap_or_else(|| format!("{code:?}"));
    let last =
        last.filter(|last| !last.is_empty()).map_or(String::new(), |last| format!(": {last}"));
    Err(failed(operation, format!("{what}{last}; set NCCL_DEBUG=INFO for details")))
}
