//! The kernels compiled for the CPU, which runs their blocks in sequence (`emulator.h`). Addresses
//! are host addresses.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::{CString, c_char, c_void};
use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::{Pod, Zeroable};
use half::bf16;

use super::device::{Algorithms, BoxedTensor, Device, Matmul, Operand};
use super::parameters::TensorMap;
use crate::matmul::{Destination, Matrix, MatrixMut, matmul_parallel};
use crate::{DType, Element, Error, MemoryInfo, Result};

/// Host memory that serves as a device's memory.
#[derive(Default)]
pub(super) struct Emulator {
    /// 0 runs threads in order, other values in a random order that depends only on the seed.
    schedule_seed: u32,
    allocations: AtomicU64,
    frees: AtomicU64,
    launches: AtomicU64,
}

/// The calls of an emulated GPU so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EmulatedCalls {
    /// Buffers allocated.
    pub allocations: u64,
    /// Buffers freed.
    pub frees: u64,
    /// Kernels launched; matmuls do not count.
    pub launches: u64,
}

const ALIGNMENT: usize = 256;
/// Blocks run in sequence; several multiprocessors test the division of work.
const MULTIPROCESSORS: usize = 3;

/// Bytes with the strictest alignment that a kernel's structs have.
#[repr(C, align(128))]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Aligned([u8; 128]);

#[allow(unsafe_code)]
unsafe extern "C" {
    /// Runs a kernel; returns false if no kernel has this name (emulator.cc).
    fn emulated_launch(
        name: *const c_char,
        grid: *const u32,
        threads: u32,
        shared_bytes: u32,
        schedule_seed: u32,
        parameters: *const *mut c_void,
    ) -> bool;

    /// Writes a tensor map of three dimensions (emulator.cc).
    fn emulated_tensor_map(
        map: *mut c_void,
        elements: *const c_void,
        dimensions: *const u64,
        strides: *const u64,
        sides: *const u32,
    );
}

impl Emulator {
    pub(super) fn with_schedule(schedule_seed: u32) -> Self {
        Emulator { schedule_seed, ..Emulator::default() }
    }

    fn layout(bytes: usize) -> Option<Layout> {
        Layout::from_size_align(bytes.max(1), ALIGNMENT).ok()
    }

    fn error(&self, operation: &'static str, reason: impl Display) -> Error {
        Error::device(&self.name(), operation, reason)
    }
}

impl Device for Emulator {
    fn name(&self) -> String {
        "the emulated GPU".into()
    }

    fn most_shared_bytes(&self) -> usize {
        // The limit of Hopper.
        227 * 1024
    }

    fn multiprocessors(&self) -> usize {
        MULTIPROCESSORS
    }

    fn runs_hopper(&self) -> bool {
        true
    }

    fn tensor_map(&self, tensor: &BoxedTensor) -> Result<TensorMap> {
        let BoxedTensor { address, dimensions, strides, sides } = tensor;
        let mut map = TensorMap::zeroed();
        // SAFETY: the arrays have the lengths that the function reads, and the map has its size.
        #[allow(unsafe_code)]
        unsafe {
            emulated_tensor_map(
                (&raw mut map).cast(),
                *address as *const c_void,
                dimensions.as_ptr(),
                strides.as_ptr(),
                sides.as_ptr(),
            );
        }
        Ok(map)
    }

    fn memory_info(&self) -> Option<MemoryInfo> {
        None
    }

    fn emulated_calls(&self) -> Option<EmulatedCalls> {
        let count = |calls: &AtomicU64| calls.load(Ordering::Relaxed);
        let (allocations, frees) = (count(&self.allocations), count(&self.frees));
        Some(EmulatedCalls { allocations, frees, launches: count(&self.launches) })
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        self.allocations.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the layout's size is not 0.
        #[allow(unsafe_code)]
        let start = Self::layout(bytes).map(|layout| unsafe { alloc_zeroed(layout) });
        match start {
            Some(start) if !start.is_null() => Ok(start as u64),
            _ => Err(Error::no_room(&self.name(), bytes)),
        }
    }

    fn free(&self, address: u64, bytes: usize) {
        self.frees.fetch_add(1, Ordering::Relaxed);
        if let Some(layout) = Self::layout(bytes) {
            // SAFETY: `allocate` returned the address for a layout of as many bytes.
            #[allow(unsafe_code)]
            unsafe {
                dealloc(address as *mut u8, layout);
            }
        }
    }

