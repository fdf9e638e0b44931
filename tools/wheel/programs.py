"""The programs of the Python package: hatchling calls this when it makes a wheel.

MOH_CARGO_ARGS has more arguments of `cargo build`: `--features moh-train/nccl` for GPUs, for example.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Built together, so that they share their dependencies.
CRATES = ["moh-train", "moh-cli", "moh-convert", "moh-serve", "moh-report"]


class Programs(BuildHookInterface):
    def initialize(self, version, build_data):
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        build_data["pure_python"] = False
        programs = build(self.root, shlex.split(os.environ.get("MOH_CARGO_ARGS", "")))
        build_data["shared_scripts"].update({str(program): program.name for program in programs})


def build(root, arguments):
    """Builds the programs, in release unless the arguments name a profile, and returns their paths."""
    if shutil.which("cargo") is None:
        sys.exit("building moh needs Rust, and cargo is not on the path: install it from https://rustup.rs")
    named = any(argument in ("-r", "--release") or argument.startswith("--profile") for argument in arguments)
    profile = [] if named else ["--release"]
    packages = [word for crate in CRATES for word in ("--package", crate)]
    command = ["cargo", "build", "--locked", *packages, "--bins", *profile, *arguments]
    command += ["--message-format", "json-render-diagnostics"]
    built = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True)
    if built.returncode != 0:
        sys.exit("cargo could not build moh: its messages are above")
    messages = map(json.loads, built.stdout.splitlines())
    return [Path(message["executable"]) for message in messages if message.get("executable")]
