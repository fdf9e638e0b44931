"""A small run that can be repeated: token files, a recipe, and the files that a run leaves."""

import hashlib
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import time
from pathlib import Path

VOCABULARY = 64
# Maximum seconds of a run of this size.
LIMIT = 300
# Maximum seconds until a launcher ends after its last rank.
LAUNCHER_LIMIT = 10
# Fields of a line of metrics that differ between two runs with equal bits.
SPEED = {"tokens_per_second", "speed"}

RECIPE = """
[run]
dir = "{run}"
seed = 1
device = "cpu"
dtype = "bf16"

[model.new]
vocab_size = 64
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 8
initializer_range = 0.1

[data]
sequence_length = 16
sources = [{{ path = "{data}/text" }}]
validation = {{ path = "{data}/held-out", batches = 2, every_steps = 7 }}

[[stage]]
name = "adapt"
attention = "dense"
tokens = {tokens}
batch_tokens = 128
micro_batch = 2
learning_rate = {{ max = 1e-2, min = 1e-3, warmup_steps = 2 }}

[[stage]]
name = "moh"
attention = "moh"
moh = {{ shared_heads = 1, routed_top_k = 2 }}
tokens = {tokens}
batch_tokens = 128
micro_batch = 2
learning_rate = {{ max = 5e-3, min = 1e-3, warmup_steps = 1 }}

[checkpoint]
every_steps = {every}
keep = 3
"""


def write_tokens(prefix: Path, seed: int, documents: int) -> None:
    """Writes a token file in Megatron's format, with short documents in which the next token is mostly the
    last token plus 1."""
    generator = random.Random(seed)
    lengths, tokens = [], []
    for _ in range(documents):
        token, length = generator.randrange(VOCABULARY), generator.randrange(5, 60)
        for _ in range(length):
            token = (token + 1) % VOCABULARY if generator.random() < 0.9 else generator.randrange(VOCABULARY)
            tokens.append(token)
        lengths.append(length)
    prefix.with_suffix(".bin").write_bytes(struct.pack(f"<{len(tokens)}H", *tokens))
    offsets, at = [], 0
    for length in lengths:
        offsets.append(at)
        at += 2 * length
    uint16 = 8
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, uint16, documents, documents + 1)
    tables = struct.pack(f"<{documents}i{documents}q", *lengths, *offsets)
    bounds = struct.pack(f"<{documents + 1}q", *range(documents + 1))
    prefix.with_suffix(".idx").write_bytes(header + tables + bounds)


class Workplace:
    """A folder with token files, a recipe and the uninterrupted run."""

    def __init__(self, program: Path, folder: Path, steps: int, every: int, launcher: tuple = ()):
        self.program, self.folder, self.launcher = program, folder, launcher
        folder.mkdir(parents=True, exist_ok=True)
        write_tokens(folder / "text", 1, 400)
        write_tokens(folder / "held-out", 2, 60)
        self.recipe = folder / "recipe.toml"
        text = RECIPE.format(run=folder / "reference", data=folder, tokens=64 * steps, every=every)
        self.recipe.write_text(text)
        finished = self.end(self.start(folder / "reference"))
        if finished != 0:
            raise SystemExit(f"the uninterrupted run ended with code {finished}: {self.log(folder / 'reference')}")
        self.reference = results(folder / "reference")

    def command(self, run: Path, *more: str) -> list:
        program = [str(self.program), "--recipe", str(self.recipe), "--set", f"run.dir={run}", *more]
        return [*self.launcher, *program]

    def start(self, run: Path, *more: str, **options) -> subprocess.Popen:
        """Starts or continues the run. Its output is appended to a file next to its directory."""
        if "stderr" not in options and "stdout" not in options:
            options["stdout"] = options["stderr"] = open(self.log_file(run), "ab")
        return subprocess.Popen(self.command(run, *more), **options)

    def end(self, process: subprocess.Popen) -> int:
        """Waits for the end of a run and returns its code. If a rank does not end, that is a loss.

        A launcher is killed if its ranks have ended and it does not end: after the death of a rank, mpirun of
        Open MPI 4.1 may wait forever for a lock of PMIx 4.2 (in PMIx_server_finalize).
        """
        start = alive = time.monotonic()
        while True:
            try:
                return process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                pass
            now = time.monotonic()
            if not self.launcher or programs_below(process.pid, self.program):
                alive = now
            if now - alive > LAUNCHER_LIMIT:
                process.send_signal(signal.SIGKILL)
            elif now - start > LIMIT:
                ranks = programs_below(process.pid, self.program)
                process.kill()
                raise SystemExit(f"process {process.pid} with ranks {ranks} has not ended within {LIMIT} seconds")

    @staticmethod
    def log_file(run: Path) -> Path:
        return run.parent / f"{run.name}.log"

    def log(self, run: Path) -> str:
        return self.log_file(run).read_text(errors="replace")[-2000:]

    def differs(self, run: Path) -> str:
        """Returns the differences from the uninterrupted run. Empty if there are none."""
        found = results(run)
        return ", ".join(name for name in self.reference if found.get(name) != self.reference[name])


def results(run: Path) -> dict:
    """Returns the metrics without speed, and the hash of each exported file."""
    lines = []
    metrics = run / "metrics.jsonl"
    if metrics.exists():
        for line in metrics.read_text().splitlines():
            fields = json.loads(line)
            lines.append({name: value for name, value in fields.items() if name not in SPEED})
    found = {"metrics.jsonl": lines}
    for file in sorted((run / "export").glob("*")) if (run / "export").is_dir() else []:
        found[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def steps(run: Path) -> list:
    """Returns the steps of the run's checkpoints, ascending."""
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


def snapshot(folder: Path) -> dict:
    """Returns every file below a folder with the hash of its content, except the content of a lock."""
    found = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root) / name
            if name != ".lock":
                found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def programs_below(pid: int, program: Path) -> list:
    """Returns the processes that run `program` and descend from process `pid`."""
    found, open_pids = [], [pid]
    while open_pids:
        parent = open_pids.pop()
        try:
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            open_pids.append(child)
            try:
                if Path(f"/proc/{child}/exe").resolve() == program:
                    found.append(child)
            except OSError:
                pass
    return found
