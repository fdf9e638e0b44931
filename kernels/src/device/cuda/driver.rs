//! A GPU through CUDA's driver, loaded on first use.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaContext, DriverError, result, sys};

use super::device::{Algorithms, BoxedTensor, Device, Matmul};
use super::matmul::Matmuls;
use super::parameters::TensorMap;
use crate::{Error, MemoryInfo, Result};

/// The kernels, compiled for several generations of GPUs (build/main.rs).
static KERNELS: &Aligned<[u8]> =
    &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/kernels.fatbin")));

/// Bytes aligned to 64, like machine code in nvcc's files.
#[repr(C, align(64))]
struct Aligned<T: ?Sized>(T);

/// Dynamic shared memory above which a kernel needs an opt-in.
const SMALL_SHARED: u32 = 48 << 10;
/// Minimum compute capability of the kernels.
const MIN_CAPABILITY: i32 = 8;
/// Compute capability of sm_90a.
const HOPPER: (i32, i32) = (9, 0);

/// A GPU, one stream on it, and the kernels.
pub(super) struct Driver {
    name: String,
    context: Arc<CudaContext>,
    stream: sys::CUstream,
    module: sys::CUmodule,
    functions: Mutex<HashMap<String, Function>>,
    matmuls: Mutex<Matmuls>,
    most_shared_bytes: usize,
    multiprocessors: usize,
    runs_hopper: bool,
}

#[derive(Clone, Copy)]
struct Function {
    handle: sys::CUfunction,
    /// The GPU's maximum dynamic shared memory of a block.
    shared_bytes: u32,
}

// SAFETY: any thread that has bound the context may use the driver's handles. Every method binds the
// context first.
#[allow(unsafe_code)]
unsafe impl Send for Driver {}
// SAFETY: as above; mutable state is behind locks.
#[allow(unsafe_code)]
unsafe impl Sync for Driver {}

/// Checks that the libraries exist. Returns an error if a library is missing; cudarc would panic on the first call.
fn libraries(device: &str) -> Result<()> {
    // SAFETY: only looks up shared libraries by name.
    #[allow(unsafe_code)]
    let (driver, blas) =
        unsafe { (sys::is_culib_present(), cudarc::cublaslt::sys::is_culib_present()) };
    let missing = |library| Err(Error::device(device, "start", format!("{library} was not found")));
    match (driver, blas) {
        (false, _) => missing("NVIDIA's driver (libcuda.so.1)"),
        (_, false) => missing("cuBLASLt (libcublasLt.so.13; add its directory to LD_LIBRARY_PATH)"),
        (true, true) => Ok(()),
    }
}

pub(super) fn count() -> Result<usize> {
    libraries("GPUs")?;
    let count =
        CudaContext::device_count().map_err(|error| Error::device("GPUs", "start", error))?;
    Ok(count.max(0) as usize)
}

