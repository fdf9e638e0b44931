#!/usr/bin/env python3
"""PyTorch on this GPU, as JSON lines: the reference figures of `tools/gpu/measure.py`.

    python3 tools/peer/gpu.py attention --length 8192 --batch 1
    python3 tools/peer/gpu.py flash --length 8192 --batch 1
    python3 tools/peer/gpu.py step --layers 32 --length 8192
    python3 tools/peer/gpu.py limits

attention  causal grouped-query attention in bf16, forward and backward, by every backend of
           scaled_dot_product_attention, and FlexAttention dense and with the heads of each token
           chosen at random, 75% and 50% of them, as a mask.
flash      what can be assembled beyond that: FlexAttention on packed rows, and with the package
           flash-attn-4 its own calls and FlexAttention on its kernels.
step       forward, backward and fused AdamW of transformers' Llama, compiled, all of it in bf16 and
           without f32 master weights; once more with --checkpointing where memory runs out.
limits     the rate of an 8192 x 8192 x 8192 bf16 product, and of a copy of 4 GiB.

Without a GPU it runs on the CPU, on small shapes unless they are given, what can run there. The
exit code is 1 if no row was measured.
"""

import argparse
import os
import sys

# Before torch is imported: a step that barely fits must not fail because of fragmentation.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch

from gpu_timing import CUDA, DEVICE, median_ms, report

# Each option with its default on a GPU, which is LLaMA-3-8B's shape, and on a CPU.
SHAPE = {"length": (8192, 256), "batch": (1, 2), "heads": (32, 8), "kv-heads": (8, 4),
         "head-dim": (128, 64), "layers": (32, 2), "vocab": (128256, 512), "hidden": (4096, 256),
         "mlp": (14336, 512), "runs": (20, 3)}


def limits(options):
    """Reports the rows of the part `limits`: yields True for each."""
    side = 8192 if CUDA else 512
    left, right = (torch.randn(side, side, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    report("matmul", side=side, tflops=2 * side**3 / median_ms(lambda: left @ right, options) / 1e9)
    yield True
    source = torch.randn(2**31 if CUDA else 2**24, device=DEVICE, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    milliseconds = median_ms(lambda: target.copy_(source), options)
    # Every byte is read and written.
    report("copy", bytes=source.nbytes, tb_per_second=2 * source.nbytes / milliseconds / 1e9)
    yield True


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["attention", "flash", "step", "limits"])
    for name, (gpu, cpu) in SHAPE.items():
        parser.add_argument(f"--{name}", type=int, default=gpu if CUDA else cpu)
    parser.add_argument("--seconds", type=float, default=120,
                        help="at most this long a variant of attention, its compilation included, "
                        "and a quarter of it for each timing")
    parser.add_argument("--only", metavar="WORDS",
                        help="variants of attention whose kind, backend and share hold one of "
                        "these, separated by commas: 'packed,flex flash 0.5'")
    parser.add_argument("--autotune", action="store_true",
                        help="FlexAttention tries every tile size first, which takes minutes")
    parser.add_argument("--checkpointing", action="store_true", help="recompute from the start")
    parser.add_argument("--eager", action="store_true", help="a step without torch.compile")
    options = parser.parse_args()
    if options.part == "attention":
        from gpu_attention import attention as part
    elif options.part == "flash":
        from gpu_flash import flash as part
    elif options.part == "step":
        from gpu_step import step as part
    else:
        part = limits
    # A list, because `any` alone would stop at the first row that was measured.
    if any(list(part(options))):
        return 0
    print("no row was measured: each has an error, or --only selects none", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
