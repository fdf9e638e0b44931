#!/usr/bin/env python3
"""Every figure about a GPU that docs/gpu.md reports, in one run on a machine with one.

    tools/gpu/prepare gpu-programs            # anywhere; needs Rust and the CUDA compiler
    python3 tools/gpu/measure.py --programs gpu-programs --out gpu-results

A part that fails is reported and the others go on. OUT gets `results.json`, with every number, and
`results.md`, the tables. Parts: tests, sanitizer, limits, attention, operators, step, curve,
quickstart. PyTorch runs in the same parts where it is installed. `--device cpu` tries the script
itself on small shapes.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ["tests", "sanitizer", "limits", "attention", "operators", "step", "curve", "quickstart"]
RECIPE = "recipes/moh-llama3-8b.toml"
# What moves the fewest bytes and computes nothing twice; the weights' updates are f32's all the same.
STATE = ["--set", "precision.gradients=bf16", "--set", "precision.moments=bf16",
         "--set", "memory.recompute=none"]
HEADS = {"dense": ["--dense"], "75%": ["--active", "0.75"],
         "50%": ["--active", "0.5", "--shared-heads", "8"]}


class Failed(Exception):
    pass


class Machine:
    """Runs programs and keeps what they print."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.environment = dict(os.environ, MOH_TEST_GPU="1")
        libraries = torch_libraries()
        if libraries:
            known = self.environment.get("LD_LIBRARY_PATH")
            self.environment["LD_LIBRARY_PATH"] = ":".join(libraries + ([known] if known else []))

    def run(self, command, seconds, variables=None):
        print("+", *(f"{name}={value}" for name, value in (variables or {}).items()), *command,
              flush=True)
        try:
            done = subprocess.run(
                list(map(str, command)), cwd=ROOT, env=self.environment | (variables or {}),
                timeout=seconds, capture_output=True, text=True)
        except subprocess.TimeoutExpired as error:
            raise Failed(f"took more than {seconds} seconds") from error
        except OSError as error:
            raise Failed(str(error)) from error
        if done.returncode != 0:
            raise Failed("\n".join((done.stdout + done.stderr).strip().splitlines()[-30:]))
        return done.stdout + done.stderr

    def bench(self, *options, seconds=300, variables=None):
        program = self.arguments.programs / "moh-bench"
        command = [program, *options, "--device", self.arguments.device, "--json"]
        text = self.run(command, seconds, variables)
        return json.loads(text[text.index("{"):])

    def peer(self, *options, seconds=400):
        """The JSON lines that the PyTorch side prints; none where it is not installed."""
        if not self.arguments.peer:
            return []
        text = self.run([sys.executable, self.arguments.peer, *options], seconds)
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    @property
    def small(self):
        return self.arguments.device == "cpu"


def torch_libraries():
    """Folders of the CUDA libraries that pip installed, where cuBLASLt may be."""
    found = []
    for folder in sys.path:
        found += map(str, Path(folder).glob("nvidia/*/lib"))
    return found


def tests(machine):
    """Each operator against its f64 reference, and whole models against the CPU's."""
    rows = {}
    for program in sorted(machine.arguments.programs.glob("test-*")):
        text = machine.run([program, "--nocapture", "--test-threads", "4"], 400)
        passed = sum(map(int, re.findall(r"(\d+) passed", text)))
        errors = re.findall(r"^(\S+): (\w+) relative error (\S+)$", text, re.M)
        largest = {}
        for what, kind, error in errors:
            name = f"{what} {kind}"
            largest[name] = max(largest.get(name, 0.0), float(error))
        rows[program.name[5:]] = {"passed": passed, "largest_relative_errors": largest}
    if not rows:
        raise Failed("the folder of programs holds no tests: make it with tools/gpu/prepare")
    return rows


def sanitizer(machine):
    """compute-sanitizer over the tests with small shapes."""
    rows = {}
    for name in ["lengths", "rms_norm", "rope", "swiglu", "embedding", "cross_entropy"]:
        text = machine.run(["compute-sanitizer", "--error-exitcode", "1",
                            machine.arguments.programs / f"test-{name}"], 500)
        rows[name] = re.findall(r"ERROR SUMMARY: .*", text)[-1:]
    for tool in ["memcheck", "racecheck"]:
        text = machine.run(["compute-sanitizer", "--tool", tool, "--error-exitcode", "1",
                            machine.arguments.programs / "test-attention",
                            "packed_rows", "attention_within_documents"], 500)
        rows[f"attention {tool}"] = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", text)[-1:]
    return rows


