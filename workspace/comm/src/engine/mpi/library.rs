//! This process's MPI library: initialised once, called by one thread at a time, finalised when the
//! last group is dropped.
//!
//! The crate `mpi` discards return codes, so calls that can fail use its bindings here. No
//! call blocks: operations are started and then polled. If the peer of an operation has died, the operation
//! returns the fault that the liveness thread found. MPI moves long messages only inside its calls.
//! A progress thread therefore calls MPI while messages are pending and their sender computes.

use std::ffi::c_int;
use std::fmt::Display;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use mpi::Threading;
use mpi::environment::Universe;
use mpi::ffi;
use mpi::topology::Communicator;

use crate::engine::scratch::{self, Scratch};
use crate::error::{Error, Result};
use crate::watchdog::Health;

/// How long an operation waits after a fault, because other processes may still write to its
/// memory.
const FAULT_GRACE: Duration = Duration::from_millis(500);
/// How often the progress thread calls MPI while a message is pending.
const PROGRESS_INTERVAL: Duration = Duration::from_micros(50);
/// The buffer size that MPI requires for an error's text.
const ERROR_TEXT: usize = ffi::MPI_MAX_ERROR_STRING as usize;

pub(super) fn failed(operation: &'static str, reason: impl Display) -> Error {
    Error::engine("MPI", operation, reason)
}

pub(super) struct Library {
    universe: Option<Universe>,
    calls: Arc<Calls>,
    progress: Option<JoinHandle<()>>,
    /// Whether the job has ended without an error, so that all processes finalise.
    finished: AtomicBool,
    pub(super) health: Arc<Health>,
}

/// Serialises the calls of MPI.
#[derive(Default)]
struct Calls {
    /// Locked during each call: the library is initialised for one calling thread at a time.
    queue: Mutex<SendQueue>,
    posted: Condvar,
}

/// Messages that have been sent and may still be in flight.
#[derive(Default)]
struct SendQueue {
    outstanding: Vec<PendingSend>,
    free: Vec<Scratch>,
    failure: Option<Error>,
    ended: bool,
}

struct PendingSend {
    request: ffi::MPI_Request,
    bytes: Scratch,
}

// SAFETY: requests are handles of the library, which any thread may use while it holds the lock of
// the `SendQueue`; MPI_THREAD_SERIALIZED, which `start` requires, allows calls from several
// threads.
#[allow(unsafe_code)]
unsafe impl Send for SendQueue {}

// SAFETY: the universe is only stored, and dropped by one thread.
#[allow(unsafe_code)]
unsafe impl Send for Library {}
// SAFETY: as above; shared references reach the library only through the lock.
#[allow(unsafe_code)]
unsafe impl Sync for Library {}

impl Library {
    pub(super) fn start(health: Arc<Health>) -> Result<Self> {
        let (universe, threading) = mpi::initialize_with_threading(Threading::Serialized)
            .ok_or_else(|| failed("MPI_Init", "MPI has been started in this process already"))?;
        let mut library = Library {
            universe: Some(universe),
            calls: Arc::default(),
            progress: None,
            finished: AtomicBool::new(false),
            health,
        };
        if threading < Threading::Serialized {
            return Err(failed(
                "MPI_Init",
                "this MPI library can be called from the main thread only",
            ));
        }
        library.return_errors(library.world())?;
        let (calls, health) = (Arc::clone(&library.calls), Arc::clone(&library.health));
        let thread = std::thread::Builder::new().name("moh-mpi".into());
        let thread = thread.spawn(move || calls.progress_sends(&health));
        let thread = thread.map_err(|error| failed("starting a thread", error))?;
        library.progress = Some(thread);
        Ok(library)
    }

    pub(super) fn world(&self) -> ffi::MPI_Comm {
        // SAFETY: a constant of the bindings, set before the program starts.
        #[allow(unsafe_code)]
        unsafe {
            ffi::RSMPI_COMM_WORLD
        }
    }

    /// Returns this process's rank among all processes, and their number.
    pub(super) fn rank_and_size(&self) -> (usize, usize) {
        let world = mpi::topology::SimpleCommunicator::world();
        (world.rank() as usize, world.size() as usize)
    }

    /// Makes calls on this communicator return errors. By default MPI would end the job.
    pub(super) fn return_errors(&self, communicator: ffi::MPI_Comm) -> Result<()> {
        // SAFETY: the communicator is one of the library's, the handler one of its constants.
        #[allow(unsafe_code)]
        self.call("MPI_Comm_set_errhandler", || unsafe {
            ffi::MPI_Comm_set_errhandler(communicator, ffi::RSMPI_ERRORS_RETURN)
        })
    }

