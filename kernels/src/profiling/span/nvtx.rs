//! Spans as ranges of NVTX, which Nsight Systems and Nsight Compute show together with the kernels of a GPU.
//!
//! NVTX 3 has no library to link. Instead, the profiler names its library in the variable
//! `NVTX_INJECTION64_PATH`.
//! A program loads this library and calls its `InitializeInjectionNvtx2`, which requests tables
//! of functions and writes its own functions to them. The tables are defined as in `nvtxTypes.h`.
//! Only `nvtxRangePushA` and `nvtxRangePop` are called.

use std::ffi::{CString, OsStr, c_char, c_int, c_uint, c_void};
use std::mem::transmute;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use libloading::Library;

use super::{Label, SINKS, Sink};
use crate::error::{Error, Result, with_cause};

/// The variable with the path of a profiler's library.
const VARIABLE: &str = "NVTX_INJECTION64_PATH";
/// Number of functions of each module, `NVTX_CBID_..._SIZE`. Module 0 and function 0 of each module do not exist.
const FUNCTIONS: [usize; 7] = [0, 16, 9, 15, 7, 16, 7];
/// `NVTX_CB_MODULE_CORE`, and its `NVTX_CBID_CORE_RangePushA` and `NVTX_CBID_CORE_RangePop`.
const CORE: usize = 1;
const RANGE_PUSH: usize = 9;
const RANGE_POP: usize = 11;
/// `NVTX_ETID_CALLBACKS` and `NVTX_ETID_VERSIONINFO`.
const CALLBACKS: u32 = 1;
const VERSION_INFO: u32 = 3;
/// `NVTX_VERSION`.
const VERSION: u32 = 3;

/// `NvtxInitializeInjectionNvtxFunc_t` and `NvtxGetExportTableFunc_t`.
type Initialize = unsafe extern "C" fn(GetExportTable) -> c_int;
type GetExportTable = extern "C" fn(u32) -> *const c_void;
/// `nvtxRangePushA` and `nvtxRangePop`.
type Push = unsafe extern "C" fn(*const c_char) -> c_int;
type Pop = unsafe extern "C" fn() -> c_int;

/// A slot to which a profiler writes the address of a function; null until then.
type Slot = AtomicPtr<c_void>;

/// `NvtxExportTableCallbacks`.
#[repr(C)]
struct Callbacks {
    struct_size: usize,
    module_functions:
        unsafe extern "C" fn(c_uint, *mut *const AtomicPtr<Slot>, *mut c_uint) -> c_int,
}

/// `NvtxExportTableVersionInfo`.
#[repr(C)]
struct VersionInfo {
    struct_size: usize,
    version: u32,
    reserved: u32,
    set_injection_version: extern "C" fn(u32),
}

static OUR_CALLBACKS: Callbacks =
    Callbacks { struct_size: size_of::<Callbacks>(), module_functions };
static OUR_VERSION: VersionInfo = VersionInfo {
    struct_size: size_of::<VersionInfo>(),
    version: VERSION,
    reserved: 0,
    set_injection_version,
};

/// The slots of each module.
static SLOTS: [[Slot; 16]; 7] = [const { [const { AtomicPtr::new(ptr::null_mut()) }; 16] }; 7];
/// The table of each module: the addresses of its slots, then null.
static TABLES: OnceLock<[[AtomicPtr<Slot>; 17]; 7]> = OnceLock::new();

static PROFILER: OnceLock<Nvtx> = OnceLock::new();

/// The functions of a profiler.
struct Nvtx {
    push: Push,
    pop: Pop,
}