impl Driver {
    /// Opens the GPU with index `ordinal` and loads the kernels.
    pub(super) fn new(ordinal: usize) -> Result<Self> {
        let name = format!("GPU {ordinal}");
        libraries(&name)?;
        let start = |error: DriverError| Error::device(&name, "start", error);
        let context = CudaContext::new(ordinal).map_err(start)?;
        let name = context.name().map_or(name.clone(), |model| format!("{name} ({model})"));
        let start = |error: DriverError| Error::device(&name, "start", error);
        use sys::CUdevice_attribute as Attribute;
        let attribute = |attribute| context.attribute(attribute).map_err(start);
        let capability = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if capability < MIN_CAPABILITY {
            let reason =
                format!("compute capability {capability} is less than {MIN_CAPABILITY}, Ampere's");
            return Err(Error::device(&name, "start", reason));
        }
        // These kernels are empty for other capabilities, and missing in binaries without sm_90a.
        let runs_hopper = cfg!(hopper) && (capability, minor) == HOPPER;
        let most = Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let most_shared_bytes = attribute(most)?.max(0) as usize;
        let count = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let multiprocessors = count.max(1) as usize;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking);
        let stream = stream.map_err(start)?;
        // SAFETY: the image is a complete fat binary, written by the build.
        #[allow(unsafe_code)]
        let module = unsafe { result::module::load_data(KERNELS.0.as_ptr().cast()) };
        let module = module.map_err(|error| Error::device(&name, "loading the kernels", error))?;
        let matmuls = Mutex::new(Matmuls::new(&name)?);
        let functions = Mutex::default();
        Ok(Driver {
            name,
            context,
            stream,
            module,
            functions,
            matmuls,
            most_shared_bytes,
            multiprocessors,
            runs_hopper,
        })
    }

    /// Binds the GPU to this thread and runs `work`.
    fn run<R>(
        &self,
        operation: &'static str,
        work: impl FnOnce() -> std::result::Result<R, DriverError>,
    ) -> Result<R> {
        let bound = self.context.bind_to_thread();
        bound.and_then(|()| work()).map_err(|error| Error::device(&self.name, operation, error))
    }

    /// Returns the kernel with this name, after enabling this much dynamic shared memory.
    fn function(&self, kernel: &str, shared_bytes: u32) -> Result<sys::CUfunction> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(kernel).filter(|f| f.shared_bytes >= shared_bytes) {
            return Ok(function.handle);
        }
        let name =
            CString::new(kernel).map_err(|error| Error::device(&self.name, "launch", error))?;
        let handle = self.run("looking for a kernel", || {
            // SAFETY: the module stays loaded as long as this value lives.
            #[allow(unsafe_code)]
            unsafe {
                let handle = result::module::get_function(self.module, name)?;
                if shared_bytes > SMALL_SHARED {
                    use sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                    result::function::set_function_attribute(
                        handle,
                        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                        shared_bytes as i32,
                    )?;
                }
                Ok(handle)
            }
        })?;
        let shared_bytes = shared_bytes.max(SMALL_SHARED);
        functions.insert(kernel.to_owned(), Function { handle, shared_bytes });
        Ok(handle)
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // If the device fails here, it has failed before. Drop cannot report errors.
        let _ = self.run("releasing the GPU", || {
            let mut matmuls = self.matmuls.lock().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: buffers own a reference to their device, so nothing uses the kernels, the
            // matmuls or the stream after its work is done.
            #[allow(unsafe_code)]
            unsafe {
                result::stream::synchronize(self.stream)?;
                matmuls.destroy()?;
                result::module::unload(self.module)?;
                result::stream::destroy(self.stream)
            }
        });
    }
}

impl Device for Driver {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn most_shared_bytes(&self) -> usize {
        self.most_shared_bytes
    }

    fn multiprocessors(&self) -> usize {
        self.multiprocessors
    }

    fn runs_hopper(&self) -> bool {
        self.runs_hopper
    }

    fn tensor_map(&self, tensor: &BoxedTensor) -> Result<TensorMap> {
        let BoxedTensor { address, dimensions, strides, sides } = tensor;
        let mut map = sys::CUtensorMap_st { opaque: [0; 16] };
        // SAFETY: the arrays have `rank` elements, the strides one less. The driver reads them,
        // writes the map, and does not access the address.
        #[allow(unsafe_code)]
        let encoded = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                sys::CUtensorMapDataType_enum::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                dimensions.len() as u32,
                *address as *mut c_void,
                dimensions.as_ptr(),
                strides.as_ptr(),
                sides.as_ptr(),
                [1; 3].as_ptr(),
                sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        encoded
            .result()
            .map_err(|error| Error::device(&self.name, "describing a tensor", error))?;
        Ok(TensorMap { words: map.opaque })
    }