    fn queue(&self) -> MutexGuard<'_, SendQueue> {
        self.calls.queue()
    }

    /// Calls a function of the library that returns an error code.
    pub(super) fn call(&self, operation: &'static str, call: impl FnOnce() -> c_int) -> Result<()> {
        let _calls = self.queue();
        check(operation, call())
    }

    /// Starts an operation and waits until it is done.
    ///
    /// The operation owns the memory that it reads and writes until this function returns. After a fault, the
    /// function returns only when no process calls MPI any more and data in flight has arrived.
    pub(super) fn complete(
        &self,
        operation: &'static str,
        start: impl FnOnce(*mut ffi::MPI_Request) -> c_int,
    ) -> Result<ffi::MPI_Status> {
        self.health.check()?;
        let mut request = null_request();
        self.call(operation, || start(&mut request))?;
        self.wait(operation, &mut request)
    }

    fn wait(
        &self,
        operation: &'static str,
        request: &mut ffi::MPI_Request,
    ) -> Result<ffi::MPI_Status> {
        loop {
            let mut done = 0;
            // SAFETY: a status is plain integers, for which all zero bits are valid.
            #[allow(unsafe_code)]
            let mut status: ffi::MPI_Status = unsafe { std::mem::zeroed() };
            // SAFETY: the request comes from MPI, and the other arguments outlive the call.
            #[allow(unsafe_code)]
            self.call(operation, || unsafe { ffi::MPI_Test(request, &mut done, &mut status) })?;
            if done != 0 {
                return Ok(status);
            }
            if let Some(fault) = self.health.fault() {
                std::thread::sleep(FAULT_GRACE);
                return Err(fault.clone().into());
            }
            std::thread::yield_now();
        }
    }

    /// Sends a copy of these bytes, without waiting for the receiver.
    pub(super) fn post(
        &self,
        bytes: &[u8],
        start: impl FnOnce(&[u8], *mut ffi::MPI_Request) -> c_int,
    ) -> Result<()> {
        self.health.check()?;
        let mut queue = self.queue();
        let content = scratch::take(&mut queue.free, bytes.len());
        let mut pending = PendingSend { request: null_request(), bytes: content };
        pending.bytes.fill(bytes);
        check("MPI_Isend", start(pending.bytes.bytes(), &mut pending.request))?;
        queue.outstanding.push(pending);
        // Most messages are short and are already sent.
        queue.remove_completed()?;
        if !queue.outstanding.is_empty() {
            self.calls.posted.notify_one();
        }
        Ok(())
    }

    /// Allocates memory for `messages` messages of `bytes` bytes in flight.
    pub(super) fn reserve_sends(&self, messages: usize, bytes: usize) {
        scratch::reserve(&mut self.queue().free, messages, bytes);
    }

    pub(super) fn wait_for_sends(&self) -> Result<()> {
        loop {
            {
                let mut queue = self.queue();
                queue.remove_completed()?;
                if queue.outstanding.is_empty() {
                    return Ok(());
                }
            }
            self.health.check()?;
            std::thread::yield_now();
        }
    }

    /// Lets all processes finalise after this call.
    pub(super) fn finish(&self) {
        self.finished.store(true, Ordering::Relaxed);
    }

    pub(super) fn abort(&self, code: i32) -> ! {
        // No lock: another thread may hold it in a call that never returns.
        // SAFETY: allowed at any time between initialisation and finalisation.
        #[allow(unsafe_code)]
        unsafe {
            ffi::MPI_Abort(self.world(), code);
        }
        std::process::exit(code)
    }
}

impl Calls {
    /// Locks the queue and ignores poisoning. Each change is a single step, so a panic elsewhere leaves the queue
    /// consistent.
    fn queue(&self) -> MutexGuard<'_, SendQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls MPI while messages are pending, until the library is dropped.
    fn progress_sends(&self, health: &Health) {
        let mut queue = self.queue();
        while !queue.ended && health.fault().is_none() {
            if queue.outstanding.is_empty() {
                queue = self.posted.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            // The queue stores the error. The next send, or the end, reports it.
            if queue.remove_completed().is_err() {
                return;
            }
            drop(queue);
            std::thread::sleep(PROGRESS_INTERVAL);
            queue = self.queue();
        }
    }
}

impl SendQueue {
    fn remove_completed(&mut self) -> Result<()> {
        let mut at = 0;
        while let Some(pending) = self.outstanding.get_mut(at) {
            let mut done = 0;
            // SAFETY: the request comes from MPI, the caller holds the lock, and the null status is
            // the library's own constant.
            #[allow(unsafe_code)]
            let code =
                unsafe { ffi::MPI_Test(&mut pending.request, &mut done, ffi::RSMPI_STATUS_IGNORE) };
            if let Err(error) = check("MPI_Isend", code) {
                self.failure.get_or_insert(error);
                // MPI may still read the bytes.
                std::mem::forget(self.outstanding.swap_remove(at));
            } else if done == 0 {
                at += 1;
            } else {
                let pending = self.outstanding.swap_remove(at);
                self.free.push(pending.bytes);
            }
        }
        self.failure.clone().map_or(Ok(()), Err)
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        self.queue().ended = true;
        self.calls.posted.notify_one();
        if let Some(progress) = self.progress.take() {
            // The thread does not panic. If it did, nothing would change here.
            let _ = progress.join();
        }
        let clean = self.finished.load(Ordering::Relaxed) && self.health.fault().is_none();
        if !clean {
            // MPI_Finalize would wait forever for processes that have ended, and MPI may still read
            // messages in flight.
            std::mem::forget(self.universe.take());
            std::mem::forget(std::mem::take(&mut *self.queue()));
        }
    }
}

fn null_request() -> ffi::MPI_Request {
    // SAFETY: a constant of the bindings, set before the program starts.
    #[allow(unsafe_code)]
    unsafe {
        ffi::RSMPI_REQUEST_NULL
    }
}

fn check(operation: &'static str, code: c_int) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    let mut text = [0; ERROR_TEXT];
    let mut length = 0;
    // SAFETY: the buffer has the size that MPI requires.
    #[allow(unsafe_code)]
    let known = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr(), &mut length) } == 0;
    let length = usize::try_from(length).unwrap_or(0).min(ERROR_TEXT);
    let bytes: Vec<u8> = text[..length].iter().map(|&byte| byte as u8).collect();
    let reason = if known { String::from_utf8_lossy(&bytes).into_owned() } else { String::new() };
    Err(failed(operation, if reason.is_empty() { format!("error {code}") } else { reason }))
}
