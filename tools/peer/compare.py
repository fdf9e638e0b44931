"""Our programs against PyTorch and transformers on this machine: one table of ratios.

    python tools/peer/compare.py --stories DIR

Both sides run in turns, with the same number of threads and the same shapes; figures are medians.
README.md beside this file says what is compared.
"""

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path

import torch
import transformers

import attention
import batches
import generation
import step
from ours import Programs
from rows import table

PARTS = {
    "step": step.rows,
    "memory": step.memory_rows,
    "attention": attention.rows,
    "generation": generation.rows,
    "batches": batches.rows,
}
REPOSITORY = Path(__file__).resolve().parents[2]


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS), help="parts, by comma: %(default)s")
    parser.add_argument("--shapes", default="a,b,c", help="shapes of the step: %(default)s")
    parser.add_argument("--dtypes", default="f32,bf16", help="%(default)s")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs")
    parser.add_argument("--no-compile", action="store_true", help="skip torch.compile")
    parser.add_argument("--threads", type=int, default=available(), help="%(default)s")
    parser.add_argument(
        "--binaries", type=Path, default=REPOSITORY / "target/release", help="our programs"
    )
    parser.add_argument("--stories", type=Path, help="a directory of stories260K for generation")
    parser.add_argument("--json", type=Path, help="write the rows with their samples to a file")
    options = parser.parse_args()
    options.only, options.shapes, options.dtypes = (
        value.split(",") for value in (options.only, options.shapes, options.dtypes)
    )
    for part in options.only:
        if part not in PARTS:
            parser.error(f"--only {part}: must be one of {', '.join(PARTS)}")
    for shape in options.shapes:
        if shape not in step.SHAPES:
            parser.error(f"--shapes {shape}: must be one of {', '.join(step.SHAPES)}")
    for dtype in options.dtypes:
        if dtype not in ("f32", "bf16"):
            parser.error(f"--dtypes {dtype}: must be one of f32, bf16")
    return options


def available() -> int:
    """Returns the number of cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def warn_of_load(threads: int) -> float | None:
    """Warns if the load of the last minute is high: other work slows the two sides differently."""
    if not hasattr(os, "getloadavg"):
        return None
    load = os.getloadavg()[0]
    if load > 0.25 * threads:
        print(f"the machine is busy (load {load:.1f}): discard these ratios")
    return load


def main():
    options = parse()
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    programs = Programs(options.binaries, options.threads)
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "threads": options.threads,
    }
    print(", ".join(f"{name} {version}" for name, version in versions.items()), flush=True)
    versions["load"] = warn_of_load(options.threads)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for part in options.only:
            for row in PARTS[part](options, programs, Path(folder)):
                print(f"  {row.what}: {row.ratio and round(row.ratio, 3)}", flush=True)
                rows.append(row)
    print()
    print(table(rows))
    if options.json:
        found = {"versions": versions, "rows": [row.json() for row in rows]}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
