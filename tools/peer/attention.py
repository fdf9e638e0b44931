"""Attention alone: Mixture-of-Head against our dense attention, and dense against PyTorch's."""

import statistics
import time

import torch
import torch.nn.functional as F

from rows import Row

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
# Active fraction -> (shared heads, target time relative to dense). All heads active may take as
# long as dense attention, with two percent for noise.
WANTED = {1.0: (16, 1.02), 0.75: (16, 0.80), 0.5: (8, 0.58)}
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def rows(options, programs, folder):
    length, repeats, seconds = (1024, 3, 3) if options.quick else (2048, 5, 6)
    for dtype in options.dtypes:
        sdpa = Sdpa(length, dtype)
        sdpa.seconds()
        ours, theirs = [], []
        for _ in range(repeats):
            ours.append(measure(programs, length, dtype, seconds))
            theirs.append(sdpa.seconds())
        medians = {active: statistics.median(run[active] for run in ours) for active in ours[0]}
        for active, (shared, wanted) in WANTED.items():
            routed = round(active * HEADS) - shared
            yield Row(
                f"attention {dtype}, {active:.0%}: {shared} shared + {routed}",
                medians[active] * 1e3, medians["dense"] * 1e3, "ms", at_most=wanted,
                note="theirs: our dense attention",
                samples={"moh": [run[active] for run in ours],
                         "dense": [run["dense"] for run in ours]},
            )
        yield Row(
            f"attention {dtype}, dense", medians["dense"] * 1e3,
            statistics.median(theirs) * 1e3, "ms", note="theirs: scaled_dot_product_attention",
            samples={"theirs": theirs},
        )


def measure(programs, length: int, dtype: str, seconds: float) -> dict:
    """Returns the seconds forward and backward: dense, and by active fraction."""
    found = programs.bench(
        "attention", "--heads", HEADS, "--kv-heads", KV_HEADS, "--head-dim", HEAD_DIM,
        "--length", length, "--dtype", dtype, "--seconds", seconds,
        "--active", ",".join(map(str, WANTED)),
        "--shared-heads", ",".join(str(shared) for shared, _ in WANTED.values()),
    )
    return {
        "dense" if case["attention"] == "dense" else case["active"]:
            case["both"]["seconds"]["median"]
        for case in found["cases"]
    }


class Sdpa:
    def __init__(self, length: int, dtype: str):
        def random(heads):
            return torch.randn(1, heads, length, HEAD_DIM, dtype=TYPES[dtype])

        self.inputs = [random(HEADS), random(KV_HEADS), random(KV_HEADS)]
        for tensor in self.inputs:
            tensor.requires_grad_()
        self.gradient = random(HEADS)

    def seconds(self) -> float:
        """Returns the median seconds of a forward and backward pass."""
        times = []
        for _ in range(3):
            for tensor in self.inputs:
                tensor.grad = None
            started = time.perf_counter()
            out = F.scaled_dot_product_attention(*self.inputs, is_causal=True, enable_gqa=True)
            out.backward(self.gradient)
            times.append(time.perf_counter() - started)
        return statistics.median(times)
