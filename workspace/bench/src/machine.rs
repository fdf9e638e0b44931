//! `moh-bench machine`: the processor, and the limits of its products and of its memory.
//!
//! A process multiplies bf16 matrices in one way, which [`Bf16Path`] chooses once. So each way that
//! the processor supports is measured by a process of its own.

use std::hint::black_box;
use std::process::Command;

use anyhow::{Context as _, bail};
use half::bf16;
use indicatif::HumanBytes;
use moh_kernels::cases::Sizes;
use moh_kernels::{Bf16Path, Cpu, Memory as _};
use rayon::prelude::*;
use serde_json::{Value, json};

use crate::device::Bench;
use crate::limits::{self, MachineLimits, gflops};
use crate::report;
use crate::timing::Rates;
use moh_program::arguments::{between, not_negative};
use moh_program::counted;
use moh_program::processor::Processor;

/// Minimum bytes that are read or copied, if the caches are small or not known.
const MIN_BYTES: u64 = 256 << 20;
/// Maximum bytes.
const MAX_BYTES: u64 = 2 << 30;
/// Words that one task reads; as many bytes as one task of the copy.
const PART: usize = 256 * 1024 / size_of::<u64>();

#[derive(clap::Args)]
pub struct MachineArguments {
    /// Rows, columns and terms of the products
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = size())]
    size: usize,
    /// Minimum seconds of each measurement
    #[arg(long, default_value_t = 1.0, value_parser = not_negative)]
    seconds: f64,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Measure the bf16 product of this process alone, for the process that started it
    #[arg(long, hide = true)]
    only_bf16: bool,
}

fn size() -> impl Fn(&str) -> Result<usize, String> + Clone + Send + Sync + 'static {
    between(1, 1 << 14)
}

/// What a rate is the limit of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Limit {
    /// FLOP/s of an f32 product.
    F32,
    /// FLOP/s of a bf16 product.
    Bf16(Bf16Path),
    /// Bytes per second that are read.
    Read,
    /// Bytes per second that a copy reads and writes.
    Copy,
}

/// The rates of a limit on so many threads.
#[derive(Debug, Clone, Copy)]
struct LimitRow {
    limit: Limit,
    threads: usize,
    rates: Rates,
}

/// The processor and its limits.
struct MachineReport {
    processor: Processor,
    /// Programs that ran or waited to, before the measurements.
    load: Option<f64>,
    bench: Bench<Cpu>,
    rows: Vec<LimitRow>,
}

/// Measures the machine and prints it.
pub fn run(arguments: &MachineArguments) -> anyhow::Result<()> {
    let processor = Processor::read();
    let bench = Bench {
        backend: Cpu::open()?,
        sizes: Sizes::SMALL,
        product: arguments.size,
        copied: bytes(processor.last_level_cache()),
        shortest: 0.0,
    };
    let product = Limit::Bf16(Bf16Path::in_use());
    if arguments.only_bf16 {
        return print_rates(&on_threads(product, || {
            limits::matmul::<_, bf16>(&bench, arguments.seconds)
        })?);
    }
    let load = std::fs::read_to_string("/proc/loadavg").ok().and_then(|averages| load(&averages));
    let rows = measure(&bench, arguments)?;
    let found = MachineReport { processor, load, bench, rows };
    report::print(arguments.json, &found.json(), &found.text())
}

/// Bytes to read or copy, of which the caches hold a part only.
fn bytes(last_level_cache: Option<u64>) -> usize {
    let twice = last_level_cache.unwrap_or(0).saturating_mul(2);
    twice.clamp(MIN_BYTES, MAX_BYTES) as usize
}

/// The first of Linux's load averages: that of the last minute.
fn load(averages: &str) -> Option<f64> {
    let first: f64 = averages.split_whitespace().next()?.parse().ok()?;
    (first.is_finite() && first >= 0.0).then_some(first)
}