    fn upload(&self, source: &[u8], to: u64) -> Result<()> {
        self.copy(source.as_ptr() as u64, to, source.len())
    }

    fn download(&self, from: u64, destination: &mut [u8]) -> Result<()> {
        self.copy(from, destination.as_mut_ptr() as u64, destination.len())
    }

    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()> {
        // SAFETY: both addresses come from views, or slices, of as many bytes.
        #[allow(unsafe_code)]
        unsafe {
            std::ptr::copy(from as *const u8, to as *mut u8, bytes);
        }
        Ok(())
    }

    fn zero(&self, at: u64, bytes: usize) -> Result<()> {
        // SAFETY: the address comes from a view of as many bytes.
        #[allow(unsafe_code)]
        unsafe {
            std::ptr::write_bytes(at as *mut u8, 0, bytes);
        }
        Ok(())
    }

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    fn launch(
        &self,
        kernel: &str,
        grid: [u32; 3],
        threads: u32,
        shared_bytes: u32,
        parameters: &[&[u8]],
    ) -> Result<()> {
        self.launches.fetch_add(1, Ordering::Relaxed);
        let name = CString::new(kernel).map_err(|_| self.error("launch", "a zero in a name"))?;
        let aligned = |bytes: &&[u8]| {
            let mut aligned = vec![Aligned::zeroed(); bytes.len().div_ceil(size_of::<Aligned>())];
            bytemuck::cast_slice_mut(&mut aligned)[..bytes.len()].copy_from_slice(bytes);
            aligned
        };
        let mut structures: Vec<Vec<Aligned>> = parameters.iter().map(aligned).collect();
        let pointers: Vec<*mut c_void> =
            structures.iter_mut().map(|structure| structure.as_mut_ptr().cast()).collect();
        // SAFETY: the operator passes the structs that the kernel of this name expects. Their
        // addresses come from views of lengths that the operator checked.
        #[allow(unsafe_code)]
        let found = unsafe {
            emulated_launch(
                name.as_ptr(),
                grid.as_ptr(),
                threads,
                shared_bytes,
                self.schedule_seed,
                pointers.as_ptr(),
            )
        };
        if found { Ok(()) } else { Err(self.error("launch", format!("no kernel {kernel}"))) }
    }

    fn matmul(&self, matmul: &Matmul, _algorithms: Algorithms) -> Result<()> {
        match (matmul.left.dtype, matmul.out.dtype) {
            (DType::F32, DType::F32) => multiply::<f32, f32>(matmul),
            (DType::F32, DType::BF16) => multiply::<f32, bf16>(matmul),
            (DType::BF16, DType::F32) => multiply::<bf16, f32>(matmul),
            (DType::BF16, DType::BF16) => multiply::<bf16, bf16>(matmul),
            types => return Err(self.error("matmul", format!("no matmul of {types:?}"))),
        }
        Ok(())
    }
}

fn multiply<T: Element, O: Element>(matmul: &Matmul) {
    let (rows, columns) = (matmul.out.rows, matmul.out.columns);
    // SAFETY: operators create operands from views of rows x columns elements. Only out
    // accesses its elements. An addend at the same address is not made a slice.
    #[allow(unsafe_code)]
    let (out, addend) = unsafe {
        let slice = |address: u64| std::slice::from_raw_parts(address as *const O, rows * columns);
        let out = std::slice::from_raw_parts_mut(matmul.out.address as *mut O, rows * columns);
        (out, matmul.addend.filter(|&addend| addend != matmul.out.address).map(slice))
    };
    let destination = match (matmul.addend, addend) {
        (None, _) => Destination::Overwrite,
        (Some(_), None) => Destination::Accumulate,
        (Some(_), Some(addend)) => Destination::AddTo(Matrix::new(addend, rows, columns)),
    };
    let out = MatrixMut::new(out, rows, columns).with(destination);
    matmul_parallel(out, matrix::<T>(&matmul.left), matrix::<T>(&matmul.right));
}

fn matrix<T: Element>(operand: &Operand) -> Matrix<'_, T> {
    let Operand { address, rows, columns, transposed, .. } = *operand;
    // SAFETY: as in `multiply`.
    #[allow(unsafe_code)]
    let elements = unsafe { std::slice::from_raw_parts(address as *const T, rows * columns) };
    if transposed {
        Matrix::new(elements, columns, rows).transposed()
    } else {
        Matrix::new(elements, rows, columns)
    }
}
