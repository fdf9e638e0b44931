# The commands of CONTRIBUTING.md: `just` lists them. https://just.systems

# List the commands
default:
    @just --list --unsorted

# Everything that CI checks, or the parts of it (checks, tools, tests, clients, gpu, programs)
ci *PARTS:
    .ci/run {{ PARTS }}

# Format, lint and document, as CI does
check:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets -- -D warnings
    RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps

# The tests that need a Rust toolchain alone, or those whose names have NAME
test NAME="":
    cargo test --workspace {{ NAME }}

# Readers against mutated input, for SECONDS each
fuzz SECONDS="60":
    MOH_FUZZ_SECONDS={{ SECONDS }} cargo test --workspace --test readers

# The CUDA kernels on the emulated GPU
emulated:
    cargo test -p moh-kernels --features cuda-emulator

# Several processes over MPI
mpi:
    cargo test --workspace --features moh-train/mpi --test comm --test train

# Whether two programs compute the same runs
compare-bits BEFORE AFTER:
    tools/compare-bits {{ BEFORE }} {{ AFTER }}

# A wheel and an archive of the programs, for this machine
release OUT="dist":
    python3 -m venv .venv && .venv/bin/pip install --quiet wheel
    .venv/bin/python tools/release {{ OUT }}

# The benchmarks of operators
bench:
    cargo bench -p moh-kernels
