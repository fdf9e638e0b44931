#!/usr/bin/env python3
"""Every figure about a GPU that docs/gpu.md reports, in three runs on a machine with one.

    tools/gpu/prepare gpu-programs            # anywhere; needs Rust and the CUDA compiler
    python3 tools/gpu/measure.py correctness --programs gpu-programs --out gpu-results
    python3 tools/gpu/measure.py speed --programs gpu-programs --out gpu-results
    python3 tools/gpu/measure.py depth --programs gpu-programs --out gpu-results

A run takes its cases in turn, each one command with a time limit, and ends within its deadline.
Each case leaves a row in OUT/RUN.jsonl at once, whatever became of it: a program that fails, hangs,
floods or prints nonsense loses its own figures and no other's. OUT/results.md has the tables of all
runs so far. `--resume` takes the cases that a run did not come to, whose tests were skipped on that
machine, or that failed on another GPU or with other programs, `--case` those that are named. If the
GPU no longer answers nvidia-smi after a failure, the rest is left for `--resume`.

The exit code is 0 where every case passed, 1 where one did not, and 2 for a wrong argument.
"""

import argparse
import fnmatch
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import cases
import record
import tables
from execute import OVERRUN, execute
from read_output import READERS, NotPassed, Unreadable

ROOT = Path(__file__).resolve().parents[2]
# Seconds of the deadline reserved for ending a case and writing.
MARGIN = OVERRUN + 1.0
# A case with fewer remaining seconds is not started.
LEAST = 1.0
# Seconds for each query of the machine and for the list of the tests.
GLANCE = 10.0
# Bytes kept of the output of a case that did not pass.
END_OF_OUTPUT, END_OF_ERRORS = 2 << 10, 4 << 10
# The directory of a toolkit that is not on the PATH.
TOOLKITS = ["/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"]
CANNOT_START = 127
BROKEN = ["failed", "timed out", "unreadable output"]


class Signals:
    """Records a request to stop. The current case and the tables are finished first."""

    def __init__(self):
        self.name = None
        for number in [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]:
            signal.signal(number, self.note)
        # A parent that ignores SIGCHLD passes this on, and the end of a program is then not reported.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def note(self, number, _frame):
        self.name = signal.Signals(number).name

    def stopped(self):
        return self.name is not None


