"""Parses the programs' output: one reader per kind of case.

A reader gets the output of a command and returns the part of a row called `result`. It raises
`NotPassed` if the result is missing, or if the case measured something else or nothing.
Readers also get the output of commands that failed: their results are kept.
"""

import csv
import json
import math
import re
import time
from pathlib import Path

import cases

# Of the labels of relative errors, and of the metrics of a kernel.
MAX_LABELS = 100
MAX_METRICS = 400
# Maximum seconds of the search for JSON. Output with many braces needs an attempt for each brace.
SEARCH = 1.0


class NotPassed(Exception):
    """The reason why a case with exit code 0 did not pass, and the result in its output."""

    status = "failed"

    def __init__(self, why, result=None):
        super().__init__(why)
        self.result = result


class Unreadable(NotPassed):
    """The output is not a successful program's."""

    status = "unreadable output"


class Skipped(NotPassed):
    """The machine lacks a requirement of the case, or the program was built without it."""

    status = "skipped"


def first_object(text, names):
    """Returns the first JSON object with these fields and some content in them. The rest is ignored."""
    why, at, end = "", text.find("{"), time.monotonic() + SEARCH
    while at >= 0 and time.monotonic() < end:
        try:
            found, past = json.JSONDecoder().raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            why, past = why or f"the JSON cannot be read: {error}", at + 1
        else:
            missing = [name for name in names if not found.get(name)]
            if not missing:
                return found
            why = why or f"the JSON has no {', '.join(missing)}"
        at = text.find("{", past)
    raise Unreadable(why or "there is no JSON in the output")


def with_fields(*names):
    """Returns a reader of a single object with these fields."""
    return lambda finished, _case: first_object(finished.stdout, names)


def limits(finished, case):
    return {"machine": with_fields("machine")(finished, case)["machine"]}


def attention(finished, case):
    """Reads the cases of `moh-bench attention`, which must have run on the selected path."""
    found = with_fields("shape", "cases")(finished, case)
    wanted = case.variables.get("MOH_ATTENTION")
    # For shapes that a path does not support, the program uses the next path.
    paths = {str(part.get("path")) for part in found["cases"]}
    if wanted and paths != {wanted}:
        raise NotPassed(f"attention ran on {', '.join(sorted(paths))}: expected {wanted}", found)
    return found


def step(finished, case):
    """Reads a training step."""
    found = with_fields("model", "step", "tokens_per_second", "loss")(finished, case)
    check_losses(found)
    return found


def check_losses(found):
    """Rejects a step with losses that are not finite: such numbers are null in JSON."""
    losses = [found["loss"][moment] for moment in ["first", "last"]]
    if any(loss is None or not math.isfinite(loss) for loss in losses):
        raise NotPassed("the loss is not finite", found)


def kernels(finished, case):
    """Reads a step and the GPU's time in it by kernel."""
    found = with_fields("model", "step", "gpu_time")(finished, case)
    if not found["gpu_time"].get("kernels"):
        raise NotPassed("no kernel was recorded", found)
    check_losses(found)
    return found


def json_lines(finished, _case):
    """Reads the rows of the PyTorch side, which also prints other lines."""
    rows, broken = [], 0
    for line in finished.stdout.splitlines():
        if line.startswith("{"):
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError):
                broken += 1
    if not rows:
        raise Unreadable("there is no line of JSON in the output")
    result = {"rows": rows} | ({"broken_lines": broken} if broken else {})
    errors = [row["error"] for row in rows if "error" in row]
    if len(errors) == len(rows):
        raise NotPassed(f"every row has an error: {errors[0]}", result)
    return result


# With a single thread, `--nocapture` puts the test's name before the first line that a test prints.
BEGUN = r"^(?:test \S+ \.\.\. )?"
ERROR = re.compile(
    BEGUN + r"(\S.*?): (\w+) relative error (\d[\d.]*(?:e[-+]?\d+)?|inf|NaN)$", re.M)
SKIPPED = re.compile(BEGUN + r"(skipped.*)$", re.M)
SUMMARY = re.compile(r"^test result: .*?(\d+) passed; (\d+) failed; (\d+) ignored", re.M)


def counts_of_tests(text):
    """Returns the tests that passed, failed and were ignored, by libtest's summaries. None without a summary."""
    summaries = [tuple(map(int, found)) for found in SUMMARY.findall(text)]
    return tuple(map(sum, zip(*summaries))) if summaries else None


