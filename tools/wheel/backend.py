"""The build backend of the Python package: maturin, for the programs of several crates.

maturin builds and packages the program of a single crate, moh-train, which has the fewest dependencies. The
programs of the other crates are built here, and become the wheel's scripts. MATURIN_PEP517_ARGS, or pip's
`--config-settings build-args=...`, has arguments that `cargo build` and maturin both accept: `--features
moh-train/nccl` for GPUs, for example. There are only wheels: a source distribution of the crates would lack the
files that they embed from other directories.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import maturin
from maturin import (  # noqa: F401 - the rest of the interface
    get_requires_for_build_editable,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "target" / "wheel-data" / "scripts"
# maturin requires the directory even if it only writes metadata.
SCRIPTS.mkdir(parents=True, exist_ok=True)
# Built together, so that they share their dependencies.
CRATES = ["moh-train", "moh-cli", "moh-convert", "moh-serve", "moh-report"]


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    collect_programs(maturin.get_maturin_pep517_args(config_settings))
    return maturin.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    collect_programs(maturin.get_maturin_pep517_args(config_settings))
    return maturin.build_editable(wheel_directory, config_settings, metadata_directory)


def collect_programs(build_arguments):
    """Builds the programs of CRATES. Leaves only these programs in SCRIPTS, without the program that maturin
    packages."""
    if shutil.which("cargo") is None:
        sys.exit("building moh needs Rust, and cargo is not on the path: install it from https://rustup.rs")
    # maturin also builds in release unless told otherwise.
    named = any(argument in ("-r", "--release") or argument.startswith("--profile") for argument in build_arguments)
    profile = [] if named else ["--release"]
    packages = [word for crate in CRATES for word in ("--package", crate)]
    command = ["cargo", "build", "--locked", *packages, "--bins", *profile]
    command += [*build_arguments, "--message-format", "json-render-diagnostics"]
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if built.returncode != 0:
        sys.exit("cargo could not build moh: its messages are above")
    shutil.rmtree(SCRIPTS.parent, ignore_errors=True)
    SCRIPTS.mkdir(parents=True)
    for message in map(json.loads, built.stdout.splitlines()):
        program = message.get("executable")
        if program and Path(program).stem != "moh-train":
            shutil.copy2(program, SCRIPTS)