/// Notifies the profiler that started this process, if any, of the spans of all threads
/// from now on. Nsight Systems and Nsight Compute set the variable
/// `NVTX_INJECTION64_PATH` to their library. Returns whether a profiler is notified: false if it declines,
/// for example because it does not trace ranges.
///
/// # Errors
/// Fails if the variable does not name such a library.
pub fn connect_profiler() -> Result<bool> {
    let Some(path) = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()) else {
        return Ok(false);
    };
    if PROFILER.get().is_some() {
        return Ok(true);
    }
    let connected = Nvtx::load(&path).map_err(|reason| {
        let path = path.to_string_lossy();
        Error::new(format!(
            "{VARIABLE}={path}: {reason}: unset {VARIABLE} to run without a profiler"
        ))
    })?;
    if let Some(nvtx) = connected
        && PROFILER.set(nvtx).is_ok()
    {
        SINKS.fetch_add(1, Ordering::Relaxed);
    }
    Ok(PROFILER.get().is_some())
}

/// Returns the profiler that is notified of spans.
pub(super) fn profiler() -> Option<&'static dyn Sink> {
    PROFILER.get().map(|nvtx| nvtx as &dyn Sink)
}

impl Nvtx {
    fn load(path: &OsStr) -> std::result::Result<Option<Self>, String> {
        // SAFETY: the user who starts the process chooses the profiler and its initialisers.
        #[allow(unsafe_code)]
        let library = unsafe { Library::new(path) }.map_err(|error| with_cause(&error))?;
        // SAFETY: nvtxTypes.h defines this type.
        #[allow(unsafe_code)]
        let initialize = *unsafe { library.get::<Initialize>(b"InitializeInjectionNvtx2") }
            .map_err(|error| with_cause(&error))?;
        let nvtx = Self::attach(initialize);
        // The library's functions are called until the process ends, and a profiler may have its own threads.
        std::mem::forget(library);
        Ok(nvtx)
    }

    /// Asks a profiler to write its functions; `None` if it declines, or does not trace ranges.
    fn attach(initialize: Initialize) -> Option<Self> {
        // SAFETY: nvtxTypes.h defines the types of the function and of its argument.
        #[allow(unsafe_code)]
        if unsafe { initialize(export_table) } == 0 {
            return None;
        }
        let [push, pop] = [RANGE_PUSH, RANGE_POP].map(|at| SLOTS[CORE][at].load(Ordering::Acquire));
        if push.is_null() || pop.is_null() {
            return None;
        }
        // SAFETY: neither is null, and a profiler writes functions of these types there (nvtxTypes.h).
        #[allow(unsafe_code)]
        Some(unsafe {
            Nvtx {
                push: transmute::<*mut c_void, Push>(push),
                pop: transmute::<*mut c_void, Pop>(pop),
            }
        })
    }
}

impl Sink for Nvtx {
    fn enter(&self, label: Label) {
        // A label contains no zero byte.
        let text = CString::new(label.to_string()).unwrap_or_default();
        // SAFETY: the profiler's function has a string as its argument, which lives until the function
        // returns.
        #[allow(unsafe_code)]
        unsafe {
            (self.push)(text.as_ptr());
        }
    }

    fn exit(&self) {
        // SAFETY: the profiler's function has no arguments.
        #[allow(unsafe_code)]
        unsafe {
            (self.pop)();
        }
    }
}

/// Implements `nvtxGetExportTable`.
extern "C" fn export_table(id: u32) -> *const c_void {
    match id {
        CALLBACKS => (&raw const OUR_CALLBACKS).cast(),
        VERSION_INFO => (&raw const OUR_VERSION).cast(),
        _ => ptr::null(),
    }
}

/// Implements `GetModuleFunctionTable`: returns 1 with a module's table and its number of functions, 0 without a
/// table.
///
/// # Safety
/// Each pointer is null or writable.
#[allow(unsafe_code)]
unsafe extern "C" fn module_functions(
    module: c_uint,
    table: *mut *const AtomicPtr<Slot>,
    size: *mut c_uint,
) -> c_int {
    let tables = TABLES.get_or_init(|| {
        std::array::from_fn(|module| {
            std::array::from_fn(|at| {
                let slot = SLOTS[module].get(at).filter(|_| (1..FUNCTIONS[module]).contains(&at));
                AtomicPtr::new(slot.map_or(ptr::null_mut(), |slot| (&raw const *slot).cast_mut()))
            })
        })
    });
    let module = module as usize;
    let Some(&functions) = FUNCTIONS.get(module).filter(|&&functions| functions > 0) else {
        return 0;
    };
    // SAFETY: the caller's promise.
    unsafe {
        if !table.is_null() {
            *table = tables[module].as_ptr();
        }
        if !size.is_null() {
            *size = functions as c_uint;
        }
    }
    1
}

