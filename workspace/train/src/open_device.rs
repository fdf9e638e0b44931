//! Opens a recipe's device and connects this process to the other ranks of the run.

use std::env::consts::ARCH;
use std::path::Path;

use moh_comm::{Buffers, Launch, World, WorldOptions};
use moh_kernels::Backend;
use moh_kernels::open_device::{OnDevice, OpenDevice};
use moh_recipe::{DeviceKind, Recipe};
use moh_step::Ranks;

use crate::Result;

/// Opens the device of `recipe`. On a machine with several GPUs, opens the GPU of this process's local rank.
///
/// # Errors
/// Fails if this build or this machine has no such device. The message names the recipe `path`.
pub fn open_device(recipe: &Recipe, path: &Path, local_rank: usize) -> Result<OpenDevice> {
    match recipe.run.device {
        DeviceKind::Cpu => Ok(OpenDevice::Cpu),
        DeviceKind::Cuda => {
            let opened = OpenDevice::open_local(local_rank, recipe.run.deterministic);
            Ok(opened.map_err(|error| {
                let reason = format!("run.device = \"cuda\": {error}, or use --set run.device=cpu");
                moh_files::unusable(path, reason)
            })?)
        }
    }
}

/// Returns the memory of the buffers that ranks exchange.
fn buffers(device: &OpenDevice) -> Result<Buffers> {
    match device {
        OpenDevice::Cpu => Ok(Buffers::Host),
        #[cfg(feature = "nccl")]
        OpenDevice::Cuda(cuda) => Ok(Buffers::Gpu(cuda.clone())),
        #[cfg(all(feature = "cuda", not(feature = "nccl")))]
        OpenDevice::Cuda(_) => Err(crate::Error::Invalid(
            "several processes were started, but this program was built without NCCL: build it with \
             --features nccl, or start one process"
                .to_owned(),
        )),
    }
}

/// Connects to the other processes of this job. All processes must run this program with these recipes: this function
/// sets the fingerprint of `options` to check this.
///
/// # Errors
/// Fails if a rank does not connect or was started differently, or if this build cannot connect the
/// ranks.
pub fn connect(
    launch: &Launch,
    device: &OpenDevice,
    recipes: &[&Recipe],
    options: WorldOptions,
) -> Result<World> {
    if launch.size == 1 {
        return Ok(World::single());
    }
    let (buffers, fingerprint) = (buffers(device)?, fingerprint(recipes)?);
    Ok(World::connect(launch, buffers, WorldOptions { fingerprint, ..options })?)
}

/// Returns the text of the first rank that has a text, on all ranks of `world`, or an empty text. All ranks call this
/// together.
pub fn share_text(device: &OpenDevice, world: &World, text: Option<String>) -> Result<String> {
    struct Share<'a>(&'a World, Option<Vec<u8>>);

    impl OnDevice for Share<'_> {
        type Output = Result<Option<Vec<u8>>>;

        fn run<B: Backend + Clone>(self, backend: B) -> Self::Output {
            Ok(Ranks::new(backend, self.0.group().clone())?.first_that_has(self.1)?)
        }
    }

    let shared = device.clone().run(Share(world, text.map(String::into_bytes)))?;
    // The text was UTF-8 on the rank that sent it.
    Ok(String::from_utf8_lossy(&shared.unwrap_or_default()).into_owned())
}

/// Returns the properties that all ranks must share: the program, byte for byte, and the recipes. Two builds
/// of one version, or two processor architectures, may give different results.
fn fingerprint(recipes: &[&Recipe]) -> Result<String> {
    let program = std::env::current_exe().and_then(|path| {
        let mut hasher = blake3::Hasher::new();
        hasher.update_mmap_rayon(path)?;
        Ok(hasher.finalize().to_hex())
    });
    let program = program.map_err(moh_files::io(Path::new("the program's own file")))?;
    let version = env!("CARGO_PKG_VERSION");
    let recipes: Vec<String> =
        recipes.iter().map(|recipe| recipe.to_toml()).collect::<Result<_, _>>()?;
    Ok(format!("program {version} {ARCH} {}\n{}", &program[..16], recipes.join("\n")))
}
