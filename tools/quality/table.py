#!/usr/bin/env python3
"""Prints the tables of docs/quality.md from the results that measure.py has written.

    tools/quality/table.py [RESULTS]
"""

import collections
import statistics
import sys
from pathlib import Path

from beds import BEDS
from measure import BATCH_TOKENS, HERE
from results import read
from variants import VARIANTS

SHARES = (0.75, 0.5)
LENGTHS = (300, 2000)
# Lines of routed heads, and of fixed ones of the same share.
LEADS = (
    ("heads", "measured", "static"),
    ("heads, teacher", "measured-teacher", "static-teacher"),
    ("heads, two-stage", "two-stage-measured", "static"),
    ("heads, two-stage, teacher", "two-stage-measured-teacher", "static-teacher"),
    ("heads, two-stage, first heads", "two-stage", "static"),
    ("whole groups", "group", "fixed-groups"),
    ("whole groups, teacher", "group-teacher", "fixed-groups-teacher"),
)


def dtype_of(row):
    """The type that it was trained in."""
    return row.get("dtype", "f32")


class Results:
    """The losses of one test bed: of each length in the type in which most were measured, so that all compare."""

    def __init__(self, rows, bed):
        rows = [row for row in rows if row["bed"] == bed]
        # Before training; f32, which is sorted last, replaces bf16.
        self.of_source = {(row["variant"], row["share"]): row["untuned"] for row in sorted(rows, key=dtype_of)}
        counts = collections.Counter((row["steps"], dtype_of(row)) for row in rows)
        self.dtypes = {steps: dtype for (steps, dtype), _ in sorted(counts.items(), key=lambda pair: pair[1])}
        self.rows = [row for row in rows if dtype_of(row) == self.dtypes[row["steps"]]]

    def by_seed(self, variant, share, steps):
        """The loss of each seed."""
        wanted = (variant, share, steps)
        return {row["seed"]: row["loss"] for row in self.rows if (row["variant"], row["share"], row["steps"]) == wanted}

    def losses(self, variant, share, steps):
        """Those of all seeds."""
        return list(self.by_seed(variant, share, steps).values())

    def devices(self, variant, share, steps):
        """Where they were trained."""
        wanted = (variant, share, steps)
        return {row.get("device", "cpu") for row in self.rows if (row["variant"], row["share"], row["steps"]) == wanted}

    def untuned(self, variant, share):
        loss = self.of_source.get((variant, share))
        return f"{loss:.4f}" if loss else ""

    def paper_tokens(self, share, loss):
        """Tokens after which the paper's way has a loss, by its shortest run that has."""
        lengths = sorted({row["steps"] for row in self.rows if row["variant"] == "paper" and row["share"] == share})
        for steps in lengths:
            if statistics.mean(self.losses("paper", share, steps)) <= loss:
                return f"{steps * BATCH_TOKENS / 1e6:.1f} M"
        return f"> {lengths[-1] * BATCH_TOKENS / 1e6:.1f} M" if lengths else ""


def markdown(header, lines):
    """A table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *lines)]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]])


def spread(losses):
    """The difference of the largest and the smallest."""
    return max(losses) - min(losses)


def cell(losses):
    """The mean, and with several seeds the difference of the largest and the smallest loss."""
    if not losses:
        return ""
    mean = f"{statistics.mean(losses):.4f}"
    return mean if len(losses) == 1 else f"{mean} ({spread(losses):.4f})"


def line(results, variant):
    """The cells of a line of a table, or none if nothing of the variant was measured."""
    cells = [variant.text]
    for share in SHARES:
        of = share if variant.name != "dense" else 1.0
        tuned = [results.losses(variant.name, of, steps) for steps in LENGTHS]
        cells += [results.untuned(variant.name, of), *map(cell, tuned)]
        enough = tuned[0] and variant.name not in ("dense", "paper")
        cells.append(results.paper_tokens(share, statistics.mean(tuned[0])) if enough else "")
    return cells if any(cells[1:]) else None


def table(results):
    columns = ["untuned", *(f"{steps} steps" for steps in LENGTHS), "the paper's way takes"]
    header = ["", *(f"{share:.0%}: {columns[0]}" if column == columns[0] else column for share in SHARES for column in columns)]
    return markdown(header, filter(None, (line(results, variant) for variant in VARIANTS)))


def lead(results, routed, fixed, share, steps):
    """By how much routing ends below fixed heads: the mean, bold if it is more than twice the spread of the seeds of either
    line, and each seed. A star: the lines were trained on different devices."""
    star = "" if results.devices(routed, share, steps) == results.devices(fixed, share, steps) else "*"
    routed, fixed = results.by_seed(routed, share, steps), results.by_seed(fixed, share, steps)
    seeds = sorted(routed.keys() & fixed.keys())
    if not seeds:
        return ""
    leads = [fixed[seed] - routed[seed] for seed in seeds]
    mean = f"{statistics.mean(leads):+.4f}{star}"
    if len(seeds) == 1:
        return mean
    if not star and statistics.mean(leads) > 2 * max(spread(routed.values()), spread(fixed.values())):
        mean = f"**{mean}**"
    return f"{mean} ({', '.join(f'{seed:+.4f}' for seed in leads)})"


def lead_table(results):
    columns = [(share, steps) for share in SHARES for steps in LENGTHS]
    header = ["routed against fixed", *(f"{share:.0%}, {steps} steps" for share, steps in columns)]
    return markdown(
        header,
        ([text, *(lead(results, routed, fixed, *column) for column in columns)] for text, routed, fixed in LEADS),
    )


def main():
    rows = read(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results.jsonl")
    for bed in BEDS.values():
        results = Results(rows, bed.name)
        types = ", ".join(f"{steps} steps in {results.dtypes[steps]}" for steps in LENGTHS if steps in results.dtypes)
        print(f"### {bed.text[0].upper()}{bed.text[1:]}\n\nTrained {types}:\n\n{table(results)}\n\n{lead_table(results)}\n")


if __name__ == "__main__":
    main()
