"""Tests of measure.py with programs that misbehave: python3 -m unittest discover -s tools/gpu"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

import cases
import execute
import measure
import record

HERE = Path(__file__).resolve().parent


def is_running(number):
    """Returns whether a process runs. A process that has ended and waits for its parent does not run."""
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def wait_for(condition, seconds=5):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


class WithPrograms(unittest.TestCase):
    """A folder of programs that act as `plan` says, and a folder for results."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.programs, self.out, self.scratch = (
            self.root / name for name in ["programs", "out", "scratch"])
        self.programs.mkdir()
        self.scratch.mkdir()
        program = (HERE / "fake_program.py").read_text()
        # The toolkit's programs are found on the PATH.
        for name in ["moh-bench", "moh-train", "test-kernels", "test-devices",
                     "compute-sanitizer", "ncu"]:
            path = self.programs / name
            path.write_text(program)
            path.chmod(0o755)
        smi = self.programs / "nvidia-smi"
        smi.write_text('#!/bin/sh\ncat "$(dirname "$0")/gpu"\n')
        smi.chmod(0o755)
        self.gpu, self.commit = self.programs / "gpu", self.programs / "commit"
        self.gpu.write_text("a GPU, 580.1, 80 GiB\n")
        self.commit.write_text("abc1234\n")
        self.plan([["", "answer"]])

    def plan(self, pairs):
        (self.programs / "plan.json").write_text(json.dumps(pairs))

    def start(self, run, *options):
        return subprocess.Popen(
            [sys.executable, HERE / "measure.py", run, "--programs", self.programs, "--out",
             self.out, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=dict(os.environ, TMPDIR=str(self.scratch),
                     PATH=f"{self.programs}:{os.environ['PATH']}"))

    def measure(self, run, *options):
        with self.start(run, *options) as process:
            stdout, stderr = process.communicate(timeout=60)
        return process.returncode, stdout, stderr

    def rows(self, run="speed"):
        return record.read(self.out / f"{run}.jsonl")[1]

    def statuses(self, run="speed"):
        return {name: row["status"] for name, row in self.rows(run).items()}

    def processes(self):
        path = self.programs / "processes"
        return list(map(int, path.read_text().split())) if path.exists() else []

    def runs(self):
        return (self.programs / "runs").read_text().splitlines()


def named(*names):
    return [word for name in names for word in ["--case", name]]


SOME = named("limits", "attention/8192/*", "step/4/*", "operators", "step/16/75%")


class Speed(WithPrograms):
    def test_each_failure_is_a_row_and_resume_takes_what_is_left(self):
        self.plan([["squared_norm", "answer"], ["operators", "garbage"],
                   ["--deterministic", "flood"], ["hopper attention", "die"],
                   ["--layers 4 ", "wrong"], ["tiled", "answer"], ["--layers 16", "hang"],
                   ["step", "answer"]])
        start = time.monotonic()
        code, stdout, stderr = self.measure("speed", "--deadline", "8", *SOME)
        self.assertLess(time.monotonic() - start, 8)
        self.assertEqual((code, stderr), (1, ""))
        self.assertEqual(self.statuses(), {
            "limits": "passed", "attention/8192/hopper": "failed",
            "attention/8192/deterministic": "unreadable output", "attention/8192/tiled": "passed",
            "step/4/dense": "unreadable output", "step/4/75%": "unreadable output",
            "step/16/75%": "timed out", "operators": "no time"})
        rows = self.rows()
        self.assertEqual(rows["attention/8192/hopper"]["code"], -signal.SIGKILL)
        self.assertIn("printed more than 64 MiB", rows["attention/8192/deterministic"]["why"])
        self.assertIn("no model", rows["step/4/dense"]["why"])
        self.assertIn("this much was done", rows["step/16/75%"]["stdout_end"])
        self.assertTrue(rows["step/16/75%"]["cut"])
        self.assertEqual(len(self.processes()), 2)
        self.assertFalse(any(map(is_running, self.processes())))
        # Every case has its line, with its figure.
        self.assertEqual(len(stdout.splitlines()), 8)
        self.assertIn("bf16 700 TFLOP/s", stdout)
        self.assertIn("-9 (SIGKILL) printed nothing", stdout)
        # Few small files, and no files elsewhere.
        self.assertEqual(sorted(os.listdir(self.out)), ["results.md", "speed.jsonl"])
        self.assertLess(sum(path.stat().st_size for path in self.out.iterdir()), 100_000)
        self.assertEqual(os.listdir(self.scratch), [])
        document = (self.out / "results.md").read_text()
        self.assertIn("| attention/8192/tiled | 1 x 8192 | tiled | 75% | 1.000 |", document)
        self.assertIn("| operators | no time |", document)

        before = len(self.runs())
        # As a run leaves it that is killed while it writes.
        with open(self.out / "speed.jsonl", "a") as file:
            file.write('{"name": "operators", "status": "pas')
        self.plan([["", "answer"]])
        code, stdout, _ = self.measure("speed", "--resume", *SOME)
        self.assertEqual(code, 1)
        self.assertEqual(self.statuses(), dict.fromkeys(self.statuses(), "passed") | {
            "attention/8192/hopper": "failed"})
        # Neither cases that passed nor cases that failed ran again.
        self.assertEqual(len(self.runs()) - before, 5)
        self.assertEqual(len(stdout.splitlines()), 5)
        self.assertEqual(len(self.rows()), 8)
        code, _, _ = self.measure("speed", *named("attention/8192/hopper"))
        self.assertEqual((code, self.statuses()["attention/8192/hopper"]), (0, "passed"))

    def test_sigterm_leaves_the_row_in_flight_and_no_process(self):
        self.plan([["squared_norm", "answer"], ["", "hang"]])
        with self.start("speed", *named("limits", "attention/8192/*")) as process:
            self.assertTrue(wait_for(lambda: len(self.processes()) == 2))
            process.send_signal(signal.SIGTERM)
            start = time.monotonic()
            self.assertEqual(process.wait(timeout=10), 1)
            self.assertLess(time.monotonic() - start, 5)
        self.assertEqual(self.statuses(), {
            "limits": "passed", "attention/8192/hopper": "timed out",
            "attention/8192/deterministic": "no time", "attention/8192/tiled": "no time"})
        self.assertEqual(self.rows()["attention/8192/hopper"]["why"], "stopped by SIGTERM")
        self.assertTrue(self.rows()["attention/8192/hopper"]["cut"])
        self.assertFalse(any(map(is_running, self.processes())))
        self.assertIn("| limits | a GPU |", (self.out / "results.md").read_text())
        self.assertEqual(os.listdir(self.scratch), [])

    def test_sigint_leaves_the_rest_for_resume(self):
        self.plan([["squared_norm", "answer"], ["", "hang"]])
        chosen = named("limits", "attention/8192/*")
        with self.start("speed", *chosen) as process:
            self.assertTrue(wait_for(lambda: len(self.processes()) == 2))
            process.send_signal(signal.SIGINT)
            self.assertEqual(process.wait(timeout=10), 1)
        self.assertEqual(self.rows()["attention/8192/hopper"]["why"], "stopped by SIGINT")
        self.assertFalse(any(map(is_running, self.processes())))
        before = len(self.runs())
        self.plan([["", "answer"]])
        code, _, _ = self.measure("speed", "--resume", *chosen)
        self.assertEqual((code, set(self.statuses().values())), (0, {"passed"}))
        self.assertEqual(len(self.runs()) - before, 3)

    def test_a_run_that_is_killed_leaves_its_rows_and_not_its_program(self):
        self.plan([["squared_norm", "answer"], ["", "hang"]])
        with self.start("speed", *named("limits", "attention/8192/hopper")) as process:
            self.assertTrue(wait_for(lambda: len(self.processes()) == 2))
            process.kill()
        self.assertEqual(self.statuses(), {"limits": "passed"})
        grandchild, child = self.processes()
        self.assertTrue(wait_for(lambda: not is_running(child)))
        if is_running(grandchild):
            os.kill(grandchild, signal.SIGKILL)

    def test_figures_of_another_path_do_not_pass(self):
        self.plan([["tiled attention", "plain path"], ["", "answer"]])
        code, stdout, _ = self.measure("speed", *named("attention/8192/*"))
        self.assertEqual((code, self.statuses()), (1, {
            "attention/8192/hopper": "passed", "attention/8192/deterministic": "passed",
            "attention/8192/tiled": "failed"}))
        self.assertIn("attention ran on plain: expected tiled", stdout)

    def test_figures_that_cannot_be_shown_do_not_pass(self):
        self.plan([["--layers 4 --steps 3 --warmup 1 --json", "loss of NaN"],
                   ["--layers 8", "rate of NaN"], ["--layers 16", "words for a rate"]])
        code, stdout, _ = self.measure("speed", *named(
            "step/4/75%", "curve/16384/8/dense", "step/16/75%"))
        self.assertEqual((code, self.statuses()), (1, {
            "step/4/75%": "failed", "step/16/75%": "unreadable output",
            "curve/16384/8/dense": "unreadable output"}))
        self.assertIn("step/4/75%  the loss is not finite", stdout)
        self.assertEqual(self.rows()["curve/16384/8/dense"]["why"].partition(": Type")[0],
                         "the result cannot be shown")
        for row in self.rows().values():
            self.assertEqual(row["result"]["model"]["layers"], 4)
        # Its other figures stay in the table.
        document = (self.out / "results.md").read_text()
        self.assertIn("| 12,000 | 1.0 | 500 | 70.0% | 64.0 | 11.500, - |", document)

    def test_a_result_that_is_too_large_does_not_pass(self):
        self.plan([["squared_norm", "answer"], ["operators", "too much"]])
        code, stdout, _ = self.measure("speed", *named("limits", "operators"))
        self.assertEqual((code, self.statuses()),
                         (1, {"limits": "passed", "operators": "unreadable output"}))
        self.assertRegex(stdout, r"operators  a result of 30\d{4} bytes was left out")

    def test_wrong_arguments_are_refused(self):
        for options, message in [
                (["--case", "limit"], "speed has no case limit: see --list"),
                (["--deadline", "0"], "is not a number of seconds"),
                (["--programs", "nowhere"], "make it with tools/gpu/prepare")]:
            code, _, stderr = self.measure("speed", *options)
            self.assertEqual(code, 2, stderr)
            self.assertIn(message, stderr)
        self.assertFalse((self.out / "speed.jsonl").exists())

    def test_a_program_that_is_not_there_is_a_row(self):
        (self.programs / "moh-bench").unlink()
        code, stdout, _ = self.measure("speed", *named("limits"))
        self.assertEqual((code, self.statuses()), (1, {"limits": "cannot start"}))
        self.assertIn("No such file", stdout)

    def test_a_deadline_that_leaves_nothing_starts_nothing(self):
        code, _, _ = self.measure("speed", "--deadline", "1")
        self.assertEqual(code, 1)
        self.assertEqual(set(self.statuses().values()), {"no time"})
        self.assertFalse((self.programs / "runs").exists())
        # Earlier rows stay.
        self.measure("speed", *named("limits"))
        self.measure("speed", "--deadline", "1", *named("limits"))
        self.assertEqual(self.statuses()["limits"], "passed")


class Results(WithPrograms):
    """Places to which results cannot be written."""

    CHOSEN = named("limits", "operators")

    def test_rows_that_cannot_be_written_are_printed(self):
        (self.out / "speed.jsonl").mkdir(parents=True)
        _, stdout, stderr = self.measure("speed", *self.CHOSEN)
        self.assertEqual(len(stdout.splitlines()), 2)
        for name in ["limits", "operators"]:
            self.assertRegex(stderr, rf'the row cannot be written: .*: {{"name": "{name}", .*'
                                     r'"status": "passed"')

    def test_tables_that_cannot_be_written_leave_the_rows(self):
        (self.out / "results.md").mkdir(parents=True)
        code, _, stderr = self.measure("speed", *self.CHOSEN)
        self.assertEqual((code, self.statuses()),
                         (0, {"limits": "passed", "operators": "passed"}))
        self.assertIn("results.md cannot be written: IsADirectoryError", stderr)

    def test_a_closed_output_does_not_end_the_run(self):
        with self.start("speed", *self.CHOSEN) as process:
            process.stdout.close()
            self.assertEqual((process.wait(timeout=30), process.stderr.read()), (0, ""))
        self.assertEqual(self.statuses(), {"limits": "passed", "operators": "passed"})

    def test_a_mistake_of_measure_py_is_a_row(self):
        run = object.__new__(measure.Run)
        run.has_gpu = False
        with mock.patch.object(run, "attempt", side_effect=KeyError("a mistake")):
            row = run.take(cases.Case("a case", "tests", 1.0, []))
        self.assertEqual((row["name"], row["status"]), ("a case", "failed"))
        self.assertIn("KeyError: 'a mistake'", row["why"])


class Machine(WithPrograms):
    CHOSEN = named("limits", "attention/8192/*")

    def test_a_gpu_that_is_lost_leaves_the_rest_for_resume(self):
        self.plan([["hopper attention", "lose GPU"], ["", "answer"]])
        code, stdout, _ = self.measure("speed", *self.CHOSEN)
        self.assertEqual((code, self.statuses()), (1, {
            "limits": "passed", "attention/8192/hopper": "failed",
            "attention/8192/deterministic": "no time", "attention/8192/tiled": "no time"}))
        self.assertIn("attention/8192/tiled  the GPU no longer answers nvidia-smi", stdout)
        self.gpu.write_text("a GPU, 580.1, 80 GiB\n")
        self.plan([["", "answer"]])
        before = len(self.runs())
        code, _, _ = self.measure("speed", "--resume", *self.CHOSEN)
        self.assertEqual((code, set(self.statuses().values())), (0, {"passed"}))
        self.assertEqual(len(self.runs()) - before, 3)

    def test_programs_find_the_gpu_and_the_libraries_of_pip(self):
        libraries = self.root / "site/nvidia/cublas/lib"
        libraries.mkdir(parents=True)
        with mock.patch.dict(os.environ, PYTHONPATH=str(self.root / "site"),
                             LD_LIBRARY_PATH="/known"):
            self.measure("speed", *named("limits"))
        variables = json.loads((self.programs / "environment").read_text())
        self.assertEqual(variables["MOH_TEST_GPU"], "1")
        self.measure("speed", "--emulated", *named("limits"))
        self.assertNotIn("MOH_TEST_GPU", json.loads((self.programs / "environment").read_text()))
        folders = variables["LD_LIBRARY_PATH"].split(":")
        self.assertIn(str(libraries), folders)
        self.assertEqual(folders[-1], "/known")

    def resumed(self):
        """Returns the number of cases that --resume runs."""
        before = len(self.runs())
        self.measure("speed", "--resume", *self.CHOSEN)
        return len(self.runs()) - before

    def test_failures_count_for_one_gpu_and_one_build(self):
        self.plan([["squared_norm", "answer"], ["", "die"]])
        self.measure("speed", *self.CHOSEN)
        self.assertEqual(self.resumed(), 0)
        for file, text in [(self.commit, "def5678"), (self.gpu, "another GPU, 580.1, 80 GiB")]:
            file.write_text(text + "\n")
            self.assertEqual((self.resumed(), self.resumed()), (3, 0))
        # Other changes to that commit have the same name.
        self.commit.write_text("def5678-dirty\n")
        self.assertEqual((self.resumed(), self.resumed()), (3, 3))
        # Without nvidia-smi, the state of the GPU is unknown, and no GPU is lost.
        self.commit.write_text("def5678\n")
        self.gpu.unlink()
        self.assertEqual((self.resumed(), self.resumed()), (3, 3))


class Correctness(WithPrograms):
    TESTS = ["attention_paths::any_path_agrees", "attention_paths::dense_agrees",
             "attention_stress::dense", "attention_stress::heads_of_64",
             "attention_stress::skewed_routing", "later::test", "linear::products_agree"]

    def setUp(self):
        super().setUp()
        self.listed = "".join(f"{name}: test\n" for name in self.TESTS)
        (self.programs / "listed").write_text(self.listed)

    def test_tests_run_by_name_and_in_order(self):
        self.plan([["", "tests"]])
        code, _, _ = self.measure("correctness", *named("a*", "linear", "nccl", "later"))
        self.assertEqual(code, 1)
        self.assertEqual(list(self.statuses("correctness").items()), [
            ("attention_paths/dense_agrees", "passed"),
            ("attention_paths/any_path_agrees", "passed"), ("attention_stress/dense", "passed"),
            ("attention_stress/skewed_routing", "passed"),
            ("attention_stress/heads_of_64", "passed"), ("linear", "passed"), ("adamw", "passed"),
            ("attention", "passed"), ("attention/tiled", "passed"), ("later", "passed"),
            ("nccl", "cannot start")])
        row = self.rows("correctness")["attention_paths/dense_agrees"]
        self.assertEqual(row["result"], {"passed": 1, "failed": 0, "largest_relative_errors": {
            "out on any BF16": 2.5e-3, "d_x F32": 3e-6}})
        self.assertIn(" --exact attention_paths::dense_agrees --nocapture --test-threads 1",
                      self.runs()[1])

    def test_attention_runs_without_hopper_where_hopper_fails(self):
        self.plan([["--list", "tests"], ["attention_paths::any", "failing test"],
                   ["linear", "no test"], ["", "tests"]])
        code, stdout, _ = self.measure("correctness")
        rows = self.rows("correctness")
        self.assertEqual(code, 1)
        self.assertEqual(rows["attention_paths/any_path_agrees"]["code"], 101)
        self.assertEqual(rows["attention_paths/any_path_agrees"]["result"]["failed_tests"],
                         ["some::test"])
        self.assertEqual(rows["linear"]["status"], "unreadable output")
        self.assertIn("no test ran", stdout)
        tiled = [name for name in rows if name.endswith("/tiled")]
        self.assertEqual(tiled, ["devices/tiled", "attention/tiled", "tensor_parallel/tiled"])
        self.assertIn("out on tiled BF16",
                      rows["attention/tiled"]["result"]["largest_relative_errors"])

    def test_attention_does_not_run_twice_where_hopper_passes(self):
        self.plan([["", "tests"]])
        self.measure("correctness")
        self.assertEqual(self.statuses("correctness")["attention"], "passed")
        self.assertEqual([name for name in self.rows("correctness") if "tiled" in name], [])

    def test_skipped_tests_do_not_pass_and_resume_takes_them(self):
        self.plan([["--list", "tests"], ["attention_stress::dense", "skipped test"],
                   ["", "tests"]])
        chosen = named("attention_stress/*")
        code, stdout, _ = self.measure("correctness", *chosen)
        self.assertEqual((code, self.statuses("correctness")), (1, {
            "attention_stress/dense": "skipped", "attention_stress/skewed_routing": "passed",
            "attention_stress/heads_of_64": "passed"}))
        self.assertIn("attention_stress/dense  skipped: no Hopper GPU", stdout)
        document = (self.out / "results.md").read_text()
        self.assertIn("2 of 3 cases passed", document)
        self.assertIn("| attention_stress/dense | skipped | 0 |", document)

        before = len(self.runs())
        self.plan([["", "tests"]])
        code, _, _ = self.measure("correctness", "--resume", *chosen)
        self.assertEqual((code, self.statuses("correctness")["attention_stress/dense"]),
                         (0, "passed"))
        # The list of the tests, and the skipped test.
        self.assertEqual(len(self.runs()) - before, 2)

    def test_a_name_is_one_test(self):
        self.plan([["--list", "tests"], ["", "two tests"]])
        self.measure("correctness", *named("attention_paths/dense_agrees", "linear"))
        rows = self.rows("correctness")
        self.assertEqual(rows["linear"]["status"], "passed")
        self.assertEqual(rows["attention_paths/dense_agrees"]["status"], "failed")
        self.assertIn("2 tests ran, expected 1", rows["attention_paths/dense_agrees"]["why"])

    def test_known_tests_are_cases_where_none_is_listed(self):
        self.plan([["--list", "die"], ["", "tests"]])
        code, _, _ = self.measure("correctness", *named("attention_paths/*", "attention_stress/*"))
        self.assertEqual(code, 0)
        self.assertEqual(len(self.rows("correctness")), len(cases.PATHS) + len(cases.STRESS))

    def test_tests_that_were_listed_before_are_not_listed_again(self):
        self.plan([["", "tests"]])
        (self.programs / "tests").write_text(self.listed)
        self.measure("correctness", *named("attention_stress/*"))
        self.assertEqual(len(self.rows("correctness")), 3)
        self.assertNotIn("--list", "".join(self.runs()))


class Depth(WithPrograms):
    """The programs of a toolkit, which machines without a GPU lack."""

    CHOSEN = named("sanitizer/*", "ncu/*", "kernels/*", "quickstart/*")
    GOOD = [["--tool", "sanitizer"], ["--kernel-name", "ncu"], ["step", "answer"],
            ["--recipe", "trained"]]

    def test_every_case_passes_with_what_its_program_prints(self):
        self.plan(self.GOOD)
        code, stdout, stderr = self.measure("depth", *self.CHOSEN)
        self.assertEqual((code, stderr), (0, ""), stdout)
        self.assertEqual(set(self.statuses("depth").values()), {"passed"})
        self.assertEqual(len(self.rows("depth")), 11)
        self.assertIn("kernels/32/75%  723.0 ms, 1681 launches, nothing runs in 0.4%", stdout)
        document = (self.out / "results.md").read_text()
        for line in ["| sanitizer/memcheck | ERROR SUMMARY: 0 errors | - |",
                     "| ncu/forward | hopper_forward_d128 (0) | L2 Hit Rate | 81.5 % |",
                     "| kernels/32/75% | matmul | 1677 | 719.50 | 99.5% |",
                     "| kernels/32/75% | 1 others | 4 | 0.50 | 0.1% |",
                     "| kernels/32/75% | the step | 1681 | 723.00 | 100.0% |",
                     "| quickstart/gpu-bf16 | loaded 5.5000, trained moh 0.5000 |"]:
            self.assertIn(line, document)
        # The runs of the quickstart are removed.
        self.assertEqual(os.listdir(self.scratch), [])

    def test_a_sanitizer_that_checked_nothing_does_not_pass(self):
        self.plan([["memcheck", "sanitizer without test"],
                   ["synccheck", "sanitizer without hopper"],
                   ["initcheck", "sanitizer without hopper"], ["", "tests"]])
        code, stdout, _ = self.measure("depth", *named("sanitizer/*"))
        # All kernels are checked for uninitialised memory. A summary of tests is not the tool's summary.
        self.assertEqual((code, self.statuses("depth")), (1, {
            "sanitizer/memcheck": "failed", "sanitizer/synccheck": "skipped",
            "sanitizer/racecheck": "unreadable output", "sanitizer/initcheck": "passed"}))
        self.assertIn("0 tests ran, expected 1", stdout)
        self.assertIn("skipped: the test did not run on path hopper", stdout)

    def test_each_failure_is_a_row_and_resume_takes_what_is_left(self):
        self.plan([["memcheck", "die"], ["hopper_backward_d128", "garbage"],
                   ["run.device=cpu", "die"], ["initcheck", "hang"], *self.GOOD])
        start = time.monotonic()
        chosen = named("sanitizer/[mis]*", "ncu/forward", "ncu/backward", "kernels/*",
                       "quickstart/*")
        code, stdout, stderr = self.measure("depth", "--deadline", "10", *chosen)
        self.assertLess(time.monotonic() - start, 10)
        self.assertEqual((code, stderr), (1, ""))
        passed = ["sanitizer/synccheck", "ncu/forward", "kernels/32/75%", "quickstart/gpu-bf16"]
        self.assertEqual(self.statuses("depth"), dict.fromkeys(passed, "passed") | {
            "sanitizer/memcheck": "failed", "ncu/backward": "unreadable output",
            "quickstart/cpu-f32": "failed", "sanitizer/initcheck": "timed out"})
        rows = self.rows("depth")
        self.assertEqual(rows["sanitizer/memcheck"]["code"], -signal.SIGKILL)
        self.assertIn("no table of ncu", rows["ncu/backward"]["why"])
        self.assertIn("this much was done", rows["sanitizer/initcheck"]["stdout_end"])
        # The program under the tool has also ended.
        self.assertEqual(len(self.processes()), 2)
        self.assertFalse(any(map(is_running, self.processes())))

        before = len(self.runs())
        self.plan(self.GOOD)
        self.measure("depth", "--resume", *chosen)
        self.assertEqual({name: status for name, status in self.statuses("depth").items()
                          if status != "passed"},
                         {"sanitizer/memcheck": "failed", "quickstart/cpu-f32": "failed"})
        # The unreadable case, and the case that had no time left.
        self.assertEqual(len(self.runs()) - before, 2)


class Execute(unittest.TestCase):
    def run_python(self, text, seconds=10.0, **options):
        return execute.execute([sys.executable, "-c", text], seconds=seconds, **options)

    def test_a_program_that_ignores_sigterm_is_killed(self):
        start = time.monotonic()
        done = self.run_python("import signal, time; signal.signal(15, signal.SIG_IGN)\n"
                               "print('begun', flush=True); time.sleep(1000)", seconds=0.5)
        self.assertLess(time.monotonic() - start, 0.5 + execute.OVERRUN)
        self.assertEqual((done.ended, done.code, done.stdout), ("timed out", -9, "begun\n"))

    def test_a_process_that_left_the_group_does_not_hold_the_run(self):
        start = time.monotonic()
        done = self.run_python("import subprocess; subprocess.Popen(['sleep', '4'], "
                               "start_new_session=True); print('done')")
        self.assertLess(time.monotonic() - start, 3)
        self.assertEqual((done.ended, done.code, done.stdout), ("exited", 0, "done\n"))

    def test_the_beginning_and_the_end_are_kept_and_the_streams_apart(self):
        done = self.run_python("import sys; print('{\"first\": 1}'); print('x' * (20 << 20))\n"
                               "print('last'); print('aside', file=sys.stderr)")
        self.assertEqual((done.code, done.stderr), (0, "aside\n"))
        self.assertTrue(done.stdout.startswith('{"first": 1}') and done.stdout.endswith("last\n"))
        self.assertLess(len(done.stdout), execute.HEAD_BYTES + execute.TAIL_BYTES + 100)
        self.assertIn("bytes left out", done.stdout)


if __name__ == "__main__":
    unittest.main()
