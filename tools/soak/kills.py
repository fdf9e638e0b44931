"""Processes killed at random moments."""

import os
import random
import signal
import time
from pathlib import Path

from workplace import Workplace, programs_below, remove, steps

# Maximum kills of a run: it would never finish if it lost its progress.
MAX_RESTARTS = 200
# Starts without a new checkpoint after which a run gets twice as much time.
IDLE_STARTS = 5


def one_process(workplace: Workplace, count: int, generator: random.Random) -> dict:
    """Kills a run again and again until it has finished, and another, until `count` kills are done."""
    duration = time_of(workplace)

    def kill(run, latest):
        return kill_one(workplace, run, generator.uniform(0.0, latest))

    return until(workplace, count, duration, kill)


def one_rank(workplace: Workplace, count: int, generator: random.Random) -> dict:
    """Kills as `one_process`, with several ranks and a kill of one: the other ranks must end by themselves."""
    duration = time_of(workplace)

    def kill(run, latest):
        return kill_rank(workplace, run, generator.uniform(0.0, latest), generator)

    return until(workplace, count, duration, kill)


def time_of(workplace: Workplace) -> float:
    """Returns the seconds of a whole run."""
    run = workplace.folder / "timed"
    start = time.monotonic()
    if workplace.end(workplace.start(run)) != 0:
        raise SystemExit(workplace.log(run))
    remove(run)
    return time.monotonic() - start


def until(workplace: Workplace, count: int, duration: float, start_and_kill) -> dict:
    """Kills runs until `count` kills are done and the last run has finished.

    `start_and_kill` gets the run and the latest time of the kill in seconds. The time is the duration of a
    whole run, and longer after starts without a checkpoint: a busy machine may need longer than `duration` for
    the first checkpoint.
    """
    kills, runs, during_saves = 0, 0, 0
    while kills < count:
        run = workplace.folder / f"run-{runs}"
        restarts, step, idle = 0, 0, 0
        while start_and_kill(run, duration * (1 + idle / IDLE_STARTS)):
            kills, restarts = kills + 1, restarts + 1
            newest = max(steps(run), default=0)
            if newest < step or restarts > MAX_RESTARTS:
                raise SystemExit(f"{run} after {restarts} kills: step {newest} after {step}: {workplace.log(run)}")
            step, idle = newest, idle + 1 if newest == step else 0
            checkpoints = run / "checkpoints"
            during_saves += checkpoints.is_dir() and any(checkpoints.glob(".tmp-*"))
        runs += 1
        if differs := workplace.differs(run):
            raise SystemExit(f"{run} after {kills} kills: other {differs}: {workplace.log(run)}")
        remove(run)
    return {"kills": kills, "during_a_save": during_saves, "finished_runs": runs, "lost": 0}


def kill_one(workplace: Workplace, run: Path, after: float) -> bool:
    """Returns whether the process was killed. False if it had finished."""
    process = workplace.start(run)
    time.sleep(after)
    process.send_signal(signal.SIGKILL)
    return ended(workplace.end(process), -signal.SIGKILL, workplace, run)


def kill_rank(workplace: Workplace, run: Path, after: float, generator: random.Random) -> bool:
    process = workplace.start(run)
    time.sleep(after)
    ranks = programs_below(process.pid, workplace.program)
    if ranks:
        try:
            os.kill(generator.choice(ranks), signal.SIGKILL)
        except ProcessLookupError:
            pass
    code = workplace.end(process)
    return ended(code, code if code != 0 else None, workplace, run)


def ended(code: int, killed, workplace: Workplace, run: Path) -> bool:
    if code == 0:
        return False
    if code == killed:
        return True
    raise SystemExit(f"{run}: ended with code {code}: {workplace.log(run)}")
