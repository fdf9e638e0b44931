#!/usr/bin/env python3
"""Measures ways from a dense model to a Mixture-of-Head model, on two small test beds.

    cargo build --release --bin moh-convert --bin moh-data --bin moh-train
    tools/quality/measure.py
    tools/quality/table.py

Each result is a line of results.jsonl, and what has one is not measured again: interrupt it and give the same command
to go on. README.md beside this file says what is measured. Run it from the repository's root.
"""

import argparse
import json
import sys
from pathlib import Path

from beds import BEDS, WORK
from programs import Programs, add_options, measure_rows
from results import read
from variants import VARIANTS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BATCH_TOKENS = 4096


def parse():
    names = [variant.name for variant in VARIANTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, HERE)
    parser.add_argument("--bed", action="append", choices=list(BEDS), help="all by default")
    parser.add_argument("--variant", action="append", choices=names, help="all by default")
    parser.add_argument("--max-steps", type=int, default=4000, help="leave longer runs out: %(default)s")
    return parser.parse_args()


def identity(row):
    return row["bed"], row["variant"], row["share"], row["steps"], row["seed"]


def wanted(options):
    """What is to be measured, first one seed of everything."""
    for seed in range(1, options.seeds + 1):
        for bed in options.bed or BEDS:
            for variant in VARIANTS:
                if options.variant and variant.name not in options.variant:
                    continue
                for steps in variant.steps:
                    for share in variant.shares:
                        if steps <= options.max_steps:
                            yield {"bed": bed, "variant": variant.name, "share": share, "steps": steps, "seed": seed}


class Measurement:
    """The programs, and where they write."""

    def __init__(self, options):
        self.programs = Programs(options)
        self.variants = {variant.name: variant for variant in VARIANTS}

    def model(self, bed, variant, share):
        """The directory of the converted model, which all seeds and steps share."""
        if variant.name == "dense":
            return bed.dense
        out = WORK / bed.name / f"{variant.name.removesuffix('-teacher')}-{share}"
        calibration = ["--calibration", bed.train, "--calibration-length", "256", "--calibration-tokens", "16384"]
        if not (ROOT / out).exists():
            self.programs.run("moh-convert", "--from", bed.dense, "--out", out, *variant.conversion(share, calibration))
        return out

    def measure(self, row):
        """Trains one run, and gives the row with its losses."""
        bed, variant = BEDS[row["bed"]], self.variants[row["variant"]]
        run = WORK / bed.name / "{variant}-{share}-{steps}-{seed}".format(**row)
        settings = {
            "run.dir": run,
            "run.seed": row["seed"],
            "model.from": self.model(bed, variant, row["share"]),
            "data.sources": f'[{{ path = "{bed.train}" }}]',
            "data.validation.path": bed.valid,
            "stage.tune.tokens": row["steps"] * BATCH_TOKENS,
            "stage.tune.attention": "dense" if variant.name == "dense" else "moh",
        }
        if variant.teacher:
            settings["stage.tune.distill"] = f'{{ teacher = "{bed.dense}" }}'
        self.programs.train(HERE / "tune.toml", settings)
        losses = json.loads((ROOT / run / "summary.json").read_text())["evaluations"]
        return row | {"untuned": losses[0]["loss"], "loss": losses[-1]["loss"]}


def main():
    options = parse()
    measurement = Measurement(options)
    for name in options.bed or BEDS:
        BEDS[name].prepare(measurement.programs.run)
    # What was measured in another type is measured in this one too: table.py needs all seeds in one type.
    known = {identity(row) for row in read(options.results) if row.get("dtype", "f32") == options.dtype}
    rows = [row for row in wanted(options) if identity(row) not in known]
    print(f"{len(known)} results, {len(rows)} runs to go", flush=True)
    # Conversions first: several runs start from one.
    for row in rows:
        measurement.model(BEDS[row["bed"]], measurement.variants[row["variant"]], row["share"])
    text = "{bed} {variant} {share} {steps} steps, seed {seed}: {untuned:.4f} -> {loss:.4f}"
    measure_rows(rows, measurement.measure, options, lambda row: text.format(**row))


if __name__ == "__main__":
    sys.exit(main())
