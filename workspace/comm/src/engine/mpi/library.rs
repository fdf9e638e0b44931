//! The MPI library of this process: started once, called by one thread at a time, ended when the
//! last group is gone.
//!
//! The crate `mpi` throws return codes away and has no error handling of its own, so that what can
//! fail is called through its bindings here. Calls never block: they start something and test it,
//! so that an operation whose partner has died ends with the fault that the liveness thread found.
//! MPI moves long messages while it is called, and their sender computes meanwhile: a thread calls
//! it as long as messages wait.

use std::ffi::c_int;
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

/// How long after a fault what other processes had begun to write may still arrive.
const SETTLE: Duration = Duration::from_millis(500);
/// How often MPI is called while a message waits.
const PROGRESS: Duration = Duration::from_micros(50);
/// Room that MPI wants for the text of an error.
const ERROR_TEXT: usize = ffi::MPI_MAX_ERROR_STRING as usize;

pub(super) fn failed(operation: &'static str, reason: impl Into<String>) -> Error {
    Error::Engine { engine: "MPI", operation, reason: reason.into() }
}

/// The library, between its start and its end.
pub(super) struct Library {
    universe: Option<Universe>,
    calls: Arc<Calls>,
    progress: Option<JoinHandle<()>>,
    /// The job has come to its end, so that all processes finalise.
    finished: AtomicBool,
    pub(super) health: Arc<Health>,
}

/// The right to call MPI.
#[derive(Default)]
struct Calls {
    /// Held during each call: the library is asked for one calling thread at a time.
    mail: Mutex<Mail>,
    posted: Condvar,
}

/// What was sent and may not have left.
#[derive(Default)]
struct Mail {
    outstanding: Vec<Letter>,
    free: Vec<Scratch>,
    /// Why a message did not leave.
    failure: Option<Error>,
    ended: bool,
}

struct Letter {
    request: ffi::MPI_Request,
    content: Scratch,
}

// SAFETY: requests are handles of the library, which any thread may use while it holds the lock
// around the `Mail`; MPI_THREAD_SERIALIZED, which `start` insists on, allows calls of several threads.
#[allow(unsafe_code)]
unsafe impl Send for Mail {}

// SAFETY: the universe is only kept, to be dropped by one thread.
#[allow(unsafe_code)]
unsafe impl Send for Library {}
// SAFETY: as above, and shared references reach the library through the lock alone.
#[allow(unsafe_code)]
unsafe impl Sync for Library {}

impl Library {
    /// Starts MPI; once in a process.
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
            return Err(failed("MPI_Init", "this MPI library serves the main thread alone"));
        }
        library.report_errors_of(library.world())?;
        let (calls, health) = (Arc::clone(&library.calls), Arc::clone(&library.health));
        let thread = std::thread::Builder::new().name("moh-mpi".into());
        let thread = thread.spawn(move || calls.move_messages(&health));
        let thread = thread.map_err(|error| failed("starting a thread", error.to_string()))?;
        library.progress = Some(thread);
        Ok(library)
    }

    /// The communicator of all processes.
    pub(super) fn world(&self) -> ffi::MPI_Comm {
        // SAFETY: a constant of the bindings, set before the program starts.
        #[allow(unsafe_code)]
        unsafe {
            ffi::RSMPI_COMM_WORLD
        }
    }

    /// This process's rank among all, and their number.
    pub(super) fn rank_and_size(&self) -> (usize, usize) {
        let world = mpi::topology::SimpleCommunicator::world();
        (world.rank() as usize, world.size() as usize)
    }

    /// Makes calls on this communicator return their errors; MPI would end the job otherwise.
    pub(super) fn report_errors_of(&self, communicator: ffi::MPI_Comm) -> Result<()> {
        // SAFETY: the communicator is one of the library's, the handler one of its constants.
        #[allow(unsafe_code)]
        self.call("MPI_Comm_set_errhandler", || unsafe {
            ffi::MPI_Comm_set_errhandler(communicator, ffi::RSMPI_ERRORS_RETURN)
        })
    }

    fn mail(&self) -> MutexGuard<'_, Mail> {
        self.calls.mail()
    }

    /// One call of the library that returns an error code.
    pub(super) fn call(&self, operation: &'static str, call: impl FnOnce() -> c_int) -> Result<()> {
        let _calls = self.mail();
        check(operation, call())
    }

    /// Starts an operation and waits until it is done.
    ///
    /// What the operation reads and writes belongs to it until this returns. After a fault, that is
    /// once no process calls MPI any more and what was under way has arrived.
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
            // SAFETY: a status is plain integers, of which all bits zero are sound.
            #[allow(unsafe_code)]
            let mut status: ffi::MPI_Status = unsafe { std::mem::zeroed() };
            // SAFETY: the request is one that MPI has given, and the rest lives through the call.
            #[allow(unsafe_code)]
            self.call(operation, || unsafe { ffi::MPI_Test(request, &mut done, &mut status) })?;
            if done != 0 {
                return Ok(status);
            }
            if let Some(fault) = self.health.fault() {
                std::thread::sleep(SETTLE);
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
        let mut mail = self.mail();
        let content = scratch::take(&mut mail.free, bytes.len());
        let mut letter = Letter { request: null_request(), content };
        letter.content.fill(bytes);
        check("MPI_Isend", start(letter.content.bytes(), &mut letter.request))?;
        mail.outstanding.push(letter);
        // Most messages are short and have left by now.
        mail.take_back_what_has_left()?;
        if !mail.outstanding.is_empty() {
            self.calls.posted.notify_one();
        }
        Ok(())
    }

    /// Takes memory for so many messages that have not left.
    pub(super) fn reserve_sends(&self, messages: usize, bytes: usize) {
        scratch::reserve(&mut self.mail().free, messages, bytes);
    }

    /// Waits until everything sent has left.
    pub(super) fn wait_for_sent(&self) -> Result<()> {
        loop {
            {
                let mut mail = self.mail();
                mail.take_back_what_has_left()?;
                if mail.outstanding.is_empty() {
                    return Ok(());
                }
            }
            self.health.check()?;
            std::thread::yield_now();
        }
    }

    /// All processes finalise from now on.
    pub(super) fn finish(&self) {
        self.finished.store(true, Ordering::Relaxed);
    }

    /// Ends all processes of the job.
    pub(super) fn abort(&self, code: i32) -> ! {
        // No lock: another thread may hold it in a call that does not come back.
        // SAFETY: allowed at any time between start and end.
        #[allow(unsafe_code)]
        unsafe {
            ffi::MPI_Abort(self.world(), code);
        }
        std::process::exit(code)
    }
}

