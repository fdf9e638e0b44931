//! The device of a measurement, and its timing.

use anyhow::Context as _;
use moh_kernels::Backend;
use moh_kernels::cases::Sizes;
use moh_kernels::open_device::{DeviceName, OnDevice, OpenDevice};

use crate::limits::MachineLimits;
use crate::timing::Times;

/// The device, and whether its results are reproducible.
#[derive(Debug, clap::Args)]
pub struct DeviceArguments {
    /// Device to measure: cpu, cuda or cuda:N
    #[arg(long, default_value_t)]
    device: DeviceName,
    /// Make a GPU's results bitwise reproducible, like `run.deterministic` in a recipe
    #[arg(long)]
    deterministic: bool,
}

/// A measurement that is generic over the device.
pub trait Measurement {
    type Output;

    /// Runs the measurement. Every [`Bench::time`] synchronises with the device.
    fn on<B: Backend + Clone>(self, bench: &Bench<B>) -> anyhow::Result<Self::Output>;
}

impl DeviceArguments {
    /// Runs the measurement on the device, and then measures the machine's limits. In this order, the limits' matrices
    /// and copies do not count as the measurement's memory.
    pub fn measure<M: Measurement>(
        &self,
        measurement: M,
    ) -> anyhow::Result<(M::Output, MachineLimits)> {
        let device = OpenDevice::open(self.device, self.deterministic)
            .with_context(|| format!("--device {}", self.device))?;
        device.run(DeviceMeasurement { device: self.device, measurement })
    }
}

struct DeviceMeasurement<M> {
    device: DeviceName,
    measurement: M,
}

impl<M: Measurement> OnDevice for DeviceMeasurement<M> {
    type Output = anyhow::Result<(M::Output, MachineLimits)>;

    fn run<B: Backend + Clone>(self, backend: B) -> Self::Output {
        let bench = match self.device {
            DeviceName::Cpu => Bench {
                backend,
                sizes: Sizes::SMALL,
                product: 1024,
                copied: 256 << 20,
                shortest: 0.0,
            },
            DeviceName::Cuda(_) => Bench {
                backend,
                sizes: Sizes::LLAMA_8B,
                product: 8192,
                copied: 4 << 30,
                // A thousand times the cost of a launch and a synchronisation.
                shortest: 1e-2,
            },
        };
        Ok((self.measurement.on(&bench)?, MachineLimits::measure(&bench)?))
    }
}

/// A device, and problem sizes that saturate it.
pub struct Bench<B> {
    pub backend: B,
    /// Shapes of the operators' cases.
    pub sizes: Sizes,
    /// Rows, inputs and outputs of the matmul that measures the device's limit.
    pub product: usize,
    /// Bytes of the copy that measures the device's bandwidth: more than its caches.
    pub copied: usize,
    /// Minimum seconds of a timing. Shorter work is repeated within a timing.
    pub shortest: f64,
}

impl<B: Backend> Bench<B> {
    /// Runs `work` once to warm up, then until both `fewest` timings and `seconds` are reached.
    pub fn repeat(
        &self,
        fewest: usize,
        seconds: f64,
        mut work: impl FnMut() -> moh_kernels::Result<()> + Send,
    ) -> anyhow::Result<Times> {
        // Runs on a thread of the operators, as a training step does.
        let times = self.backend.install(|| {
            work()?;
            self.backend.synchronize()?;
            let count = self.count(&mut work)?;
            let mut times = Times::default();
            while times.len() < fewest || times.total() < seconds {
                self.time(&mut times, count, &mut work)?;
            }
            Ok::<_, moh_kernels::Error>(times)
        })?;
        Ok(times)
    }

    /// Returns the number of repetitions of `work` that make a timing long enough. Unless any timing is long enough,
    /// measures `work` once.
    pub fn count(
        &self,
        work: impl FnMut() -> moh_kernels::Result<()>,
    ) -> moh_kernels::Result<usize> {
        if self.shortest == 0.0 {
            return Ok(1);
        }
        let mut once = Times::default();
        self.time(&mut once, 1, work)?;
        Ok((self.shortest / once.best().max(1e-9)).ceil().max(1.0) as usize)
    }

    /// Times `count` repetitions of `work`, until the device has completed them.
    pub fn time(
        &self,
        times: &mut Times,
        count: usize,
        mut work: impl FnMut() -> moh_kernels::Result<()>,
    ) -> moh_kernels::Result<()> {
        times.time(count, || {
            for _ in 0..count {
                work()?;
            }
            self.backend.synchronize()
        })
    }
}

#[cfg(test)]
mod tests {
    use moh_kernels::Cpu;

    use super::*;

    #[test]
    fn work_that_is_shorter_than_a_timing_is_repeated_within_it() {
        let count = |shortest| {
            let bench =
                Bench { backend: Cpu, sizes: Sizes::SMALL, product: 1, copied: 1, shortest };
            bench.count(|| Ok(())).unwrap()
        };
        assert_eq!(count(0.0), 1);
        // The work takes less than ten seconds even on a machine that stalls.
        assert!(count(1e3) >= 100);
    }
}
