"""PyTorch's side of a training step: Hugging Face's Llama, AdamW and clipping in PyTorch.

Run as a program, it measures the memory of a step in a process of its own and prints JSON.
"""

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from shapes import SHAPES

LEARNING_RATE = 1e-4
OPTIMIZERS = ("fused", "foreach")


def build(shape):
    torch.manual_seed(0)
    config = LlamaConfig(**shape.config())
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa", dtype=torch.float32
    )
    return model.train()


def adamw(model, kind: str):
    """Returns AdamW as in our recipes: no decay on norms."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), **{kind: True})


class TorchStep:
    """Training steps. bf16 is autocast over f32 weights, or `pure`: weights, gradients and moments in bf16."""

    def __init__(self, shape, dtype: str, compiled: bool, optimizer: str, pure: bool = False):
        self.shape = shape
        self.model = build(shape).to(torch.bfloat16 if pure else torch.float32)
        self.parameters = list(self.model.parameters())
        self.optimizer = adamw(self.model, optimizer)
        self.cast = (
            (lambda: torch.autocast("cpu", dtype=torch.bfloat16))
            if dtype == "bf16" and not pure
            else contextlib.nullcontext
        )
        self.loss = torch.compile(self._loss) if compiled else self._loss
        self.random = torch.Generator().manual_seed(0)

    def _loss(self, ids):
        return self.model(input_ids=ids, labels=ids, use_cache=False).loss

    def step(self) -> float:
        shape = self.shape
        ids = torch.randint(
            shape.vocabulary, (shape.batch, shape.length), generator=self.random
        )
        self.optimizer.zero_grad(set_to_none=True)
        with self.cast():
            loss = self.loss(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        return loss.item()

    def timed(self, steps: int) -> float:
        """Returns the median seconds of a step."""
        times = []
        for _ in range(steps):
            started = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - started)
        return sorted(times)[len(times) // 2]


def fastest_optimizer(shape) -> str:
    """Returns the fastest kind of AdamW for this model."""
    seconds = {}
    for kind in OPTIMIZERS:
        try:
            step = TorchStep(shape, "f32", compiled=False, optimizer=kind)
            step.step()
            times = []
            for _ in range(10):
                started = time.perf_counter()
                step.optimizer.step()
                times.append(time.perf_counter() - started)
            seconds[kind] = min(times)
        except RuntimeError as error:  # A version without it.
            print(f"AdamW {kind}: {error}", file=sys.stderr)
    return min(seconds, key=seconds.get)


def resident(field: str) -> int:
    """Returns the bytes of VmRSS or VmHWM. Without /proc, returns the peak for both."""
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--dtype", choices=["f32", "bf16"], required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    # Imports on the first use of the model do not count either.
    from transformers.models.llama import modeling_llama  # noqa: F401

    before = resident("VmRSS")
    step = TorchStep(SHAPES[arguments.shape], arguments.dtype, False, "fused")
    for _ in range(arguments.steps):
        step.step()
    print(json.dumps({"before_bytes": before, "peak_bytes": resident("VmHWM")}))


if __name__ == "__main__":
    main()