fn measure(bench: &Bench<Cpu>, arguments: &MachineArguments) -> anyhow::Result<Vec<LimitRow>> {
    let seconds = arguments.seconds;
    let mut rows = on_threads(Limit::F32, || limits::matmul::<_, f32>(bench, seconds))?;
    for path in Bf16Path::supported() {
        rows.extend(in_another_process(path, arguments)?);
    }
    rows.extend(on_threads(Limit::Read, || read(bench, seconds))?);
    rows.extend(on_threads(Limit::Copy, || limits::copy(bench, seconds))?);
    Ok(rows)
}

/// Measures on one thread, and on all of the operators' threads if they are more.
fn on_threads(
    limit: Limit,
    measure: impl Fn() -> anyhow::Result<Rates> + Send + Sync,
) -> anyhow::Result<Vec<LimitRow>> {
    let mut counts = vec![1, rayon::current_num_threads()];
    counts.dedup();
    let on = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
        Ok(LimitRow { limit, threads, rates: pool.install(&measure)? })
    };
    counts.into_iter().map(on).collect()
}

/// Bytes of the words that are read per second.
fn read(bench: &Bench<Cpu>, seconds: f64) -> anyhow::Result<Rates> {
    let count = bench.copied / size_of::<u64>();
    // Written by the threads that read it, so that each memory node of the machine has a part.
    let words: Vec<u64> = (0..count).into_par_iter().map(|index| index as u64).collect();
    let sum = |part: &[u64]| part.iter().fold(0, |sum: u64, &word| sum.wrapping_add(word));
    let times = bench.repeat(1, seconds, || {
        black_box(words.par_chunks(PART).map(sum).reduce(|| 0, u64::wrapping_add));
        Ok(())
    })?;
    Ok(times.rates(bench.copied as f64))
}

/// Prints the rates for [`in_another_process`].
fn print_rates(rows: &[LimitRow]) -> anyhow::Result<()> {
    let rates: Vec<_> =
        rows.iter().map(|row| (row.threads, row.rates.median, row.rates.best)).collect();
    report::print(true, &json!(rates), "")
}

/// Measures a bf16 product by this program, started again.
fn in_another_process(
    path: Bf16Path,
    arguments: &MachineArguments,
) -> anyhow::Result<Vec<LimitRow>> {
    let program = std::env::current_exe().context("the path of this program")?;
    let output = Command::new(program)
        .args(["machine", "--only-bf16", "--size", &arguments.size.to_string()])
        .args(["--seconds", &arguments.seconds.to_string()])
        .env(Bf16Path::VARIABLE, path.to_string())
        .output()
        .context("this program cannot be started again")?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        bail!(
            "{} = {path}: this program ended with {}: {}",
            Bf16Path::VARIABLE,
            output.status,
            error.trim()
        );
    }
    let rates: Vec<(usize, f64, f64)> =
        serde_json::from_slice(&output.stdout).with_context(|| {
            format!("the output of this program with {} = {path}", Bf16Path::VARIABLE)
        })?;
    let row = |(threads, median, best)| LimitRow {
        limit: Limit::Bf16(path),
        threads,
        rates: Rates { median, best },
    };
    Ok(rates.into_iter().map(row).collect())
}

impl Limit {
    fn name(self) -> String {
        match self {
            Limit::F32 => "f32 product".to_owned(),
            Limit::Bf16(path) if path == Bf16Path::in_use() => {
                format!("bf16 product, {path}, in use")
            }
            Limit::Bf16(path) => format!("bf16 product, {path}"),
            Limit::Read => "memory, read".to_owned(),
            Limit::Copy => "memory, copy".to_owned(),
        }
    }

    fn rate(self, per_second: f64) -> String {
        match self {
            Limit::F32 | Limit::Bf16(_) => gflops(per_second),
            Limit::Read | Limit::Copy => format!("{:.1} GB/s   ", per_second / 1e9),
        }
    }

