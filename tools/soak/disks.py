"""Disks that are full for a while."""

import os
import random
import subprocess
import time
from pathlib import Path

from workplace import Workplace, remove

# Bytes of a file system: a few checkpoints of the small model and the export.
BYTES = 16 << 20


def full(workplace: Workplace, count: int, generator: random.Random) -> dict:
    """Runs on a separate file system that is full from a random moment on, for a while."""
    disk = workplace.folder / "disk"
    disk.mkdir()
    if subprocess.call(["mount", "-t", "tmpfs", "-o", f"size={BYTES}", "tmpfs", str(disk)]) != 0:
        return {"full_disks": 0, "reason": "a file system cannot be mounted"}
    try:
        return fill_again_and_again(workplace, disk, count, generator)
    finally:
        subprocess.call(["umount", str(disk)])


def fill_again_and_again(workplace: Workplace, disk: Path, count: int, generator: random.Random) -> dict:
    filled, runs, stops = 0, 0, 0
    while filled < count:
        run = disk / "run"
        while True:
            process = workplace.start(run, **output(workplace))
            while process.poll() is None and filled < count:
                time.sleep(generator.uniform(0.0, 0.3))
                if process.poll() is not None:
                    break
                fill(disk / "filler", generator)
                filled += 1
                time.sleep(generator.uniform(0.02, 0.2))
                (disk / "filler").unlink()
            code = workplace.end(process)
            if code == 0:
                break
            # A run may end with an error, if the next run resumes.
            if code != 1:
                raise SystemExit(f"full disk: ended with code {code}: {log(workplace)}")
            stops += 1
        runs += 1
        if differs := workplace.differs(run):
            raise SystemExit(f"full disk: other {differs}: {log(workplace)}")
        remove(run)
    return {"full_disks": filled, "finished_runs": runs, "stopped_by_it": stops, "lost": 0}


def fill(path: Path, generator: random.Random) -> None:
    """Fills the disk except up to a few thousand bytes, so that any write may fail."""
    space = os.statvfs(path.parent)
    leave = generator.choice([0, 0, generator.randrange(1 << 16)])
    with open(path, "wb", buffering=0) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, max(space.f_bavail * space.f_frsize - leave, 1))
        except OSError:
            # The run was faster, and has used some of it.
            pass


def output(workplace: Workplace) -> dict:
    file = open(workplace.folder / "disk.log", "ab")
    return {"stdout": file, "stderr": file}


def log(workplace: Workplace) -> str:
    return (workplace.folder / "disk.log").read_text(errors="replace")[-2000:]
