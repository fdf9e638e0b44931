#!/usr/bin/env python3
"""Tunes conversions of SmolLM2-135M-Instruct to Mixture-of-Head on prose and Python's documentation, and the dense model alike.

    cargo build --release --bin moh-convert --bin moh-data --bin moh-eval --bin moh-train
    .venv/bin/python tools/quality/smol/tune.py
    tools/quality/smol/tune.py --print

Each result is a line of tuned.jsonl, and what has one on the same text is not measured again. A run that was interrupted
resumes with the same command. A line has the losses on the windows of measure.py before and after.
"""

import argparse
import json
import time
from pathlib import Path

# Before bed, which looks for modules in the folder above first.
from measure import VARIANTS, Measurement, processor  # isort: skip
from bed import MODEL, TOPICS, WORK, make, text_id
from programs import add_options, measure_rows
from results import read

HERE = Path(__file__).resolve().parent
# What a run learns from: the dense model's distribution, the tokens of the text, or both.
TARGETS = {
    "teacher": f'{{ teacher = "{MODEL}", cross_entropy = 0 }}',
    "text": None,
    "both": f'{{ teacher = "{MODEL}" }}',
}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, HERE)
    parser.set_defaults(results=HERE / "tuned.jsonl", seeds=1)
    parser.add_argument("--variant", action="append", choices=list(VARIANTS), metavar="NAME", help="of measure.py; dense by default")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="what it learns from: text by default")
    parser.add_argument("--rate", action="append", type=float, help="highest learning rate: 3e-4 by default")
    parser.add_argument("--tokens", type=int, default=262_144, help="tokens of training: %(default)s")
    parser.add_argument("--print", action="store_true", help="print the table of what was measured, and measure nothing")
    return parser.parse_args()


def wanted(options, text):
    """What is to be measured, first one seed of everything."""
    for seed in range(1, options.seeds + 1):
        for variant in options.variant or ["dense"]:
            for target in options.target or ["text"]:
                for rate in options.rate or [3e-4]:
                    yield {"variant": variant, "target": target, "tokens": options.tokens, "rate": rate, "seed": seed, "text": text}


class Tuning:
    def __init__(self, options):
        self.conversions = Measurement(options)
        self.programs = self.conversions.programs
        # Losses before training, by model: all runs of a conversion have the same.
        self.untuned = {}

    def measure(self, row):
        """Trains one run, and gives the row with its losses."""
        name = "{variant}-{target}-{tokens}-{rate}-{seed}".format(**row).replace(" ", "-").replace(",", "")
        run = WORK / "tuned" / name
        settings = {
            "run.dir": run,
            "run.seed": row["seed"],
            "model.from": self.conversions.model(row["variant"]),
            "stage.tune.attention": "dense" if row["variant"] == "dense" else "moh",
            "stage.tune.tokens": row["tokens"],
            "stage.tune.learning_rate.max": row["rate"],
        }
        if TARGETS[row["target"]]:
            settings["stage.tune.distill"] = TARGETS[row["target"]]
        start = time.monotonic()
        self.programs.train(HERE / "tune.toml", settings)
        seconds = round(time.monotonic() - start, 1)
        model, losses = settings["model.from"], self.conversions.loss(run / "export")
        if model not in self.untuned:
            self.untuned[model] = self.conversions.loss(model)
        return row | {"untuned": self.untuned[model], "losses": losses, "seconds": seconds, "processor": processor()}


def shown(row, dense):
    above = [f"{row['losses'][topic] - dense[topic]:+.4f}" for topic in TOPICS]
    cells = [row["variant"], row["target"], f"{row['tokens']:,}", str(row["rate"]), str(row["seed"])]
    return "| " + " | ".join([*cells, *above, str(row["seconds"])]) + " |"


def main():
    options = parse()
    rows = read(options.results)
    if not options.print:
        tuning = Tuning(options)
        make(tuning.programs)
        keys = ["variant", "target", "tokens", "rate", "seed", "text"]
        known = [[row[key] for key in keys] for row in rows]
        missing = [row for row in wanted(options, text_id()) if [row[key] for key in keys] not in known]
        measure_rows(missing, tuning.measure, options, json.dumps)
        rows = read(options.results)
    # Losses on other text are not comparable.
    rows = [row for row in rows if row["text"] == rows[-1]["text"]]
    dense = next((row["untuned"] for row in rows if row["variant"] == "dense"), dict.fromkeys(TOPICS, 0.0))
    print("| nats above the untuned dense model | learns from | tokens | rate | seed |", " | ".join(TOPICS), "| seconds |")
    print("|---|" + "---|" * (len(TOPICS) + 5))
    print("\n".join(shown(row, dense) for row in rows))


if __name__ == "__main__":
    main()
