//! Compiles the CUDA kernels: with nvcc for the feature `cuda`, for the CPU with the C++ compiler
//! for the feature `cuda-emulator`. Declares their parameters in Rust.

mod parameters;
mod ptxas;

use std::path::{Path, PathBuf};
use std::process::Command;

/// The unit that includes all kernels.
const KERNELS: &str = "src/operators/kernels.cu";
/// The unit for the CPU: all kernels, with the functions that launch them.
const EMULATOR: &str = "src/device/cuda/emulator/emulator.cc";
/// The architectures of the kernels unless MOH_CUDA_ARCHITECTURES is set: Ampere, as machine code
/// and as PTX for later GPUs, and Hopper.
const ARCHITECTURES: &str = "80,90a";
/// The architecture for which the kernels with Hopper's instructions have a body; `cfg(hopper)` is
/// set if the binary contains them.
const HOPPER: &str = "90a";

fn main() {
    println!("cargo::rustc-check-cfg=cfg(gpu)");
    println!("cargo::rustc-check-cfg=cfg(hopper)");
    println!("cargo::rerun-if-changed=build");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let has = |feature: &str| std::env::var_os(format!("CARGO_FEATURE_{feature}")).is_some();
    let (gpu, emulator) = (has("CUDA"), has("CUDA_EMULATOR"));
    if gpu || emulator {
        println!("cargo::rustc-cfg=gpu");
        rerun_with_the_compilers();
        declare_parameters(&out.join("parameters.rs"));
    }
    if gpu {
        compile_for_gpus(&out.join("kernels.fatbin"));
    }
    if emulator {
        compile_for_the_cpu(&out);
    }
}

/// Makes Cargo rerun this script when the kernels' sources or the variables that choose their compilers change. A
/// build without kernels does not depend on them: with another `PATH`, such as pip's, nothing is compiled again.
fn rerun_with_the_compilers() {
    println!("cargo::rerun-if-changed=src");
    for variable in
        ["CUDA_HOME", "CUDA_PATH", "MOH_CUDA_ARCHITECTURES", "MOH_CUDA_RESOURCES", "CXX", "PATH"]
    {
        println!("cargo::rerun-if-env-changed={variable}");
    }
}

fn declare_parameters(out: &Path) {
    let mut structs = parameters::Structs::default();
    for source in cuda_sources(Path::new("src")) {
        let text = std::fs::read_to_string(&source).expect("cargo sets the directory");
        structs.read(&text).unwrap_or_else(|fault| panic!("{}: {fault}", source.display()));
    }
    std::fs::write(out, structs.text()).expect("OUT_DIR is writable");
}

fn cuda_sources(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("cargo sets the directory");
    let mut paths: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    let is_source =
        |path: &PathBuf| path.extension().is_some_and(|end| end == "cu" || end == "cuh");
    let sources = |path: PathBuf| if path.is_dir() { cuda_sources(&path) } else { vec![path] };
    paths.into_iter().flat_map(sources).filter(is_source).collect()
}

/// Runs a command and returns its standard error; if it fails, so does the build.
fn run(command: &mut Command, advice: &str) -> String {
    match command.output() {
        Ok(output) => {
            let report = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{command:?} failed: {}\n{report}", output.status);
            report
        }
        Err(error) => panic!("{command:?} cannot be started: {error}; {advice}"),
    }
}

fn compile_for_gpus(out: &Path) {
    let root = ["CUDA_HOME", "CUDA_PATH"].iter().find_map(std::env::var_os).map(PathBuf::from);
    let nvcc = root.as_ref().map_or("nvcc".into(), |root| root.join("bin/nvcc"));
    let architectures =
        std::env::var("MOH_CUDA_ARCHITECTURES").unwrap_or_else(|_| ARCHITECTURES.into());
    let mut command = Command::new(nvcc);
    command.args(["-O3", "-std=c++17", "-Xptxas", "-v", "-fatbin", "-o"]).arg(out).arg(KERNELS);
    if let Some(root) = root {
        command.arg("-I").arg(root.join("include/cccl"));
    }
    if architectures.split(',').any(|architecture| architecture == HOPPER) {
        println!("cargo::rustc-cfg=hopper");
    }
    for architecture in architectures.split(',') {
        let real = format!("arch=compute_{architecture},code=sm_{architecture}");
        command.arg(format!("-gencode={real}"));
        // Code of an architecture with a letter runs only on that architecture. PTX of other architectures also
        // runs on later GPUs, after their driver has compiled it.
        if architecture.bytes().all(|byte| byte.is_ascii_digit()) {
            let later = format!("arch=compute_{architecture},code=compute_{architecture}");
            command.arg(format!("-gencode={later}"));
        }
    }
    let report = run(
        &mut command,
        "set CUDA_HOME to a CUDA 13 toolkit, or get a compiler by tools/cuda-toolchain",
    );
    let kernels = ptxas::kernels(&report);
    let faults = ptxas::faults(&report, &kernels);
    assert!(
        faults.is_empty(),
        "ptxas serialised or spilled kernels, which makes them slow:\n{}",
        faults.join("\n")
    );
    if let Some(file) = std::env::var_os("MOH_CUDA_RESOURCES") {
        let written = std::fs::write(&file, ptxas::table(&kernels));
        written.unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    }
}

fn compile_for_the_cpu(out: &Path) {
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let (object, library) = (out.join("emulator.o"), out.join("libmoh_emulated.a"));
    let mut command = Command::new(compiler);
    command.args(["-x", "c++", "-std=c++17", "-O2", "-Wno-unknown-pragmas"]);
    command.args(["-Wno-psabi", "-fPIC", "-c"]);
    run(command.arg(EMULATOR).arg("-o").arg(&object), "install a C++ compiler, or set CXX");
    // A new archive: `ar` would keep the members of an earlier archive.
    let _ = std::fs::remove_file(&library);
    run(Command::new("ar").arg("crs").arg(&library).arg(&object), "install binutils");
    println!("cargo::rustc-link-search=native={}", out.display());
    println!("cargo::rustc-link-lib=static:+whole-archive=moh_emulated");
    println!("cargo::rustc-link-lib=stdc++");
}
