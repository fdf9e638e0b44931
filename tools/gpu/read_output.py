"""Parses the programs' output: one reader per kind of case.

A reader gets what a command printed and gives the part of a row called `result`, or raises
`Unreadable` where that is not there. Readers also see the output of commands that failed: what they
find there is kept.
"""

import csv
import json
import re
from pathlib import Path

# Of the labels of relative errors, and of the metrics of a kernel.
MOST_LABELS = 100
MOST_METRICS = 400


class Unreadable(Exception):
    """The output is not a successful program's."""


def first_object(text):
    """The JSON object that starts at the first brace; the rest is ignored."""
    at = text.find("{")
    if at < 0:
        raise Unreadable("there is no JSON in the output")
    try:
        found, _ = json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"the JSON cannot be read: {error}") from error
    return found


def with_fields(*names):
    """A reader of one object that has these fields."""
    def read(finished, _case):
        found = first_object(finished.stdout)
        missing = [name for name in names if name not in found]
        if missing:
            raise Unreadable(f"the JSON has no {', '.join(missing)}")
        return found
    return read


def limits(finished, case):
    return {"machine": with_fields("machine")(finished, case)["machine"]}


def json_lines(finished, _case):
    """The rows of the PyTorch side, which prints other lines too."""
    rows, broken = [], 0
    for line in finished.stdout.splitlines():
        if line.startswith("{"):
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError):
                broken += 1
    if not rows:
        raise Unreadable("there is no line of JSON in the output")
    return {"rows": rows} | ({"broken_lines": broken} if broken else {})


# With one thread, `--nocapture` puts the test's name before the first line that a test prints.
BEGUN = r"^(?:test \S+ \.\.\. )?"
ERROR = re.compile(
    BEGUN + r"(\S.*?): (\w+) relative error (\d[\d.]*(?:e[-+]?\d+)?|inf|NaN)$", re.M)
SKIPPED = re.compile(BEGUN + r"(skipped.*)$", re.M)
SUMMARY = re.compile(r"^test result: .*?(\d+) passed; (\d+) failed; (\d+) ignored", re.M)


def tests(finished, _case):
    """The output of libtest and the tests; a run without tests is not a result."""
    text = finished.stdout
    summaries = [tuple(map(int, found)) for found in SUMMARY.findall(text)]
    passed, failed, ignored = map(sum, zip((0, 0, 0), *summaries))
    largest = {}
    for what, kind, error in ERROR.findall(text):
        # NaN counts as the largest error: it does not compare.
        error = float(error) if error != "NaN" else float("inf")
        name = f"{what} {kind}"
        largest[name] = max(largest.get(name, 0.0), error)
    names = sorted(largest, key=lambda name: largest[name], reverse=True)[:MOST_LABELS]
    result = {"passed": passed, "failed": failed,
              "largest_relative_errors": {name: largest[name] for name in names}}
    if ignored:
        result["ignored"] = ignored
    if failed and (at := text.rfind("\nfailures:\n")) >= 0:
        result["failed_tests"] = re.findall(r"^    (\S+)$", text[at:], re.M)
    if skipped := SKIPPED.findall(text):
        result["skipped"] = skipped[:10]
    if not summaries and not largest:
        raise Unreadable("there is no summary of tests in the output")
    if summaries and passed + failed == 0:
        raise Unreadable("no test ran: none has the name, or all are ignored")
    return result


def sanitizer(finished, _case):
    """The summary, and the kinds of errors with their counts."""
    text = finished.stdout + "\n" + finished.stderr
    summaries = re.findall(r"=+ *((?:\w+ )?SUMMARY: .*)", text)
    if not summaries:
        raise Unreadable("there is no summary of compute-sanitizer in the output")
    kinds = {}
    for kind in re.findall(r"^=+ +((?:Invalid|Error|Warning|Uninitialized|Barrier|Race|Program hit)"
                           r"[^\n]{0,120})", text, re.M):
        kinds[kind] = kinds.get(kind, 0) + 1
    return {"summary": summaries, "reports": dict(list(kinds.items())[:20])}


def ncu(finished, _case):
    """The metrics of each kernel that was measured, by their names in the sections."""
    lines = finished.stdout.splitlines()
    heads = [index for index, line in enumerate(lines) if line.startswith('"ID",')]
    if not heads:
        raise Unreadable("there is no table of ncu in the output")
    # The measured program's output is interleaved.
    table = [line for line in lines[heads[-1]:] if line.startswith('"')]
    kernels = {}
    for row in csv.DictReader(table):
        name, value = row.get("Metric Name"), number(row.get("Metric Value"))
        if not name or value is None:
            continue
        kernel = kernels.setdefault(row["ID"], {"kernel": row["Kernel Name"], "metrics": {}})
        if len(kernel["metrics"]) < MOST_METRICS:
            kernel["metrics"].setdefault(name, [value, row.get("Metric Unit") or ""])
    if not kernels:
        raise Unreadable("the table of ncu has no metric: no kernel has the name")
    return {"kernels": list(kernels.values())}


def number(text):
    """A number in ncu's format, 1,234.5; None for any other text."""
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def summary_of_run(_finished, case):
    """The losses in a training run's directory."""
    path = Path(case.folder) / "summary.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Unreadable(f"the run's summary.json cannot be read: {error}") from error
    if "evaluations" not in found:
        raise Unreadable("summary.json has no evaluations")
    return found


READERS = {
    "sass": with_fields("kernels"),
    "tests": tests,
    "limits": limits,
    "attention": with_fields("shape", "cases"),
    "operators": with_fields("operators"),
    "step": with_fields("model", "step", "tokens_per_second"),
    "pytorch": json_lines,
    "sanitizer": sanitizer,
    "ncu": ncu,
    "quickstart": summary_of_run,
}
