//! The recording of a GPU's work by CUPTI, which is loaded when the first recording starts.
//!
//! Fields of records are read in place: a record of an older CUPTI ends before its last fields.

use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::cupti::sys::{
    CUpti_ActivityFlag, CUpti_ActivityKernel9, CUpti_ActivityKind, CUpti_ActivityMemcpy6,
    CUpti_ActivityMemcpyKind, CUpti_ActivityMemset4,
};
use libloading::Library;

use super::Activity;
use crate::error::{Error, Result, with_cause};

/// The library's name in the packages of CUDA 13 and 12.
const LIBRARIES: [&str; 2] = ["libcupti.so.13", "libcupti.so.12"];
const KERNEL: u32 = CUpti_ActivityKind::CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL as u32;
const COPY: u32 = CUpti_ActivityKind::CUPTI_ACTIVITY_KIND_MEMCPY as u32;
const FILL: u32 = CUpti_ActivityKind::CUPTI_ACTIVITY_KIND_MEMSET as u32;
const UPLOAD: u8 = CUpti_ActivityMemcpyKind::CUPTI_ACTIVITY_MEMCPY_KIND_HTOD as u8;
const DOWNLOAD: u8 = CUpti_ActivityMemcpyKind::CUPTI_ACTIVITY_MEMCPY_KIND_DTOH as u8;
const FLUSH_FORCED: u32 = CUpti_ActivityFlag::CUPTI_ACTIVITY_FLAG_FLUSH_FORCED as u32;
/// `CUPTI_SUCCESS`.
const SUCCESS: c_int = 0;
/// 8-byte words of a buffer for records.
const BUFFER_WORDS: usize = 1 << 18;

/// `CUpti_BuffersCallbackRequestFunc` and `CUpti_BuffersCallbackCompleteFunc`.
type Requested = unsafe extern "C" fn(*mut *mut u8, *mut usize, *mut usize);
type Completed = unsafe extern "C" fn(*mut c_void, u32, *mut u8, usize, usize);
/// `cuptiActivityGetNextRecord`.
type NextRecord = unsafe extern "C" fn(*mut u8, usize, *mut *mut u8) -> c_int;

#[derive(Clone, Copy)]
struct Cupti {
    register: unsafe extern "C" fn(Requested, Completed) -> c_int,
    enable: unsafe extern "C" fn(u32) -> c_int,
    disable: unsafe extern "C" fn(u32) -> c_int,
    flush: unsafe extern "C" fn(u32) -> c_int,
    next_record: NextRecord,
}

/// Shared by a [`Recording`] and the callbacks of CUPTI, which have no argument of this program.
struct Shared {
    next_record: Option<NextRecord>,
    activities: Vec<Activity>,
}

static SHARED: Mutex<Shared> = Mutex::new(Shared { next_record: None, activities: Vec::new() });
/// Locked by the [`Recording`] of the process: CUPTI has only one set of callbacks.
static RECORDING: Mutex<()> = Mutex::new(());

fn shared() -> MutexGuard<'static, Shared> {
    SHARED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A recording of all GPU work of the process. A second recording waits for the end of the first.
pub struct Recording {
    cupti: Cupti,
    _only: MutexGuard<'static, ()>,
}

impl Recording {
    /// Starts to record the work that is launched from now on. CUPTI stays loaded.
    ///
    /// # Errors
    /// Fails if CUPTI is missing or returns an error, for example under another profiler.
    pub fn start() -> Result<Self> {
        Self::start_with(Cupti::load()?)
    }

    fn start_with(cupti: Cupti) -> Result<Self> {
        let only = RECORDING.lock().unwrap_or_else(PoisonError::into_inner);
        *shared() = Shared { next_record: Some(cupti.next_record), activities: Vec::new() };
        // SAFETY: the callbacks have the types of cupti_activity.h.
        #[allow(unsafe_code)]
        check("registering callbacks", unsafe { (cupti.register)(requested, completed) })?;
        let recording = Recording { cupti, _only: only };
        for kind in [KERNEL, COPY, FILL] {
            // SAFETY: a kind of cupti_activity.h.
            #[allow(unsafe_code)]
            check("recording", unsafe { (cupti.enable)(kind) })?;
        }
        Ok(recording)
    }

