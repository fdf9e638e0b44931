//! The machine's measured limits: the rates of matmuls and copies on the device, and its memory in use.

use half::bf16;
use moh_kernels::linear::LinearForward;
use moh_kernels::open_device::ResidentMemory;
use moh_kernels::{Backend, Element};
use serde_json::{Value, json};

use crate::device::Bench;

/// Seconds of measurement per limit, after a run to warm up.
const SECONDS: f64 = 0.3;

#[derive(Debug, Clone)]
pub struct MachineLimits {
    pub device: String,
    /// Threads of the CPU's operators.
    pub threads: usize,
    /// FLOP/s of an f32 matmul.
    pub f32_matmul: f64,
    /// FLOP/s of a bf16 matmul.
    pub bf16_matmul: f64,
    /// Bytes read and written per second by a copy larger than the caches.
    pub copy: f64,
}

impl MachineLimits {
    /// Measures the limits, in a second or two.
    pub fn measure<B: Backend>(bench: &Bench<B>) -> anyhow::Result<Self> {
        Ok(MachineLimits {
            device: bench.backend.name(),
            threads: rayon::current_num_threads(),
            f32_matmul: matmul::<B, f32>(bench)?,
            bf16_matmul: matmul::<B, bf16>(bench)?,
            copy: copy(bench)?,
        })
    }

    pub fn line(&self) -> String {
        format!(
            "{}, {} threads, f32 matmul {}, bf16 matmul {}, copy {:.1} GB/s",
            self.device,
            self.threads,
            gflops(self.f32_matmul),
            gflops(self.bf16_matmul),
            self.copy / 1e9
        )
    }

    /// Returns the JSON fields of `machine`.
    pub fn json(&self) -> Value {
        json!({
            "device": self.device,
            "threads": self.threads,
            "f32_matmul_flops_per_second": self.f32_matmul,
            "bf16_matmul_flops_per_second": self.bf16_matmul,
            "copy_bytes_per_second": self.copy,
        })
    }
}

pub fn gflops(per_second: f64) -> String {
    if per_second < 1e13 {
        format!("{:.1} GFLOP/s", per_second / 1e9)
    } else {
        format!("{:.1} TFLOP/s", per_second / 1e12)
    }
}

/// Returns the FLOP/s of a matmul of the device's size.
fn matmul<B: Backend, T: Element>(bench: &Bench<B>) -> anyhow::Result<f64> {
    let Bench { backend, product, .. } = bench;
    let number = |index: usize| T::from_f32((index % 251) as f32 / 251.0 - 0.5);
    let values: Vec<T> = (0..product * product).map(number).collect();
    let count = values.len();
    let [mut x, mut weight, mut y] =
        [backend.allocate(count)?, backend.allocate(count)?, backend.allocate(count)?];
    for buffer in [&mut x, &mut weight] {
        backend.upload(&values, B::view_mut(buffer, 0..count))?;
    }
    let times = bench.repeat(1, SECONDS, || {
        let (x, weight) = (B::view(&x, 0..count), B::view(&weight, 0..count));
        let y = B::view_mut(&mut y, 0..count);
        backend.linear_forward(LinearForward::new(*product, x, weight, y))
    })?;
    Ok(times.rates(2.0 * (*product as f64).powi(3)).best)
}

/// Returns the bytes read and written per second by a copy.
fn copy<B: Backend>(bench: &Bench<B>) -> anyhow::Result<f64> {
    let Bench { backend, copied, .. } = bench;
    let mut source = backend.allocate::<u8>(*copied)?;
    let mut destination = backend.allocate::<u8>(*copied)?;
    // Untouched pages of the host would all map to the same zero page.
    backend.upload(&vec![1; *copied], B::view_mut(&mut source, 0..*copied))?;
    let times = bench.repeat(1, SECONDS, || {
        backend.copy(B::view(&source, 0..*copied), B::view_mut(&mut destination, 0..*copied))
    })?;
    Ok(times.rates(2.0 * *copied as f64).best)
}

/// Returns the memory in use in bytes, now and at its peak: the device's, or else this process's if the system reports
/// it.
pub fn memory<B: Backend>(backend: &B) -> Option<(u64, u64)> {
    match backend.memory_info() {
        // Training allocates all memory before the first step and frees it after the last.
        Some(memory) => Some((memory.used, memory.used)),
        None => ResidentMemory::read().map(|memory| (memory.now, memory.peak)),
    }
}
