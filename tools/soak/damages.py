"""Checkpoints that are damaged or cannot be read."""

import os
import pwd
import random
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from workplace import Workplace, remove, snapshot, steps


def stopped_run(workplace: Workplace) -> Path:
    """Creates a run that was stopped shortly before its end, with several checkpoints."""
    for _ in range(50):
        run = workplace.folder / "stopped"
        remove(run)
        process = workplace.start(run)
        metrics = run / "metrics.jsonl"
        while process.poll() is None:
            lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            if lines >= 0.8 * len(workplace.reference["metrics.jsonl"]):
                process.send_signal(signal.SIGTERM)
                break
            time.sleep(0.001)
        if workplace.end(process) == 75 and len(steps(run)) >= 2:
            return run
    raise SystemExit("no run could be stopped before its end")


def copy(stopped: Path, run: Path) -> None:
    """Copies a run, as if it had been started at its new place."""
    shutil.copytree(stopped, run)
    for name in ("recipe.toml", ".moh-run"):
        recipe = run / name
        recipe.write_text(recipe.read_text().replace(str(stopped), str(run)))


def newest_checkpoint(workplace: Workplace, count: int, generator: random.Random) -> dict:
    """Damages the newest checkpoint of copies of a stopped run, and finishes them, several at a time."""
    stopped, counts = stopped_run(workplace), {}
    seeds = [generator.random() for _ in range(count)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for kind in pool.map(lambda number: damage_one(workplace, stopped, number, seeds[number]), range(count)):
            counts[kind] = counts.get(kind, 0) + 1
    return {"damages": count, **counts, "unnoticed": 0, "wrong": 0}


def damage_one(workplace: Workplace, stopped: Path, number: int, seed: float) -> str:
    """Damages a copy. Returns the kind of the damage."""
    generator = random.Random(seed)
    run = workplace.folder / f"damaged-{number}"
    copy(stopped, run)
    step = steps(run)[-1]
    kind = generator.choice([flip, truncate, delete, swap])
    what = kind(run / f"checkpoints/step-{step}", generator)
    code = workplace.end(workplace.start(run))
    if code != 0:
        raise SystemExit(f"{what}: ended with code {code}: {workplace.log(run)}")
    if not (run / f"checkpoints/damaged-step-{step}").is_dir():
        raise SystemExit(f"{what}: was not noticed")
    if differs := workplace.differs(run):
        raise SystemExit(f"{what}: other {differs}")
    remove(run)
    workplace.log_file(run).unlink()
    return kind.__name__


def files_of(checkpoint: Path) -> list:
    return sorted(path for path in checkpoint.iterdir() if path.is_file())


def flip(checkpoint: Path, generator: random.Random) -> str:
    path = generator.choice(files_of(checkpoint))
    content = bytearray(path.read_bytes())
    position, bit = generator.randrange(len(content)), generator.randrange(8)
    content[position] ^= 1 << bit
    path.write_bytes(content)
    return f"{path.name} with bit {bit} of byte {position} flipped"


def truncate(checkpoint: Path, generator: random.Random) -> str:
    path = generator.choice(files_of(checkpoint))
    length = generator.randrange(path.stat().st_size)
    os.truncate(path, length)
    return f"{path.name} cut to {length} bytes"


def delete(checkpoint: Path, generator: random.Random) -> str:
    path = generator.choice(files_of(checkpoint))
    path.unlink()
    return f"{path.name} deleted"


def swap(checkpoint: Path, generator: random.Random) -> str:
    a, b = generator.sample(files_of(checkpoint), 2)
    content = a.read_bytes(), b.read_bytes()
    a.write_bytes(content[1])
    b.write_bytes(content[0])
    return f"{a.name} and {b.name} swapped"


def unreadable(workplace: Workplace, generator: random.Random) -> dict:
    """Removes a user's permissions: the run must stop, and must be unchanged."""
    stopped, refused = stopped_run(workplace), 0
    options = not_root()
    run = workplace.folder / "unreadable"
    for mode in (0o000, 0o200):
        step = steps(stopped)[-1]
        names = [path.name for path in files_of(stopped / f"checkpoints/step-{step}")]
        for name in [*(f"checkpoints/step-{step}/{name}" for name in names), f"checkpoints/step-{step}", "checkpoints"]:
            remove(run)
            copy(stopped, run)
            give(run, options)
            before = snapshot(run)
            allowed = (run / name).stat().st_mode
            (run / name).chmod(mode)
            code = workplace.end(workplace.start(run, **options))
            (run / name).chmod(allowed)
            if code != 1:
                raise SystemExit(f"{name} with mode {mode:o}: ended with code {code}: {workplace.log(run)}")
            if (after := snapshot(run)) != before:
                raise SystemExit(f"{name} with mode {mode:o}: changed {changed(before, after)}")
            refused += 1
    # With the permissions restored, the run resumes.
    if workplace.end(workplace.start(run, **options)) != 0 or workplace.differs(run):
        raise SystemExit(f"did not go on: {workplace.log(run)}")
    remove(run)
    return {"refused": refused, "changed": 0}


def changed(before: dict, after: dict) -> list:
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def not_root() -> dict:
    """Returns options of a process that is not root's: root reads everything."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def give(run: Path, options: dict) -> None:
    """Changes the owner of a run to the user of the options."""
    if options:
        for path in [run, *run.rglob("*")]:
            os.chown(path, options["user"], options["group"])
