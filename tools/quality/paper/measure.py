#!/usr/bin/env python3
"""Repeats the paper's Tables 4 and 7 with small models from scratch, on real text by topic.

    cargo build --release --bin moh-data --bin moh-train --bin moh-eval
    tools/quality/paper/measure.py --table 4
    tools/quality/paper/measure.py --print

Everything is written to runs/paper, and a line for each run to results.jsonl beside this file; what has a line is not
measured again, and a run that was interrupted resumes with the same command. One seed of a table comes first, then the
next one. README.md says what the models and the text are. Run it from the repository's root.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from results import origin, read
from tasks import write_tasks
from text import TOPICS, prepare_text

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
WORK = Path("runs/paper")
TASKS = WORK / "tasks"
HEADS = 12


def two_stage(shared, active):
    """A model whose tokens compute so many heads, of which some are shared."""
    return f'{{ router = "two-stage", shared_heads = {shared}, routed_top_k = {active - shared} }}'


# By name: what the table says, and the heads; none of a dense model.
VARIANTS = {
    "dense": ("all 12 heads", None),
    "three-quarters": ("9 heads: 6 + 3 of 6", two_stage(6, 9)),
    "half": ("6 heads: 3 + 3 of 9", two_stage(3, 6)),
    "no-shared": ("9 heads: 0 + 9 of 12", two_stage(0, 9)),
    **{f"shared-{count}": (f"9 heads: {count} + {9 - count} of {HEADS - count}", two_stage(count, 9)) for count in (1, 2, 4, 5, 7)},
}
TABLES = {
    "4": ["dense", "three-quarters", "half"],
    "7": ["no-shared", "shared-1", "shared-2", "shared-4", "shared-5", "three-quarters", "shared-7"],
}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="append", choices=list(TABLES), help="the paper's table; all by default")
    parser.add_argument("--binaries", type=Path, default=ROOT / "target/release", help="our programs")
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl", help="%(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each model, with seeds from 1: %(default)s")
    parser.add_argument("--tokens", type=int, default=8_192_000, help="tokens of each run: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="threads of a run: %(default)s")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--print", action="store_true", help="print the tables of what was measured, and measure nothing")
    return parser.parse_args()


def identity(row):
    return row["variant"], row["tokens"], row["seed"]


class Measurement:
    """The programs, and where they write."""

    def __init__(self, options):
        self.options = options

    def run(self, program, *arguments):
        environment = os.environ | {"RAYON_NUM_THREADS": str(self.options.threads)}
        command = [str(self.options.binaries / program), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
        return done.stdout

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
            self.run("moh-data", "tokenizer", "--vocab-size", 4096, "--out", tokenizer, *training)
        for topic in TOPICS:
            for part in ("train", "valid"):
                prefix = WORK / f"{topic}-{part}"
                if not (ROOT / f"{prefix}.idx").exists():
                    self.run("moh-data", "prepare", "--tokenizer", tokenizer, "--out", prefix, texts / f"{topic}-{part}.jsonl")

    def measure(self, row):
        """Trains a model, and gives the row with its losses by topic."""
        run = WORK / "{variant}-{tokens}-{seed}".format(**row)
        _, heads = VARIANTS[row["variant"]]
        settings = {
            "run.dir": run,
            "run.seed": row["seed"],
            "run.device": self.options.device,
            "stage.pretrain.tokens": row["tokens"],
        }
        if heads:
            settings |= {"model.new.moh": heads, "stage.pretrain.attention": "moh"}
        overrides = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        self.run("moh-train", "--recipe", HERE.relative_to(ROOT) / "model.toml", *overrides)
        last = (ROOT / run / "metrics.jsonl").read_text().splitlines()[-1]
        losses = {topic: found["loss"] for topic, found in json.loads(last)["validation"].items()}
        return row | {"losses": losses, "tasks": self.scores(run), **origin()}

    def scores(self, run):
        """The accuracy of a run's model in each task, in percent: of choices by their characters, as `acc_norm` is."""
        tasks = sorted((ROOT / TASKS).glob("*.jsonl"))
        found = json.loads(self.run("moh-eval", "tasks", "--model", run / "export", "--json", *tasks))["tasks"]
        return {Path(task["task"]).stem: 100 * task["acc_norm" if task["kind"] == "multiple_choice" else "acc"] for task in found}


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
    measurement = Measurement(options)
    measurement.prepare()
    names = dict.fromkeys(variant for table in tables for variant in TABLES[table])
    rows = [{"variant": name, "tokens": options.tokens, "seed": seed + 1} for seed in range(options.seeds) for name in names]
    rows = [row for row in rows if identity(row) not in {identity(row) for row in known}]
    print(f"{len(known)} results, {len(rows)} runs to go", flush=True)
    for row in rows:
        row = measurement.measure(row)
        with options.results.open("a") as out:
            out.write(json.dumps(row) + "\n")
        print("{variant}, seed {seed}: {losses}".format(**row), flush=True)


if __name__ == "__main__":
    main()
