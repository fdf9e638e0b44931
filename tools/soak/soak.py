#!/usr/bin/env python3
"""Kills, damages and starves small runs, and checks that nothing is lost: every run ends with the metrics and
the weights of the run that was never interrupted, bit for bit.

  tools/soak/soak.py --program target/debug/moh-train                        # as in .ci/run
  tools/soak/soak.py --program target/release/moh-train --kills 5000 --damages 10000 --full-disks 1000

--mpi PROGRAM, built with the feature `mpi`, also kills one of several ranks. Full disks are file systems in memory,
which take root or user namespaces. Prints a line for each part, with its counts; fails at the first loss.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import damages
import disks
import kills
import streams
from workplace import Workplace

RANKS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, required=True, help="moh-train")
    parser.add_argument("--mpi", type=Path, help="moh-train with the feature mpi")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--rank-kills", type=int, default=20, help="of one of several ranks, with --mpi")
    parser.add_argument("--damages", type=int, default=500)
    parser.add_argument("--full-disks", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="default: from the clock")
    arguments = parser.parse_args()
    seed = arguments.seed or time.time_ns() % 1_000_000
    print(f"seed {seed}", flush=True)
    generator = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="moh-soak-") as folder:
        folder = Path(folder)
        # A user who is not root also reads it.
        folder.chmod(0o755)
        program = arguments.program.resolve()
        workplace = Workplace(program, folder / "one", steps=60, every=3)
        report("kills", kills.one_process, workplace, arguments.kills, generator)
        if arguments.mpi:
            launcher = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(RANKS))
            ranks = Workplace(arguments.mpi.resolve(), folder / "ranks", steps=60, every=3, launcher=launcher)
            report("kills of a rank", kills.one_rank, ranks, arguments.rank_kills, generator)
        report("damages", damages.newest_checkpoint, workplace, arguments.damages, generator)
        report("faults of the file system", damages.unreadable, workplace, generator)
        report("full disks", disks.full, workplace, arguments.full_disks, generator)
        report("broken streams", streams.broken, workplace)


def report(name: str, part, *arguments) -> None:
    """Runs a part and prints its counts and its time."""
    start = time.monotonic()
    counts = part(*arguments)
    print(json.dumps({"part": name, **counts, "seconds": round(time.monotonic() - start, 1)}), flush=True)


if __name__ == "__main__":
    main()