    /// Ends the recording. The caller has waited for the GPU's work. Returns the activities in the
    /// order of their starts.
    pub fn finish(self) -> Result<Vec<Activity>> {
        // SAFETY: CUPTI calls `completed` with each buffer before it returns.
        #[allow(unsafe_code)]
        check("reading the records", unsafe { (self.cupti.flush)(FLUSH_FORCED) })?;
        let mut activities = std::mem::take(&mut shared().activities);
        activities.sort_by_key(|activity| activity.start);
        Ok(activities)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        for kind in [KERNEL, COPY, FILL] {
            // SAFETY: as when the kind was enabled. If it was not enabled, the call fails without effect.
            #[allow(unsafe_code)]
            unsafe {
                (self.cupti.disable)(kind);
            }
        }
    }
}

impl Cupti {
    fn load() -> Result<Self> {
        let mut reason = String::new();
        for name in LIBRARIES {
            // SAFETY: NVIDIA's library has no initialisers that depend on this program.
            #[allow(unsafe_code)]
            match unsafe { Library::new(name) } {
                Ok(library) => return Self::of(library).map_err(failed("loading CUPTI")),
                Err(error) if reason.is_empty() => reason = with_cause(&error),
                Err(_) => {}
            }
        }
        let reason = format!("{reason}: add CUPTI's directory to LD_LIBRARY_PATH");
        Err(failed("loading CUPTI")(reason))
    }

    fn of(library: Library) -> std::result::Result<Self, String> {
        // SAFETY: cupti_activity.h defines these types.
        #[allow(unsafe_code)]
        let cupti = unsafe {
            let symbol = |error: libloading::Error| with_cause(&error);
            Cupti {
                register: *library.get(b"cuptiActivityRegisterCallbacks").map_err(symbol)?,
                enable: *library.get(b"cuptiActivityEnable").map_err(symbol)?,
                disable: *library.get(b"cuptiActivityDisable").map_err(symbol)?,
                flush: *library.get(b"cuptiActivityFlushAll").map_err(symbol)?,
                next_record: *library.get(b"cuptiActivityGetNextRecord").map_err(symbol)?,
            }
        };
        // CUPTI's threads run until the process ends.
        std::mem::forget(library);
        Ok(cupti)
    }
}

fn failed(operation: &'static str) -> impl FnOnce(String) -> Error {
    move |reason| Error::device("CUPTI", operation, reason)
}

fn check(operation: &'static str, code: c_int) -> Result<()> {
    match code {
        SUCCESS => Ok(()),
        code => Err(failed(operation)(format!("error {code} of cupti_result.h"))),
    }
}

/// Passes an empty buffer to CUPTI.
///
/// # Safety
/// The pointers are writable.
#[allow(unsafe_code)]
unsafe extern "C" fn requested(buffer: *mut *mut u8, bytes: *mut usize, most: *mut usize) {
    let words = vec![0u64; BUFFER_WORDS].into_boxed_slice();
    // SAFETY: the caller's promise; `completed` frees the buffer.
    unsafe {
        *buffer = Box::into_raw(words).cast();
        *bytes = BUFFER_WORDS * size_of::<u64>();
        *most = 0;
    }
}

/// Reads a buffer's records and frees it.
///
/// # Safety
/// The buffer comes from [`requested`] and contains `filled` bytes of records.
#[allow(unsafe_code)]
unsafe extern "C" fn completed(_: *mut c_void, _: u32, buffer: *mut u8, _: usize, filled: usize) {
    let mut shared = shared();
    if let Some(next_record) = shared.next_record {
        let mut record = ptr::null_mut();
        // SAFETY: as the caller's; each record starts with its kind, which determines its length.
        unsafe {
            while next_record(buffer, filled, &raw mut record) == SUCCESS {
                shared.activities.extend(activity(record));
            }
        }
    }
    // SAFETY: a boxed slice of this length became this pointer.
    drop(unsafe {
        Box::from_raw(ptr::slice_from_raw_parts_mut(buffer.cast::<u64>(), BUFFER_WORDS))
    });
}

