#!/usr/bin/env python3
"""Repeats the paper's Tables 4, 6 and 7, and its continue-tuning, with small models on real text by topic.

    cargo build --release --bin moh-data --bin moh-train --bin moh-serve
    .venv/bin/python tools/quality/paper/measure.py --table 4
    tools/quality/paper/measure.py --print

Everything is written to runs/paper, and a line for each run to results.jsonl beside this file; what has a line is not
measured again, and a run that was interrupted resumes with the same command. One seed of a table comes first, then the
next one. README.md says what the models and the text are. Run it from the repository's root.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "eval"))
import harness
from programs import Programs, add_options, measure_rows
from results import ROOT, read
from tasks import write_tasks
from text import TOPICS, prepare_text

HERE = Path(__file__).resolve().parent
WORK = Path("runs/paper")
TASKS = WORK / "tasks"
HEADS = 12
# Sequences of a micro-batch: a step has 32, and a GPU computes them together.
MICRO_BATCH = {"cpu": 8, "cuda": 32}


def moh(shared, active, router="two-stage"):
    """Heads of which tokens compute `active`, some of them shared."""
    return f'{{ router = "{router}", shared_heads = {shared}, routed_top_k = {active - shared} }}'


def from_scratch(heads):
    """What differs in a Mixture-of-Head model that is trained from scratch."""
    return {"model.new.moh": heads, "stage.pretrain.attention": "moh"}


def stages(tokens, micro_batch, changes):
    """The keys of a run's stages: that of the recipe, or without changes two alike, as continue-tuning has."""
    if changes is not None:
        return {"stage.pretrain.tokens": tokens, "stage.pretrain.micro_batch": micro_batch, **changes}
    rate = "{ max = 2e-3, min = 2e-4, warmup_steps = 50 }"
    common = f"batch_tokens = 8192, micro_batch = {micro_batch}, learning_rate = {rate}, tokens = {tokens // 2}"
    dense = f'name = "dense", attention = "dense", {common}'
    tuned = f'name = "moh", attention = "moh", moh = {moh(6, 9, "query-norm")}, {common}'
    return {"stage": f"[{{ {dense} }}, {{ {tuned} }}]"}


# By name: what the table says, and what differs from the recipe.
VARIANTS = {
    "dense": ("all 12 heads", {}),
    "three-quarters": ("9 heads: 6 + 3 of 6", from_scratch(moh(6, 9))),
    "half": ("6 heads: 3 + 3 of 9", from_scratch(moh(3, 6))),
    "no-shared": ("9 heads: 0 + 9 of 12", from_scratch(moh(0, 9))),
    "one-stage": ("9 heads: 6 + 3 of 6, one stage", from_scratch(moh(6, 9, "one-stage"))),
    **{f"shared-{count}": (f"9 heads: {count} + {9 - count} of {HEADS - count}", from_scratch(moh(count, 9))) for count in (1, 2, 4, 5, 7)},
    "query-norm": ("9 heads: 6 + 3 of 6, by query norms", from_scratch(moh(6, 9, "query-norm"))),
    # Half of the tokens in each of two stages.
    "continued": ("dense for half of the tokens, then 9 heads: 6 + 3 of 6, by query norms", None),
}
TABLES = {
    "4": ["dense", "three-quarters", "half"],
    "6": ["no-shared", "one-stage", "three-quarters"],
    "7": ["no-shared", "shared-1", "shared-2", "shared-4", "shared-5", "three-quarters", "shared-7"],
    "continue": ["dense", "continued", "query-norm", "three-quarters"],
}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="append", choices=list(TABLES), help="the paper's table; all by default")
    add_options(parser, HERE)
    parser.add_argument("--tokens", type=int, default=8_192_000, help="tokens of each run: %(default)s")
    parser.add_argument("--print", action="store_true", help="print the tables of what was measured, and measure nothing")
    return parser.parse_args()


def identity(row):
    return row["variant"], row["tokens"], row["seed"]