impl Calls {
    /// A panic elsewhere leaves the mail sound: each change is one step.
    fn mail(&self) -> MutexGuard<'_, Mail> {
        self.mail.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls MPI while messages wait, until the end.
    fn move_messages(&self, health: &Health) {
        let mut mail = self.mail();
        while !mail.ended && health.fault().is_none() {
            if mail.outstanding.is_empty() {
                mail = self.posted.wait(mail).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            // The error is kept, and what is sent next reports it, or the end.
            if mail.take_back_what_has_left().is_err() {
                return;
            }
            drop(mail);
            std::thread::sleep(PROGRESS);
            mail = self.mail();
        }
    }
}

impl Mail {
    fn take_back_what_has_left(&mut self) -> Result<()> {
        let mut at = 0;
        while let Some(letter) = self.outstanding.get_mut(at) {
            let mut done = 0;
            // SAFETY: the request is one that MPI has given, the caller holds the lock, and a null
            // status is the library's own constant.
            #[allow(unsafe_code)]
            let code =
                unsafe { ffi::MPI_Test(&mut letter.request, &mut done, ffi::RSMPI_STATUS_IGNORE) };
            if let Err(error) = check("MPI_Isend", code) {
                self.failure.get_or_insert(error);
                // MPI may still read it.
                std::mem::forget(self.outstanding.swap_remove(at));
            } else if done == 0 {
                at += 1;
            } else {
                let letter = self.outstanding.swap_remove(at);
                self.free.push(letter.content);
            }
        }
        self.failure.clone().map_or(Ok(()), Err)
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        self.mail().ended = true;
        self.calls.posted.notify_one();
        if let Some(progress) = self.progress.take() {
            // It does not panic, and if it did, nothing here would change.
            let _ = progress.join();
        }
        let well = self.finished.load(Ordering::Relaxed) && self.health.fault().is_none();
        if !well {
            // MPI's end waits for all processes, which would be for ever; and what was sent may
            // still be read.
            std::mem::forget(self.universe.take());
            std::mem::forget(std::mem::take(&mut *self.mail()));
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

/// The error that a code stands for.
fn check(operation: &'static str, code: c_int) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    let mut text = [0; ERROR_TEXT];
    let mut length = 0;
    // SAFETY: the text has the room that MPI asks for.
    #[allow(unsafe_code)]
    let known = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr(), &mut length) } == 0;
    let length = usize::try_from(length).unwrap_or(0).min(ERROR_TEXT);
    let bytes: Vec<u8> = text[..length].iter().map(|&byte| byte as u8).collect();
    let reason = if known { String::from_utf8_lossy(&bytes).into_owned() } else { String::new() };
    Err(failed(operation, if reason.is_empty() { format!("error {code}") } else { reason }))
}
