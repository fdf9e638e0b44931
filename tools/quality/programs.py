"""Our programs, and the measuring of many runs of them."""

import concurrent.futures
import json
import os
import subprocess
from pathlib import Path

from results import ROOT, origin


def add_options(parser, directory):
    """The options that every measurement has; results are a file of a directory."""
    parser.add_argument("--binaries", type=Path, default=ROOT / "target/release", help="our programs")
    parser.add_argument("--results", type=Path, default=directory / "results.jsonl", help="%(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each variant, with seeds from 1: %(default)s")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="threads of each run: %(default)s")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="what trains: %(default)s")
    parser.add_argument("--dtype", default="f32", choices=["f32", "bf16"], help="type that it trains in: %(default)s")


class Programs:
    """Our programs, run from the repository's root."""

    def __init__(self, options):
        self.binaries, self.threads = options.binaries, options.threads
        self.device, self.dtype = options.device, options.dtype

    def run(self, program, *arguments):
        """What a program prints; an error with the end of its messages if it fails."""
        command = [str(self.binaries / program), *map(str, arguments)]
        environment = os.environ | {"RAYON_NUM_THREADS": str(self.threads)}
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
        return done.stdout

    def train(self, recipe, settings):
        """Trains by a recipe of this repository with some of its keys changed."""
        settings = {**settings, "run.threads": self.threads, "run.device": self.device, "run.dtype": self.dtype}
        overrides = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        self.run("moh-train", "--recipe", Path(recipe).relative_to(ROOT), *overrides)


def measure_rows(rows, measure, options, text):
    """Measures rows, some side by side; appends each to the results as it ends, and prints its text.

    A run that fails does not end the others; there is an error after all of them.
    """
    num_failed = 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool, options.results.open("a") as out:
        for done in concurrent.futures.as_completed([pool.submit(measure, row) for row in rows]):
            if done.exception():
                num_failed += 1
                print(done.exception(), flush=True)
                continue
            row = done.result() | {"device": options.device, "dtype": options.dtype} | origin()
            out.write(json.dumps(row) + "\n")
            out.flush()
            print(text(row), flush=True)
    if num_failed:
        raise SystemExit(f"{num_failed} of {len(rows)} runs failed")