    /// The JSON fields that tell what the limit is.
    fn json(self) -> (&'static str, Option<String>, &'static str) {
        match self {
            Limit::F32 => ("f32_product", None, "operations"),
            Limit::Bf16(path) => ("bf16_product", Some(path.to_string()), "operations"),
            Limit::Read => ("read", None, "bytes"),
            Limit::Copy => ("copy", None, "bytes"),
        }
    }
}

impl LimitRow {
    fn json(&self) -> Value {
        let (limit, path, unit) = self.limit.json();
        json!({
            "limit": limit,
            "path": path,
            "threads": self.threads,
            "unit": unit,
            "per_second": self.rates.json(),
        })
    }

    fn cells(&self) -> [String; 4] {
        let rate = |per_second| self.limit.rate(per_second);
        let LimitRow { limit, threads, rates } = self;
        [limit.name(), threads.to_string(), rate(rates.median), rate(rates.best)]
    }
}

impl MachineReport {
    /// The best rate on all threads.
    fn best(&self, limit: Limit) -> f64 {
        // The row of all threads follows that of one.
        let row = self.rows.iter().rev().find(|row| row.limit == limit);
        row.map_or(f64::NAN, |row| row.rates.best)
    }

    fn machine(&self) -> MachineLimits {
        MachineLimits {
            device: self.bench.backend.name(),
            threads: rayon::current_num_threads(),
            f32_matmul: self.best(Limit::F32),
            bf16_matmul: self.best(Limit::Bf16(Bf16Path::in_use())),
            copy: self.best(Limit::Copy),
        }
    }

    /// The line that names the machine beside a figure.
    fn line(&self) -> String {
        let MachineLimits { threads, f32_matmul, bf16_matmul, copy, .. } = self.machine();
        format!(
            "{}, {}: f32 {:.0}, bf16 {:.0} GFLOP/s, copy {:.0} GB/s",
            self.processor.label(),
            counted(threads as u64, "thread"),
            f32_matmul / 1e9,
            bf16_matmul / 1e9,
            copy / 1e9
        )
    }

    fn json(&self) -> Value {
        json!({
            "machine": self.machine().json(),
            "processor": self.processor.json(),
            "load_average": self.load,
            "bf16_path": Bf16Path::in_use().to_string(),
            "product": {"rows": self.bench.product, "columns": self.bench.product, "terms": self.bench.product},
            "memory_bytes": self.bench.copied,
            "limits": self.rows.iter().map(LimitRow::json).collect::<Vec<_>>(),
            "line": self.line(),
        })
    }

    fn text(&self) -> String {
        let rows: Vec<_> = self.rows.iter().map(LimitRow::cells).collect();
        let n = self.bench.product;
        let load = self.load.map(|load| format!("; load before {load:.1}")).unwrap_or_default();
        format!(
            "{}\n{}\nproducts of {n} x {n} x {n}, memory of {}{load}\n\n{}\n{}",
            self.processor.label(),
            self.processor.description(rayon::current_num_threads()),
            HumanBytes(self.bench.copied as u64),
            report::table(["limit", "threads", "median", "best"], &rows),
            self.line()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_that_is_read_is_larger_than_the_caches_and_bounded() {
        assert_eq!(bytes(None), 256 << 20);
        assert_eq!(bytes(Some(32 << 20)), 256 << 20);
        assert_eq!(bytes(Some(384 << 20)), 768 << 20);
        assert_eq!(bytes(Some(u64::MAX)), 2 << 30);
    }

    #[test]
    fn a_load_is_a_number_that_is_not_negative() {
        assert_eq!(load("6.45 7.07 7.26 3/312 17346\n"), Some(6.45));
        for text in ["", "\n", "-1 0 0", "nan 0 0", "inf", "1e999 0", "6,45", "\u{0}6.45", "load 1"]
        {
            assert_eq!(load(text), None, "{text:?}");
        }
    }
}
