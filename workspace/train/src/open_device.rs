//! The device that a recipe names, and the meeting with the other ranks of its run.

use std::env::consts::ARCH;
use std::path::Path;

use moh_comm::{Buffers, Launch, Options, World};

use crate::Error;
use crate::recipe::{Device, Recipe};

/// What computes, ready to.
#[derive(Debug, Clone)]
pub enum OpenDevice {
    /// This machine's processors.
    Cpu,
    /// A GPU.
    #[cfg(feature = "cuda")]
    Cuda(moh_kernels::Cuda),
}

impl OpenDevice {
    /// The device that `recipe` names: of several GPUs that of this process's number on its machine.
    ///
    /// # Errors
    /// When this build or this machine has none; `path` is what the message calls the recipe.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "GPUs alone are numbered"))]
    pub fn open(recipe: &Recipe, path: &Path, local_rank: usize) -> Result<Self, Error> {
        match recipe.run.device {
            Device::Cpu => Ok(OpenDevice::Cpu),
            #[cfg(feature = "cuda")]
            Device::Cuda => moh_kernels::Cuda::count()
                .and_then(|count| moh_kernels::Cuda::new(ordinal(local_rank, count)))
                .map(|cuda| OpenDevice::Cuda(cuda.with_deterministic(recipe.run.deterministic)))
                .map_err(|source| Error::Device { path: path.to_owned(), source }),
            #[cfg(not(feature = "cuda"))]
            Device::Cuda => Err(Error::NoDevice { path: path.to_owned() }),
        }
    }

    /// Where the buffers lie that ranks exchange.
    fn buffers(&self) -> Result<Buffers, Error> {
        match self {
            OpenDevice::Cpu => Ok(Buffers::Host),
            #[cfg(feature = "nccl")]
            OpenDevice::Cuda(cuda) => Ok(Buffers::Gpu(cuda.clone())),
            #[cfg(all(feature = "cuda", not(feature = "nccl")))]
            OpenDevice::Cuda(_) => Err(Error::NoNccl),
        }
    }
}

/// The GPU of a process, by its number on its machine. Slurm and others show each process the one that
/// is its own: that one has number 0.
#[cfg(feature = "cuda")]
fn ordinal(local_rank: usize, gpus: usize) -> usize {
    if gpus == 1 { 0 } else { local_rank }
}

/// Meets the other processes of this run, all of which must run this program with this recipe: the
/// fingerprint of `options` is made here.
///
/// # Errors
/// Ranks that do not arrive or were started differently, and builds without the means to connect
/// them.
pub fn connect(
    launch: &Launch,
    device: &OpenDevice,
    recipe: &Recipe,
    options: Options,
) -> Result<World, Error> {
    if launch.size == 1 {
        return Ok(World::single());
    }
    let (buffers, fingerprint) = (device.buffers()?, fingerprint(recipe)?);
    Ok(World::connect(launch, buffers, Options { fingerprint, ..options })?)
}

/// What must be the same on all ranks: the program, byte for byte, and the recipe. Two builds of one
/// version may differ in their results, and so may processors of two architectures.
fn fingerprint(recipe: &Recipe) -> Result<String, Error> {
    let program = std::env::current_exe().and_then(|path| {
        let mut hasher = blake3::Hasher::new();
        hasher.update_mmap_rayon(path)?;
        Ok(hasher.finalize().to_hex())
    });
    let program = program.map_err(Error::io(Path::new("the program's own file")))?;
    let version = env!("CARGO_PKG_VERSION");
    Ok(format!("program {version} {ARCH} {}\n{}", &program[..16], recipe.to_toml()?))
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::ordinal;

    #[test]
    fn a_process_that_sees_one_gpu_takes_it() {
        assert_eq!([0, 3].map(|rank| ordinal(rank, 1)), [0, 0]);
        assert_eq!([0, 3].map(|rank| ordinal(rank, 8)), [0, 3]);
    }
}