/// Returns the activity of a record; `None` for records of other kinds.
///
/// # Safety
/// The record is complete and aligned to 8 bytes, and a kernel's name is a string or null.
#[allow(unsafe_code)]
unsafe fn activity(record: *const u8) -> Option<Activity> {
    // SAFETY: the caller's promise.
    let (name, stream, start, end) = unsafe {
        match record.cast::<u32>().read() {
            KERNEL => {
                let record = record.cast::<CUpti_ActivityKernel9>();
                let name = (*record).name;
                let name = if name.is_null() { c"kernel" } else { CStr::from_ptr(name) };
                (name.to_string_lossy(), (*record).streamId, (*record).start, (*record).end)
            }
            COPY => {
                let record = record.cast::<CUpti_ActivityMemcpy6>();
                let name = match (*record).copyKind {
                    UPLOAD => "memcpy host to device",
                    DOWNLOAD => "memcpy device to host",
                    _ => "memcpy",
                };
                (name.into(), (*record).streamId, (*record).start, (*record).end)
            }
            FILL => {
                let record = record.cast::<CUpti_ActivityMemset4>();
                ("memset".into(), (*record).streamId, (*record).start, (*record).end)
            }
            _ => return None,
        }
    };
    Some(Activity { name: name.into_owned(), stream, start, end })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// The enabled kinds, as bits, and the callbacks of a CUPTI that records three activities.
    static ENABLED: AtomicUsize = AtomicUsize::new(0);
    static CALLBACKS: Mutex<Option<(Requested, Completed)>> = Mutex::new(None);
    /// Bytes of each of its records.
    const STRIDE: usize = 256;

    extern "C" fn register(requested: Requested, completed: Completed) -> c_int {
        *CALLBACKS.lock().unwrap() = Some((requested, completed));
        SUCCESS
    }

    extern "C" fn enable(kind: u32) -> c_int {
        ENABLED.fetch_or(1 << kind, Ordering::Relaxed);
        SUCCESS
    }

    extern "C" fn disable(kind: u32) -> c_int {
        ENABLED.fetch_and(!(1 << kind), Ordering::Relaxed);
        SUCCESS
    }

    #[allow(unsafe_code)]
    unsafe extern "C" fn next_record(
        buffer: *mut u8,
        filled: usize,
        record: *mut *mut u8,
    ) -> c_int {
        // SAFETY: `flush` has written records of this stride.
        unsafe {
            let at = if (*record).is_null() { buffer } else { (*record).add(STRIDE) };
            if at >= buffer.add(filled) {
                return 12;
            }
            *record = at;
        }
        SUCCESS
    }

    #[allow(unsafe_code)]
    extern "C" fn flush(flag: u32) -> c_int {
        assert_eq!(flag, FLUSH_FORCED);
        let (requested, completed) = CALLBACKS.lock().unwrap().unwrap();
        let (mut buffer, mut bytes, mut most) = (ptr::null_mut(), 0, 1);
        // SAFETY: the buffer is larger than four records, and zeros are valid fields of them.
        unsafe {
            requested(&raw mut buffer, &raw mut bytes, &raw mut most);
            assert!(bytes > 4 * STRIDE && most == 0);
            buffer.write_bytes(0, 4 * STRIDE);
            let kernel = &mut *buffer.cast::<CUpti_ActivityKernel9>();
            kernel.kind = CUpti_ActivityKind::CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL;
            (kernel.start, kernel.end, kernel.streamId) = (500, 900, 7);
            kernel.name = c"swiglu_forward".as_ptr();
            let copy = &mut *buffer.add(STRIDE).cast::<CUpti_ActivityMemcpy6>();
            copy.kind = CUpti_ActivityKind::CUPTI_ACTIVITY_KIND_MEMCPY;
            (copy.start, copy.end, copy.streamId, copy.copyKind) = (100, 110, 8, DOWNLOAD);
            let fill = &mut *buffer.add(2 * STRIDE).cast::<CUpti_ActivityMemset4>();
            fill.kind = CUpti_ActivityKind::CUPTI_ACTIVITY_KIND_MEMSET;
            (fill.start, fill.end, fill.streamId) = (300, 310, 8);
            // A record of a kind that is not recorded.
            buffer.add(3 * STRIDE).cast::<u32>().write(99);
            completed(ptr::null_mut(), 0, buffer, bytes, 4 * STRIDE);
        }
        SUCCESS
    }

    #[test]
    fn records_become_activities_in_the_order_of_their_starts() {
        let cupti = Cupti { register, enable, disable, flush, next_record };
        let recording = Recording::start_with(cupti).unwrap();
        assert_eq!(ENABLED.load(Ordering::Relaxed), 1 << KERNEL | 1 << COPY | 1 << FILL);
        let activities = recording.finish().unwrap();
        assert_eq!(ENABLED.load(Ordering::Relaxed), 0);
        let found: Vec<_> = activities
            .iter()
            .map(|activity| (activity.name.as_str(), activity.stream, activity.start, activity.end))
            .collect();
        let expected = [
            ("memcpy device to host", 8, 100, 110),
            ("memset", 8, 300, 310),
            ("swiglu_forward", 7, 500, 900),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_library_without_cuptis_functions_is_refused() {
        // SAFETY: the C library is loaded already.
        #[allow(unsafe_code)]
        let library = unsafe { Library::new("libc.so.6") }.unwrap();
        let reason = Cupti::of(library).err().unwrap();
        assert!(reason.contains("cuptiActivityRegisterCallbacks"), "{reason}");
    }
}