class Run:
    """A run: its cases, its deadline, and its file of rows."""

    def __init__(self, arguments, scratch, signals, end):
        self.arguments, self.signals, self.end = arguments, signals, end
        self.environment = environment(scratch, arguments.emulated)
        self.file = arguments.out / f"{arguments.run}.jsonl"
        self.cases = cases.of(arguments.run, arguments.programs, scratch,
                              self.tests() if arguments.run == "correctness" else [])
        # Whether nvidia-smi knew the GPU at the start, and no longer does.
        self.has_gpu = self.has_lost_gpu = False

    def left(self):
        return self.end - time.monotonic() - MARGIN

    def execute(self, command, seconds, variables=None):
        return execute(command, seconds=seconds, environment=self.environment | (variables or {}),
                       folder=ROOT, stopped=self.signals.stopped)

    def glance(self, *command):
        """Returns the output of a short command, or "unknown"."""
        if self.left() < LEAST:
            return "unknown"
        done = self.execute(command, min(GLANCE, self.left()))
        return done.stdout.strip() if done.code == 0 and done.stdout.strip() else "unknown"

    def tests(self):
        """Returns the names of the operators' tests, if they were listed or the program lists them."""
        built = self.arguments.programs / "tests"
        listed = built.read_text() if built.is_file() else self.glance(
            self.arguments.programs / "test-kernels", "--list")
        return [line[:-len(": test")] for line in listed.splitlines() if line.endswith(": test")]

    def header(self):
        built = self.arguments.programs / "commit"
        commit = built.read_text().strip() if built.is_file() else self.glance(
            "git", "describe", "--always", "--dirty")
        return {"header": True, "run": self.arguments.run,
                "date": time.strftime("%Y-%m-%d %H:%M"), "gpu": self.gpu(), "commit": commit,
                "path": os.environ.get("MOH_ATTENTION", "")}

    def gpu(self):
        return self.glance("nvidia-smi", "--query-gpu=name,driver_version,memory.total",
                           "--format=csv,noheader")

    def loses_gpu(self):
        """Returns whether the GPU of the start no longer answers."""
        may_ask = self.has_gpu and not self.signals.stopped() and self.left() >= LEAST
        return may_ask and self.gpu() == "unknown"

    def chosen(self):
        wanted = self.arguments.case
        return [case for case in self.cases
                if not wanted or any(fnmatch.fnmatchcase(case.name, name) for name in wanted)]

    def go(self):
        """Runs every case. Returns whether all of them passed."""
        now = self.header()
        self.has_gpu = now["gpu"] != "unknown"
        record.append(self.file, now)
        statuses = []
        for case in self.chosen():
            headers, rows = record.read(self.file)
            if (self.arguments.resume and case.name in rows
                    and record.is_final(rows[case.name], headers, now)):
                statuses.append(rows[case.name]["status"])
                continue
            if not self.is_due(case, rows):
                continue
            row = record.append(self.file, self.take(case))
            self.write_tables()
            headline = tables.headline(row)
            say(f"{row['status']:<9} {row['seconds']:6.1f} s  {case.name}  {headline}")
            statuses.append(row["status"])
        self.write_tables()
        return all(status == "passed" for status in statuses)

    def is_due(self, case, rows):
        """Returns whether the case that this case retries failed, or the case was requested."""
        return not case.unless_passed or bool(self.arguments.case) or any(
            row["status"] in BROKEN and name.startswith(case.unless_passed)
            for name, row in rows.items())

    def take(self, case):
        """Returns the row of a case. Its failures do not propagate."""
        start = time.monotonic()
        row = {"name": case.name, "kind": case.kind, "status": "failed", "code": None,
               "seconds": 0.0}
        if case.variables:
            row["variables"] = case.variables
        try:
            row |= self.attempt(case)
        except Exception:  # Whatever the error is, the other cases must run.
            row |= {"status": "failed", "why": traceback.format_exc()[-END_OF_ERRORS:]}
        row["seconds"] = round(time.monotonic() - start, 3)
        if row["status"] in BROKEN and self.loses_gpu():
            # The case may have failed because of that.
            self.has_lost_gpu = row["cut"] = True
        return row

    def attempt(self, case):
        if self.signals.stopped():
            return {"status": "no time", "why": f"stopped by {self.signals.name}"}
        if self.has_lost_gpu:
            return {"status": "no time", "why": "the GPU no longer answers nvidia-smi"}
        limit = min(case.seconds, self.left())
        if limit < LEAST:
            return {"status": "no time", "why": "the run's deadline left nothing"}
        done = self.execute(case.command, limit, case.variables)
        row = {"code": done.code, "limit": round(limit, 1)}
        if done.why:
            row["why"] = done.why
        result, fault = read(done, case)
        if result is not None:
            row["result"] = result
        status = {"cannot start": "cannot start", "flooded": "unreadable output",
                  "timed out": "timed out", "stopped": "timed out"}.get(done.ended)
        if done.ended == "stopped":
            row["why"] = f"stopped by {self.signals.name}"
        if status == "timed out" and (done.ended == "stopped" or limit < case.seconds):
            row["cut"] = True
        # The exit code of a shell, or of the loader of a program that lacks a library.
        if done.code == CANNOT_START:
            status, row["why"] = "cannot start", (done.stderr.strip().splitlines() or [""])[-1]
        if status is None:
            status = "failed" if done.code != 0 else fault.status if fault else "passed"
            if fault and done.code == 0:
                row["why"] = str(fault)
        if status != "passed":
            row["stdout_end"] = done.stdout[-END_OF_OUTPUT:]
            row["stderr_end"] = done.stderr[-END_OF_ERRORS:]
        return row | {"status": status}

    def write_tables(self):
        """Rewrites results.md from all rows."""
        try:
            files = {run: record.read(self.arguments.out / f"{run}.jsonl") for run in cases.RUNS}
            path = self.arguments.out / "results.md"
            beside = path.with_suffix(".md.part")
            beside.write_text(tables.document(files))
            beside.replace(path)
        except Exception as error:  # The rows are safe, and the tables can be made again from them.
            print(f"results.md cannot be written: {type(error).__name__}: {error}",
                  file=sys.stderr, flush=True)