def tests(finished, case):
    """Reads the output of libtest and the tests. A run without tests is not a result."""
    text = finished.stdout
    counts = counts_of_tests(text)
    passed, failed, ignored = counts or (0, 0, 0)
    largest = {}
    for what, kind, error in ERROR.findall(text):
        # NaN counts as the largest error, since it does not compare.
        error = float(error) if error != "NaN" else float("inf")
        name = f"{what} {kind}"
        largest[name] = max(largest.get(name, 0.0), error)
    names = sorted(largest, key=lambda name: largest[name], reverse=True)[:MAX_LABELS]
    result = {"passed": passed, "failed": failed,
              "largest_relative_errors": {name: largest[name] for name in names}}
    if ignored:
        result["ignored"] = ignored
    if failed and (at := text.rfind("\nfailures:\n")) >= 0:
        result["failed_tests"] = re.findall(r"^    (\S+)$", text[at:], re.M)
    if skipped := SKIPPED.findall(text):
        result["skipped"] = skipped[:10]
    if not counts:
        # The program died. The errors up to then are kept.
        raise Unreadable("there is no summary of tests in the output", result)
    if passed + failed == 0:
        raise Unreadable("no test ran: none has the name, or all are ignored")
    check_number(passed + failed, case, result)
    if skipped:
        raise Skipped(skipped[0], result)
    return result


def check_number(ran, case, result):
    """Rejects a result if a case names its tests and another number of them ran."""
    if case.num_tests is not None and ran != case.num_tests:
        raise NotPassed(f"{ran} tests ran, expected {case.num_tests}: no test has the name, or it "
                        "did not end", result)


# The test that compute-sanitizer runs names each path.
ON_HOPPER = re.compile(BEGUN + "Hopper, ", re.M)


def sanitizer(finished, case):
    """Reads the summary, and the kinds of errors with their counts.

    The summary also has no error if the test does not exist or no kernel has the name. So the test
    must have passed and, if only Hopper's kernels are checked, must have run them.
    """
    text = finished.stdout + "\n" + finished.stderr
    summaries = re.findall(r"=+ *((?:\w+ )?SUMMARY: .*)", text)
    if not summaries:
        raise Unreadable("there is no summary of compute-sanitizer in the output")
    kinds = {}
    for kind in re.findall(r"^=+ +((?:Invalid|Error|Warning|Uninitialized|Barrier|Race|Program hit)"
                           r"[^\n]{0,120})", text, re.M):
        kinds[kind] = kinds.get(kind, 0) + 1
    result = {"summary": summaries, "reports": dict(list(kinds.items())[:20])}
    passed, *_ = counts_of_tests(finished.stdout) or [0]
    check_number(passed, case, result)
    if cases.ONLY_HOPPER[-1] in case.command and not ON_HOPPER.search(finished.stdout):
        raise Skipped("skipped: the test did not run on path hopper", result)
    return result


def ncu(finished, _case):
    """Reads the metrics of each measured kernel, by their names in the sections."""
    lines = finished.stdout.splitlines()
    heads = [index for index, line in enumerate(lines) if line.startswith('"ID",')]
    if not heads:
        raise Unreadable("there is no table of ncu in the output")
    # The measured program's output is in between.
    table = [line for line in lines[heads[-1]:] if line.startswith('"')]
    kernels = {}
    for row in csv.DictReader(table):
        name, value = row.get("Metric Name"), number(row.get("Metric Value"))
        if not name or value is None:
            continue
        kernel = kernels.setdefault(row["ID"], {"kernel": row["Kernel Name"], "metrics": {}})
        if len(kernel["metrics"]) < MAX_METRICS:
            kernel["metrics"].setdefault(name, [value, row.get("Metric Unit") or ""])
    if not kernels:
        raise Unreadable("the table of ncu has no metric: no kernel has the name")
    return {"kernels": list(kernels.values())}


def number(text):
    """Returns a number in ncu's format, 1,234.5. None for any other text."""
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def summary_of_run(_finished, case):
    """Returns the losses in a training run's directory."""
    path = Path(case.folder) / "summary.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Unreadable(f"the run's summary.json cannot be read: {error}") from error
    if not found.get("evaluations"):
        raise Unreadable("summary.json has no evaluations")
    return found


READERS = {
    "sass": with_fields("kernels"),
    "tests": tests,
    "limits": limits,
    "attention": attention,
    "operators": with_fields("operators"),
    "step": step,
    "kernels": kernels,
    "pytorch": json_lines,
    "sanitizer": sanitizer,
    "ncu": ncu,
    "quickstart": summary_of_run,
}
