//! The machine's own limits, measured: what matrix products and copies reach over all threads,
//! and the memory of this process.

use half::bf16;
use moh_kernels::{Backend, Cpu, Element};
use rayon::prelude::*;
use serde_json::{Value, json};

use crate::timing::Times;

/// Rows, inputs and outputs of the matrix product that is measured.
const PRODUCT: usize = 1024;
/// Bytes of a copy's source: more than caches hold.
const COPIED: usize = 256 << 20;
/// Bytes that a thread copies at a time.
const PIECE: usize = 1 << 20;
/// Seconds that each limit is measured for, after one run to warm up.
const SECONDS: f64 = 0.3;

/// What the machine reaches at best.
#[derive(Debug, Clone, Copy)]
pub struct Machine {
    /// Threads that operators run on.
    pub threads: usize,
    /// Operations a second of a product of f32 matrices, 1024 x 1024 x 1024.
    pub f32_matmul: f64,
    /// The same of bf16 matrices.
    pub bf16_matmul: f64,
    /// Bytes read and written a second by a copy that caches do not hold.
    pub copy: f64,
}

impl Machine {
    /// Measures it, which takes a second or two.
    pub fn measure() -> anyhow::Result<Self> {
        Ok(Machine {
            threads: rayon::current_num_threads(),
            f32_matmul: matmul::<f32>()?,
            bf16_matmul: matmul::<bf16>()?,
            copy: copy()?,
        })
    }

    /// One line of a table.
    pub fn line(&self) -> String {
        format!(
            "{} threads, f32 matmul {}, bf16 matmul {}, copy {:.1} GB/s",
            self.threads,
            gflops(self.f32_matmul),
            gflops(self.bf16_matmul),
            self.copy / 1e9
        )
    }

    /// The fields of `machine`.
    pub fn json(&self) -> Value {
        json!({
            "threads": self.threads,
            "f32_matmul_flops_per_second": self.f32_matmul,
            "bf16_matmul_flops_per_second": self.bf16_matmul,
            "copy_bytes_per_second": self.copy,
        })
    }
}

/// Operations a second, to be read.
pub fn gflops(per_second: f64) -> String {
    format!("{:.1} GFLOP/s", per_second / 1e9)
}

fn matmul<T: Element>() -> anyhow::Result<f64> {
    let number = |index: usize| T::from_f32((index % 251) as f32 / 251.0 - 0.5);
    let x: Vec<T> = (0..PRODUCT * PRODUCT).map(number).collect();
    let (weight, mut y) = (x.clone(), x.clone());
    let times = Cpu.scope(|| {
        repeat(|| Cpu.linear_forward(PRODUCT, &x, &weight, None, &mut y).map_err(Into::into))
    })?;
    Ok(times.rates(2.0 * (PRODUCT as f64).powi(3)).best)
}

fn copy() -> anyhow::Result<f64> {
    let mut source = Cpu.allocate::<u8>(COPIED)?;
    let mut destination = Cpu.allocate::<u8>(COPIED)?;
    source.par_chunks_mut(PIECE).for_each(|piece| piece.fill(1));
    let times = repeat(|| {
        let pieces = destination.par_chunks_mut(PIECE).zip(source.par_chunks(PIECE));
        pieces.for_each(|(to, from)| to.copy_from_slice(from));
        Ok(())
    })?;
    Ok(times.rates(2.0 * COPIED as f64).best)
}

fn repeat(mut run: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<Times> {
    run()?;
    let mut times = Times::default();
    while times.total() < SECONDS {
        times.time(&mut run)?;
    }
    Ok(times)
}

/// Resident memory of this process in bytes, now and at most so far, where the system tells.
pub fn resident() -> Option<(u64, u64)> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        let kilobytes: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
        Some(kilobytes * 1024)
    };
    Some((field("VmRSS:")?, field("VmHWM:")?))
}
