"""Training steps: tokens per second, and memory in separate processes."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from rows import Row
from shapes import SHAPES
from torch_step import TorchStep, fastest_optimizer

MEMORY_WANTED = {"c": 0.7}
MEBIBYTE = 1 << 20


def rows(options, programs, folder):
    for name in options.shapes:
        shape = SHAPES[name]
        config = shape.write_config(folder)
        optimizer = fastest_optimizer(shape)
        for dtype in options.dtypes:
            yield compare(options, programs, config, shape, dtype, optimizer)


def compare(options, programs, config, shape, dtype, optimizer) -> Row:
    repeats, seconds = (3, 1.0) if options.quick else (5, 3.0)
    modes = [("eager", False), ("compile", True)][:1 if options.no_compile else 2]
    theirs = {mode: TorchStep(shape, dtype, compiled, optimizer) for mode, compiled in modes}
    if dtype == "bf16":
        theirs |= {f"{mode}, bf16 weights": TorchStep(shape, dtype, compiled, optimizer, pure=True) for mode, compiled in modes}
    steps = {}
    for mode in list(theirs):
        try:
            theirs[mode].timed(2)  # compiles, and fills the allocator
            steps[mode] = enough(theirs[mode].timed(2), seconds)
        except Exception as error:  # For example torch.compile without a C++ compiler.
            if mode == "eager":
                raise
            print(f"{mode} skipped: {str(error).splitlines()[0]}", file=sys.stderr)
            del theirs[mode]
    first = programs.step(config, shape, dtype, 3)
    own_steps = enough(first["seconds"]["median"], seconds)
    samples = {mode: [] for mode in ("ours", *theirs)}
    for _ in range(repeats):
        found = programs.step(config, shape, dtype, own_steps)
        samples["ours"].append(found["tokens_per_second"]["median"])
        for mode, step in theirs.items():
            samples[mode].append(shape.tokens / step.timed(steps[mode]))
    torch.compiler.reset()
    medians = {mode: statistics.median(values) for mode, values in samples.items()}
    best = max(theirs, key=medians.get)
    return Row(
        f"training step {shape.name}, {dtype}", medians["ours"], medians[best], "tokens/s",
        at_least=shape.wanted[dtype], note=f"{best}, AdamW {optimizer}", samples=samples,
    )


def enough(step_seconds: float, seconds: float) -> int:
    return max(3, round(seconds / step_seconds))


def memory_rows(options, programs, folder):
    for name in options.shapes:
        shape = SHAPES[name]
        config = shape.write_config(folder)
        for dtype in options.dtypes:
            ours = programs.step(config, shape, dtype, 2)["memory"]
            if ours is None:
                print("memory: this system does not report ours", file=sys.stderr)
                return
            theirs = torch_memory(name, dtype, options.threads)
            what = f"memory of a step {name}, {dtype}"
            samples = {"ours": ours, "theirs": theirs}
            net = [side["peak_bytes"] - side["before_bytes"] for side in (ours, theirs)]
            yield Row(
                f"{what}, net", net[0] / MEBIBYTE, net[1] / MEBIBYTE, "MiB",
                at_most=MEMORY_WANTED.get(name), note="peak less start", samples=samples,
            )
            yield Row(
                f"{what}, raw", ours["peak_bytes"] / MEBIBYTE, theirs["peak_bytes"] / MEBIBYTE,
                "MiB", note="peak of the process",
            )


def torch_memory(shape: str, dtype: str, threads: int) -> dict:
    script = Path(__file__).with_name("torch_step.py")
    command = [sys.executable, script, "--shape", shape, "--dtype", dtype, "--threads", threads]
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])
