//! NCCL's functions, loaded on first use.
//!
//! Runtime packages install the library only under its versioned name (`libnccl.so.2`), which
//! cudarc's loader does not try. The types are cudarc's.

use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

use cudarc::nccl::sys::{
    cudaStream_t, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId,
};
use libloading::Library;
use moh_kernels::with_cause;

use super::communicator::failed;
use crate::error::Result;

/// File names of the library, in the order of the attempts.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

static FUNCTIONS: OnceLock<std::result::Result<Functions, String>> = OnceLock::new();

/// Loads NCCL. All other functions of this module require it.
pub(super) fn load() -> Result<()> {
    match FUNCTIONS.get_or_init(|| open(&NAMES).and_then(Functions::new)) {
        Ok(_) => Ok(()),
        Err(reason) => Err(failed("start", reason)),
    }
}

/// Opens the first of these libraries that exists.
fn open(names: &[&str]) -> std::result::Result<Library, String> {
    let mut reasons = Vec::new();
    for &name in names {
        // SAFETY: NCCL's initialisers only set up the library.
        #[allow(unsafe_code)]
        match unsafe { Library::new(name) } {
            Ok(library) => return Ok(library),
            Err(error) => reasons.push(format!("{name}: {}", with_cause(&error))),
        }
    }
    let reasons = reasons.join("; ");
    Err(format!(
        "NCCL was not found ({reasons}); install it, or add its directory to LD_LIBRARY_PATH"
    ))
}

/// Declares functions of nccl.h, the table of their addresses, and its loader.
macro_rules! functions {
    ($($name:ident($($argument:ident: $kind:ty),*) -> $result:ty;)*) => {
        #[allow(non_snake_case)]
        struct Functions {
            /// Kept, since dropping it would unload the functions.
            _library: Library,
            $($name: unsafe extern "C" fn($($kind),*) -> $result,)*
        }

        impl Functions {
            #[allow(non_snake_case, unsafe_code)]
            fn new(library: Library) -> std::result::Result<Self, String> {
                $(
                    // SAFETY: the type is the one in nccl.h.
                    let $name = *unsafe { library.get(stringify!($name).as_bytes()) }
                        .map_err(|error| format!("{}: {}", stringify!($name), with_cause(&error)))?;
                )*
                Ok(Functions { _library: library, $($name,)* })
            }
        }

        $(
            /// Calls the function of this name in nccl.h.
            ///
            /// # Safety
            /// See nccl.h. In addition, [`load`] must have succeeded.
            #[allow(non_snake_case, unsafe_code)]
            pub(super) unsafe fn $name($($argument: $kind),*) -> $result {
                // SAFETY: the caller's promise.
                unsafe { (loaded().$name)($($argument),*) }
            }
        )*
    };
}

fn loaded() -> &'static Functions {
    let functions = FUNCTIONS.get().and_then(|functions| functions.as_ref().ok());
    // Every call needs a communicator or an id, and both are created after `load`.
    functions.expect("NCCL is loaded before its functions are called")
}

functions! {
    ncclGetUniqueId(id: *mut ncclUniqueId) -> ncclResult_t;
    ncclGetErrorString(result: ncclResult_t) -> *const c_char;
    ncclGetLastError(communicator: ncclComm_t) -> *const c_char;
    ncclCommInitRank(communicator: *mut ncclComm_t, ranks: c_int, id: ncclUniqueId, rank: c_int)
        -> ncclResult_t;
    ncclCommSplit(
        communicator: ncclComm_t, color: c_int, key: c_int, new: *mut ncclComm_t,
        configuration: *mut ncclConfig_t
    ) -> ncclResult_t;
    ncclCommUserRank(communicator: ncclComm_t, rank: *mut c_int) -> ncclResult_t;
    ncclCommCount(communicator: ncclComm_t, count: *mut c_int) -> ncclResult_t;
    ncclCommGetAsyncError(communicator: ncclComm_t, error: *mut ncclResult_t) -> ncclResult_t;
    ncclCommDestroy(communicator: ncclComm_t) -> ncclResult_t;
    ncclCommAbort(communicator: ncclComm_t) -> ncclResult_t;
    ncclAllReduce(
        from: *const c_void, to: *mut c_void, count: usize, kind: ncclDataType_t,
        reduction: ncclRedOp_t, communicator: ncclComm_t, stream: cudaStream_t
    ) -> ncclResult_t;
    ncclReduceScatter(
        from: *const c_void, to: *mut c_void, count: usize, kind: ncclDataType_t,
        reduction: ncclRedOp_t, communicator: ncclComm_t, stream: cudaStream_t
    ) -> ncclResult_t;
    ncclAllGather(
        from: *const c_void, to: *mut c_void, count: usize, kind: ncclDataType_t,
        communicator: ncclComm_t, stream: cudaStream_t
    ) -> ncclResult_t;
    ncclBroadcast(
        from: *const c_void, to: *mut c_void, count: usize, kind: ncclDataType_t, root: c_int,
        communicator: ncclComm_t, stream: cudaStream_t
    ) -> ncclResult_t;
    ncclSend(
        from: *const c_void, count: usize, kind: ncclDataType_t, to: c_int,
        communicator: ncclComm_t, stream: cudaStream_t
    ) -> ncclResult_t;
    ncclRecv(
        to: *mut c_void, count: usize, kind: ncclDataType_t, from: c_int,
        communicator: ncclComm_t, stream: cudaStream_t
    ) -> ncclResult_t;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Uses a library of the C runtime that is installed only under its versioned name.
    #[test]
    fn a_library_is_found_by_its_versioned_name() {
        assert!(open(&["libnone.so.0", "libc.so.6"]).is_ok());
        let missing = open(&["libnone.so.0", "libnone.so"]).err().unwrap();
        assert!(missing.contains("libnone.so.0") && missing.contains("LD_LIBRARY_PATH"));
        assert_eq!(NAMES[0], "libnccl.so.2");
    }

    #[test]
    fn a_library_without_its_functions_is_refused() {
        let library = open(&["libc.so.6"]).unwrap();
        assert!(Functions::new(library).is_err_and(|reason| reason.contains("ncclGetUniqueId")));
    }
}
