"""Rows of figures: how GPU work is timed, limited in time, and reported.

Each variant ends in one JSON line. If a variant fails, its line has the field `error` next to its earlier
figures, and the next variant runs.
"""

import gc
import json
import signal
import statistics
import time
from contextlib import contextmanager

import torch

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
WARM_UP = 4
ERROR_CHARACTERS = 240


class OutOfTime(Exception):
    """A variant took longer than `--seconds`."""


def synchronize():
    if CUDA:
        torch.cuda.synchronize()


def median_ms(work, options):
    """Returns the median time of `work`, in milliseconds.

    The runs are queued together, and the GPU runs one while Python prepares the next. So the time of
    launches on a busy CPU is not counted.
    """
    for _ in range(WARM_UP - 1):
        work()
    synchronize()
    begin = time.perf_counter()
    work()
    synchronize()
    affordable = int(options.seconds / 4 / (time.perf_counter() - begin))
    runs = max(1, min(options.runs, affordable))
    if not CUDA:
        return statistics.median(wall_ms(work) for _ in range(runs))
    events = []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        events.append((start, end))
    synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def wall_ms(work):
    begin = time.perf_counter()
    work()
    synchronize()
    return (time.perf_counter() - begin) * 1e3


@contextmanager
def time_limit(seconds):
    """Raises OutOfTime in the body after a time limit. A hanging kernel is not interrupted."""
    def expire(_signal, _frame):
        raise OutOfTime(f"took more than {seconds:g} seconds")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def one_line(error):
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:ERROR_CHARACTERS]


def forget():
    """Frees a variant's memory and compiled code, so that every variant starts alike."""
    torch._dynamo.reset()
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def machine():
    return {"torch": torch.__version__, "gpu": torch.cuda.get_device_name() if CUDA else None}


def report(kind, **fields):
    print(json.dumps({"kind": kind, **fields, **machine()}), flush=True)


def attempt(kind, fields, seconds, steps):
    """Reports a row of the figures that `steps()` yields as dictionaries. Returns whether it completed.

    If `seconds` is None, its time is not limited.
    """
    row, error = dict(fields), None
    try:
        if seconds is None:
            for found in steps():
                row |= found
        else:
            with time_limit(seconds):
                for found in steps():
                    row |= found
    # Any failure is a row: the exception of a backend that rejects a shape differs by version.
    except Exception as caught:
        error = one_line(caught)
    # After the handler, since its traceback holds the tensors of the failed call.
    forget()
    report(kind, **row, **({"error": error} if error else {}))
    return error is None
