//! The device that a measurement runs on, and how its times are taken.

use moh_kernels::cases::Sizes;
use moh_kernels::{Backend, Cpu};

use crate::timing::Times;

/// Where operators run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Device {
    /// This machine's processors
    Cpu,
    /// The first NVIDIA GPU
    Cuda,
}

/// The device, and how exact its results must be.
#[derive(Debug, clap::Args)]
pub struct DeviceArguments {
    /// Where to run
    #[arg(long, value_enum, default_value = "cpu")]
    device: Device,
    /// Have a GPU give the same bits in every run, as `run.deterministic` of a recipe does
    #[arg(long)]
    deterministic: bool,
}

/// Something to measure on any device.
pub trait Measurement {
    /// What it shows.
    type Found;

    /// Measures it; every [`Bench::time`] waits for the device.
    fn on<B: Backend + Clone>(self, bench: &Bench<B>) -> anyhow::Result<Self::Found>;
}

impl DeviceArguments {
    /// Measures on the device.
    pub fn measure<M: Measurement>(&self, measurement: M) -> anyhow::Result<M::Found> {
        match self.device {
            Device::Cpu => measurement.on(&Bench {
                backend: Cpu,
                sizes: Sizes::SMALL,
                product: 1024,
                copied: 256 << 20,
                shortest: 0.0,
            }),
            #[cfg(feature = "cuda")]
            Device::Cuda => measurement.on(&Bench {
                backend: moh_kernels::Cuda::new(0)?.with_deterministic(self.deterministic),
                sizes: Sizes::LLAMA_8B,
                product: 8192,
                copied: 4 << 30,
                // A thousand times what starting and waiting takes.
                shortest: 1e-2,
            }),
            #[cfg(not(feature = "cuda"))]
            Device::Cuda => Err(moh_cli::exit::Usage(
                "--device cuda: this program was built without GPUs: build it with --features cuda"
                    .into(),
            )
            .into()),
        }
    }
}

/// A device, and sizes that fill it.
pub struct Bench<B> {
    pub backend: B,
    /// Shapes of the operators' cases.
    pub sizes: Sizes,
    /// Rows, inputs and outputs of the matrix product that counts as the device's limit.
    pub product: usize,
    /// Bytes of the copy that does: more than caches hold.
    pub copied: usize,
    /// Seconds that one timing lasts at least: shorter work is done several times.
    pub shortest: f64,
}

impl<B: Backend> Bench<B> {
    /// Runs `work` once to warm up, then until both `fewest` timings and `seconds` have passed.
    pub fn repeat(
        &self,
        fewest: usize,
        seconds: f64,
        mut work: impl FnMut() -> moh_kernels::Result<()> + Send,
    ) -> anyhow::Result<Times> {
        // As in a training step: on one of the threads that share the work.
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

    /// How many times `work` makes a timing long enough; it is done once to find out, unless any
    /// timing is.
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

    /// Times `work`, done `count` times, until the device is done with it.
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