class Measurement:
    """The programs, and where they write."""

    def __init__(self, options):
        self.programs = Programs(options)
        # The harness has global state.
        self.harness_lock = threading.Lock()

    def prepare(self):
        """The text, a tokenizer of it, and token files by topic."""
        texts = WORK / "text"
        if not (ROOT / texts / "done").exists():
            prepare_text(ROOT / texts)
            (ROOT / texts / "done").touch()
        if not (ROOT / TASKS).exists():
            write_tasks(ROOT / texts, ROOT / TASKS)
        tokenizer = WORK / "tokenizer"
        if not (ROOT / tokenizer).exists():
            training = [texts / f"{topic}-train.jsonl" for topic in TOPICS]
            train = [sys.executable, "tools/data/train_tokenizer.py", "--vocab-size", "4096", "--out", tokenizer, *training]
            subprocess.run(train, cwd=ROOT, check=True)
        for topic in TOPICS:
            for part in ("train", "valid"):
                prefix = WORK / f"{topic}-{part}"
                if not (ROOT / f"{prefix}.idx").exists():
                    self.programs.run("moh-data", "prepare", "--tokenizer", tokenizer, "--out", prefix, texts / f"{topic}-{part}.jsonl")

    def measure(self, row):
        """Trains a model, and gives the row with its losses by topic."""
        run = WORK / "{variant}-{tokens}-{seed}".format(**row)
        keys = stages(row["tokens"], MICRO_BATCH[self.programs.device], VARIANTS[row["variant"]][1])
        self.programs.train(HERE / "model.toml", {"run.dir": run, "run.seed": row["seed"], **keys})
        last = (ROOT / run / "metrics.jsonl").read_text().splitlines()[-1]
        losses = {topic: found["loss"] for topic, found in json.loads(last)["validation"].items()}
        return row | {"losses": losses, "tasks": self.scores(run)}

    def scores(self, run):
        """The accuracy of a run's model in each task, in percent: of choices by their characters, as `acc_norm` is."""
        paths = {path.stem: path for path in sorted((ROOT / TASKS).glob("*.jsonl"))}
        program, export = self.programs.binaries / "moh-serve", ROOT / run / "export"
        with self.harness_lock, tempfile.TemporaryDirectory() as folder:
            for name, path in paths.items():
                harness.write_local_task(path, f"local_{name}", Path(folder))
            with harness.served_model(program, export, "--device", self.programs.device) as model:
                found = harness.evaluate(model, [f"local_{name}" for name in paths], Path(folder))["results"]
        results = {name: found[f"local_{name}"] for name in paths}
        return {name: 100 * result.get("acc_norm,none", result["acc,none"]) for name, result in results.items()}


def cell(values, digits):
    """The mean, and of several seeds the difference of the largest and the smallest."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({max(values) - min(values):.{digits}f})"


def print_table(title, names, rows, key, digits):
    """What the models of a table have under a key of their rows, and the mean of it."""
    columns = list(rows[0][key])
    print(f"### {title}\n\n| | {' | '.join(columns)} | mean |\n{'|---' * (len(columns) + 2)}|")
    for name in names:
        found = [row[key] for row in rows if row["variant"] == name]
        if found:
            cells = [cell([values[column] for values in found], digits) for column in columns]
            cells.append(cell([statistics.mean(values.values()) for values in found], digits))
            print(f"| {VARIANTS[name][0]} | {' | '.join(cells)} |")
    print()


def main():
    options = parse()
    tables = options.table or list(TABLES)
    known = read(options.results)
    if options.print:
        for table in tables:
            names = TABLES[table]
            rows = [row for row in known if row["tokens"] == options.tokens and row["variant"] in names]
            if rows:
                print_table(f"Table {table}: losses", names, rows, "losses", 4)
                print_table(f"Table {table}: accuracies, in percent", names, rows, "tasks", 1)
        return
    harness.offline()
    harness.require()
    measurement = Measurement(options)
    measurement.prepare()
    names = dict.fromkeys(variant for table in tables for variant in TABLES[table])
    rows = [{"variant": name, "tokens": options.tokens, "seed": seed + 1} for seed in range(options.seeds) for name in names]
    rows = [row for row in rows if identity(row) not in {identity(row) for row in known}]
    print(f"{len(known)} results, {len(rows)} runs to go", flush=True)
    measure_rows(rows, measurement.measure, options, lambda row: "{variant}, seed {seed}: {losses}".format(**row))


if __name__ == "__main__":
    harness.run(main)