def read(done, case):
    """Returns the result in a command's output, and the reason why it is not a pass. Either may be None."""
    if done.ended == "cannot start":
        return None, None
    try:
        result = READERS[case.kind](done, case)
    except NotPassed as fault:
        return fault.result, fault
    except Exception as error:  # A reader's error.
        return None, Unreadable(f"the reader failed: {type(error).__name__}: {error}")
    why = tables.fault({"kind": case.kind, "seconds": done.seconds, "result": result})
    return result, Unreadable(why) if why else None


def say(line):
    """Prints a line. A closed pipe must not end the run."""
    try:
        print(line, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def environment(scratch, is_emulated):
    """Returns the environment of every command."""
    variables = dict(os.environ, MOH_TEST_GPU="1", TMPDIR=str(scratch))
    if is_emulated:
        del variables["MOH_TEST_GPU"]
    libraries = torch_libraries()
    known = variables.get("LD_LIBRARY_PATH")
    if libraries:
        variables["LD_LIBRARY_PATH"] = ":".join(libraries + ([known] if known else []))
    folders = [folder for folder in TOOLKITS if Path(folder).is_dir()]
    variables["PATH"] = ":".join([variables.get("PATH", os.defpath), *folders])
    # A Python program that is killed keeps its output.
    variables["PYTHONUNBUFFERED"] = "1"
    return variables


def torch_libraries():
    """Returns folders of the CUDA libraries that pip installed, where cuBLASLt and NCCL may be."""
    return [str(found) for folder in sys.path
            for found in sorted(Path(folder).glob("nvidia/*/lib"))]


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", choices=list(cases.RUNS), metavar="RUN",
                        help="correctness, speed or depth")
    parser.add_argument("--programs", type=Path, metavar="FOLDER",
                        help="output of tools/gpu/prepare")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="directory for rows and tables")
    parser.add_argument("--deadline", type=float, metavar="SECONDS",
                        help="time limit of the run (" + ", ".join(
                            f"{run} {seconds}" for run, seconds in cases.RUNS.items()) + ")")
    parser.add_argument("--case", action="append", default=[], metavar="NAME",
                        help="run this case, * for any characters; may be repeated")
    parser.add_argument("--resume", action="store_true",
                        help="skip the cases that passed, used their whole time, or failed on this "
                        "GPU with these programs")
    parser.add_argument("--emulated", action="store_true",
                        help="run the tests of programs with the emulated GPU on it alone")
    parser.add_argument("--list", action="store_true", help="print the cases and their limits")
    arguments = parser.parse_args()
    if arguments.programs is None:
        parser.error("--programs is required: name the output folder of tools/gpu/prepare")
    if not arguments.programs.is_dir():
        parser.error(f"--programs: {arguments.programs} is not a folder: "
                     "make it with tools/gpu/prepare")
    if arguments.deadline is None:
        arguments.deadline = cases.RUNS[arguments.run]
    if not 0 < arguments.deadline < 1e6:
        parser.error(f"--deadline: {arguments.deadline} is not a number of seconds: "
                     "give one above 0 and below 1e6")
    if arguments.out is None and not arguments.list:
        parser.error("--out is required: name the folder for the results")
    arguments.programs = arguments.programs.resolve()
    arguments.out = (arguments.out or Path(".")).resolve()
    if not arguments.list:
        try:
            arguments.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--out: {arguments.out} cannot be created: {error.strerror}: "
                         "name another folder")
    return parser, arguments


def main():
    # First, since the rest is part of the time.
    start = time.monotonic()
    parser, arguments = parse_arguments()
    signals = Signals()
    scratch = tempfile.mkdtemp(prefix="moh-measure-")
    try:
        run = Run(arguments, scratch, signals, start + arguments.deadline)
        names = [case.name for case in run.cases]
        for name in arguments.case:
            if not fnmatch.filter(names, name):
                parser.error(f"--case: {arguments.run} has no case {name}: see --list")
        if arguments.list:
            for case in run.chosen():
                print(f"{case.seconds:4.0f} s  {case.name}")
            return 0
        return 0 if run.go() else 1
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
