//! The device that a recipe names, and the meeting with the other ranks of its run.

use std::env::consts::ARCH;
use std::path::Path;

use moh_comm::{Buffers, Launch, Options, World};
use moh_device::OpenDevice;

use crate::Error;
use crate::recipe::{Device, Recipe};

/// Opens the device that `recipe` names: of several GPUs that of this process's number on its machine.
///
/// # Errors
/// When this build or this machine has none; `path` is what the message calls the recipe.
pub fn open_device(recipe: &Recipe, path: &Path, local_rank: usize) -> Result<OpenDevice, Error> {
    match recipe.run.device {
        Device::Cpu => Ok(OpenDevice::Cpu),
        Device::Cuda => OpenDevice::open_local(local_rank, recipe.run.deterministic)
            .map_err(|source| Error::Device { path: path.to_owned(), source }),
    }
}

/// Where the buffers lie that ranks exchange.
fn buffers(device: &OpenDevice) -> Result<Buffers, Error> {
    match device {
        OpenDevice::Cpu => Ok(Buffers::Host),
        #[cfg(feature = "nccl")]
        OpenDevice::Cuda(cuda) => Ok(Buffers::Gpu(cuda.clone())),
        #[cfg(all(feature = "cuda", not(feature = "nccl")))]
        OpenDevice::Cuda(_) => Err(Error::NoNccl),
    }
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
    let (buffers, fingerprint) = (buffers(device)?, fingerprint(recipe)?);
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