    fn memory_info(&self) -> Option<MemoryInfo> {
        let (free, total) = self.run("querying memory", result::mem_get_info).ok()?;
        Some(MemoryInfo { used: (total - free) as u64, total: total as u64 })
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        let allocated = self.run("allocation", || {
            // SAFETY: the size is not 0.
            #[allow(unsafe_code)]
            let allocated = unsafe { result::malloc_sync(bytes.max(1)) };
            // Other failures come from the GPU or from earlier work.
            match allocated {
                Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => Ok(None),
                other => other.map(Some),
            }
        })?;
        let address = allocated.ok_or_else(|| Error::no_room(&self.name(), bytes))?;
        self.zero(address, bytes)?;
        Ok(address)
    }

    fn free(&self, address: u64, _bytes: usize) {
        // If the device fails here, it has failed before. Drop cannot report errors.
        let _ = self.run("freeing memory", || {
            // SAFETY: `allocate` returned the address. The driver waits for work that uses it.
            #[allow(unsafe_code)]
            unsafe {
                result::stream::synchronize(self.stream)?;
                result::free_sync(address)
            }
        });
    }

    fn upload(&self, source: &[u8], to: u64) -> Result<()> {
        self.run("upload", || {
            // SAFETY: `to` comes from a view of as many bytes. The driver has copied pageable
            // memory when it returns (API synchronization behavior, CUDA driver API), so nothing
            // waits for the stream.
            #[allow(unsafe_code)]
            unsafe {
                result::memcpy_htod_async(to, source, self.stream)
            }
        })
    }

    fn download(&self, from: u64, destination: &mut [u8]) -> Result<()> {
        self.run("download", || {
            // SAFETY: `from` comes from a view of as many bytes; synchronising completes the copy.
            #[allow(unsafe_code)]
            unsafe {
                result::memcpy_dtoh_async(destination, from, self.stream)?;
                result::stream::synchronize(self.stream)
            }
        })
    }

    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()> {
        self.run("copy", || {
            // SAFETY: both addresses come from views of as many bytes.
            #[allow(unsafe_code)]
            unsafe {
                result::memcpy_dtod_async(to, from, bytes, self.stream)
            }
        })
    }

    fn zero(&self, at: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.run("zero", || {
            // SAFETY: the address comes from a view of as many bytes.
            #[allow(unsafe_code)]
            unsafe {
                result::memset_d8_async(at, 0, bytes, self.stream)
            }
        })
    }

    fn synchronize(&self) -> Result<()> {
        self.run("synchronisation", || {
            // SAFETY: the stream lives as long as the device.
            #[allow(unsafe_code)]
            unsafe {
                result::stream::synchronize(self.stream)
            }
        })
    }

    fn stream(&self) -> Option<super::CudaStream> {
        Some(super::CudaStream { context: Arc::clone(&self.context), stream: self.stream })
    }

    fn launch(
        &self,
        kernel: &str,
        grid: [u32; 3],
        threads: u32,
        shared_bytes: u32,
        parameters: &[&[u8]],
    ) -> Result<()> {
        let function = self.function(kernel, shared_bytes)?;
        let [x, y, z] = grid;
        self.run("launch", || {
            // SAFETY: the operator passes the structs that the kernel of this name expects. The
            // driver copies the structs; their addresses come from views of checked lengths.
            #[allow(unsafe_code)]
            unsafe {
                let mut arguments: Vec<*mut c_void> =
                    parameters.iter().map(|bytes| bytes.as_ptr() as *mut c_void).collect();
                let blocks = (x, y, z);
                let stream = self.stream;
                result::launch_kernel(
                    function,
                    blocks,
                    (threads, 1, 1),
                    shared_bytes,
                    stream,
                    &mut arguments,
                )
            }
        })
    }

    fn matmul(&self, matmul: &Matmul, algorithms: Algorithms) -> Result<()> {
        self.run("matmul", || Ok(()))?;
        let mut matmuls = self.matmuls.lock().unwrap_or_else(PoisonError::into_inner);
        let started = matmuls.run(matmul, algorithms, self.stream);
        started.map_err(|error| Error::device(&self.name, "matmul", error))
    }
}