/// Implements `SetInjectionNvtxVersion`; NVTX also ignores the version.
extern "C" fn set_injection_version(_version: u32) {}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;
    use std::sync::Mutex;

    use super::*;

    static HEARD: Mutex<Vec<String>> = Mutex::new(Vec::new());

    #[allow(unsafe_code)]
    unsafe extern "C" fn push(text: *const c_char) -> c_int {
        // SAFETY: a span's label.
        let text = unsafe { CStr::from_ptr(text) };
        HEARD.lock().unwrap().push(text.to_str().unwrap().to_owned());
        0
    }

    extern "C" fn pop() -> c_int {
        HEARD.lock().unwrap().push("end".into());
        0
    }

    #[allow(unsafe_code)]
    unsafe extern "C" fn decline(_export_table: GetExportTable) -> c_int {
        0
    }

    /// Does the same as a profiler: requests every module's table, and fills every slot.
    #[allow(unsafe_code)]
    unsafe extern "C" fn initialize(export_table: GetExportTable) -> c_int {
        assert!(export_table(99).is_null());
        // SAFETY: nvtxTypes.h defines the tables.
        unsafe {
            let version = &*export_table(VERSION_INFO).cast::<VersionInfo>();
            assert_eq!((version.struct_size, version.version), (24, 3));
            (version.set_injection_version)(3);
            let callbacks = &*export_table(CALLBACKS).cast::<Callbacks>();
            assert_eq!(callbacks.struct_size, 16);
            let mut table = ptr::null();
            let mut size = 0;
            for module in 1..7 {
                assert_eq!((callbacks.module_functions)(module, &raw mut table, &raw mut size), 1);
                assert_eq!(size as usize, FUNCTIONS[module as usize]);
                assert!((*table).load(Ordering::Relaxed).is_null());
                assert!((*table.add(size as usize)).load(Ordering::Relaxed).is_null());
                for at in 1..size as usize {
                    let function =
                        if at == RANGE_POP { pop as *mut c_void } else { ptr::null_mut() };
                    let function = if at == RANGE_PUSH { push as *mut c_void } else { function };
                    let slot = (*table.add(at)).load(Ordering::Relaxed);
                    (*slot).store(function, Ordering::Relaxed);
                }
            }
            assert_eq!((callbacks.module_functions)(0, &raw mut table, &raw mut size), 0);
            assert_eq!((callbacks.module_functions)(7, &raw mut table, &raw mut size), 0);
            assert_eq!((callbacks.module_functions)(1, ptr::null_mut(), ptr::null_mut()), 1);
        }
        1
    }

    #[test]
    fn a_profiler_hears_of_spans() {
        assert!(Nvtx::attach(decline).is_none());
        let nvtx = Nvtx::attach(initialize).unwrap();
        nvtx.enter(Label { name: "attention", number: None });
        nvtx.enter(Label { name: "block", number: Some(3) });
        nvtx.exit();
        nvtx.exit();
        assert_eq!(*HEARD.lock().unwrap(), ["attention", "block 3", "end", "end"]);
    }

    #[test]
    fn what_is_no_profiler_is_refused() {
        let reason = |path: &str| Nvtx::load(OsStr::new(path)).err().unwrap();
        assert!(reason("/none/profiler.so").contains("/none/profiler.so"));
        assert!(reason("libc.so.6").contains("InitializeInjectionNvtx2"));
    }

    #[test]
    fn without_the_variable_nothing_is_loaded() {
        if std::env::var_os(VARIABLE).is_none() {
            assert_eq!(connect_profiler(), Ok(false));
        }
    }
}