def limits(machine):
    rows = {"ours": machine.bench("operators", "squared_norm", "--dtype", "bf16")["machine"]}
    rows["pytorch"] = machine.peer("limits")
    return rows


def attention(machine):
    """Forward and backward against dense attention and PyTorch's, over lengths and paths."""
    shapes = [(2048, 4), (8192, 1), (8192, 2), (16384, 1), (32768, 1), (65536, 1), (131072, 1)]
    cases = [(length, batch, "hopper", []) for length, batch in shapes]
    cases += [(8192, 1, "hopper", ["--deterministic"]), (8192, 1, "tiled", [])]
    rows = []
    for length, batch, path, order in [(256, 1, "hopper", [])] if machine.small else cases:
        options = ["--length", length, "--batch", batch, *order]
        row = machine.bench("attention", "--dtype", "bf16", "--active", "1.0,0.75,0.5", *options,
                            variables={"MOH_ATTENTION": path})
        with_peer = length == 8192 and path == "hopper" and not order
        rows.append({**row["shape"], "path": " ".join([path, *order]), "cases": row["cases"],
                     "pytorch": machine.peer("attention", *options) if with_peer else []})
    return rows


def operators(machine):
    return machine.bench("operators", "--dtype", "bf16", seconds=500)["operators"]


def recipe_step(machine, heads, layers, length, vocabulary, micro_batches):
    options = ["--recipe", RECIPE, "--stage", "moh", *STATE,
               "--set", f"data.sequence_length={length}", "--set", f"model.vocab_size={vocabulary}",
               "--set", f"stage.moh.batch_tokens={length * micro_batches}"]
    if machine.small:
        options = ["--config", "recipes/quickstart"]
    chosen = ["2" if machine.small and option == "8" else option for option in HEADS[heads]]
    options += [*chosen, "--layers", layers, "--steps", "3", "--warmup", "1"]
    found = machine.bench("step", *options, seconds=590)
    return {"heads": heads, **found}


def step(machine):
    """All 32 layers of LLaMA-3-8B on one GPU."""
    rows = []
    layers = machine.arguments.layers
    for vocabulary in [128256, 160896]:
        for heads in HEADS:
            rows.append(recipe_step(machine, heads, layers, 8192, vocabulary, 1))
    rows.append(recipe_step(machine, "75%", layers, 8192, 160896, 16))
    peer = ["step", "--layers", layers, "--length", 8192]
    try:
        rows.append({"pytorch": machine.peer(*peer, seconds=590)})
    except Failed:
        rows.append({"pytorch": machine.peer(*peer, "--checkpointing", seconds=590)})
    return rows


def curve(machine):
    """Whole steps over lengths, with as many layers as the memory allows."""
    rows = []
    for length, layers in [(8192, 8), (16384, 8), (32768, 8), (65536, 4)]:
        for heads in HEADS:
            rows.append(recipe_step(machine, heads, layers, length, 128256, 1))
    return rows


def quickstart(machine):
    """The quickstart's losses on the GPU in bf16 against the CPU's in f32."""
    rows = {}
    for device, dtype in [("cpu", "f32"), (machine.arguments.device, "bf16")]:
        folder = machine.arguments.out / f"quickstart-{device}-{dtype}"
        start = time.monotonic()
        machine.run([machine.arguments.programs / "moh-train", "--recipe",
                     "recipes/quickstart.toml", "--set", f"run.device={device}",
                     "--set", f"run.dtype={dtype}", "--set", f"run.dir={folder}"], 590)
        summary = json.loads((folder / "summary.json").read_text())
        rows[f"{device} {dtype}"] = {"seconds": time.monotonic() - start, "summary": summary}
    return rows


def markdown(results):
    """The tables of the results."""
    lines = [f"Measured {results['date']} on {results['device']}, commit {results['commit']}.", ""]

    def table(header, rows):
        for row in [header, ["---"] * len(header), *rows]:
            lines.append("| " + " | ".join(map(str, row)) + " |")
        lines.append("")

    parts = results["parts"]
    for name, part in parts.items():
        if "failed" in part:
            lines += [f"**{name} failed:** {part['failed'].splitlines()[-1]}", ""]
    done = {name: part["found"] for name, part in parts.items() if "found" in part}
    if "tests" in done:
        table(["operator", "tests passed", "largest relative errors"],
              [[name, row["passed"], ", ".join(f"{what} {error:.1e}" for what, error in
                                               sorted(row["largest_relative_errors"].items()))]
               for name, row in done["tests"].items()])
    if "attention" in done:
        table(["tokens", "path", "heads", "forward ms", "backward ms", "TFLOP/s", "of dense", "route ms"],
              [[f"{row['batch']} x {row['length']}", row["path"],
                "dense" if case["attention"] == "dense" else f"{case['active']:.0%}",
                f"{case['forward']['seconds']['median'] * 1e3:.3f}",
                f"{case['backward']['seconds']['median'] * 1e3:.3f}",
                f"{case['both']['flops_per_second'] / 1e12:.0f}",
                f"{case['both']['ratio_to_dense']:.3f}",
                f"{case['route']['seconds']['median'] * 1e3:.3f}"]
               for row in done["attention"] for case in row["cases"]])
        table(["PyTorch", "tokens", "heads", "forward ms", "forward + backward ms"],
              [[peer.get("backend", peer["kind"]), f"{peer['batch']} x {peer['length']}",
                f"{peer.get('active', 1.0):.0%}", peer.get("forward_ms", "-"),
                peer.get("forward_backward_ms", peer.get("error", "-"))]
               for row in done["attention"] for peer in row["pytorch"]])
    steps = [row for name in ["step", "curve"] for row in done.get(name, [])]
    if steps:
        table(["layers", "tokens", "vocabulary", "heads", "tokens/s", "TFLOP/s",
               "of the bf16 matmul", "GiB"],
              [[row["model"]["layers"], f"{row['step']['micro_batches']} x "
                f"{row['step']['micro_batch']} x {row['step']['sequence_length']}",
                row["model"]["vocab_size"], row["heads"],
                f"{row['tokens_per_second']['median']:,.0f}",
                f"{row['flops_per_second']['median'] / 1e12:.0f}",
                f"{row['share_of_bf16_matmul']:.1%}",
                f"{row['memory']['peak_bytes'] / 2**30:.1f}" if row["memory"] else "-"]
               for row in steps if "model" in row])
        lines += [json.dumps(row) for row in steps if "pytorch" in row] + [""]
    if "operators" in done:
        table(["operator", "ms", "rate", "of limit"],
              [[row["operator"], f"{row['seconds']['median'] * 1e3:.4f}",
                f"{row['per_second'] / 1e9:,.0f} G{row['unit']}/s", f"{row['share_of_limit']:.0%}"]
               for row in done["operators"]])
    if "quickstart" in done:
        table(["quickstart: validation loss", *done["quickstart"]],
              [[moment(rows[0]), *(f"{row['loss']:.4f}" for row in rows)] for rows in zip(*(
                  run["summary"]["evaluations"] for run in done["quickstart"].values()))])
    for name in ["sanitizer", "limits"]:
        if name in done:
            lines += [f"{name}:", "", "    " + json.dumps(done[name], indent=1).replace(
                "\n", "\n    "), ""]
    return "\n".join(lines)


def moment(evaluation):
    """A moment of a run in words."""
    kind = evaluation["moment"]
    return kind if isinstance(kind, str) else " ".join(
        [*kind, *(str(value) for value in next(iter(kind.values())).values())])


def output(command):
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() or "unknown"
    except OSError:
        return "unknown"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, default=ROOT / "target/release")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--layers", type=int, default=32, help="of the steps of LLaMA-3-8B")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--peer", type=Path, default=ROOT / "tools/peer/gpu.py",
                        help="the PyTorch side")
    parser.add_argument("--no-peer", dest="peer", action="store_const", const=None)
    arguments = parser.parse_args()
    unknown = set(arguments.only.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"--only: {', '.join(sorted(unknown))}: the parts are {', '.join(PARTS)}")
    arguments.programs = arguments.programs.resolve()
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    machine = Machine(arguments)
    results = {
        "date": time.strftime("%Y-%m-%d"),
        "device": output(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]),
        "commit": output(["git", "rev-parse", "--short", "HEAD"]),
        "parts": {},
    }
    for name in arguments.only.split(","):
        start = time.monotonic()
        try:
            part = {"found": globals()[name](machine)}
        except Failed as error:
            part = {"failed": str(error)}
            print(f"{name} failed: {error}", flush=True)
        part["seconds"] = time.monotonic() - start
        results["parts"][name] = part
        # After every part: a run that is cut off keeps what it found.
        (arguments.out / "results.json").write_text(json.dumps(results, indent=1))
        (arguments.out / "results.md").write_text(markdown(results) + "\n")
    print((arguments.out / "results.md").read_text())
    return any("failed" in part for part in results["parts"].values())


if __name__ == "__main__":
    sys.exit(main())
