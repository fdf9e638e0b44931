"""Tests of measure.py with programs that misbehave: python3 -m unittest discover -s tools/gpu"""

import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

import cases
import execute
import read_output
import record
import sass
import tables

HERE = Path(__file__).resolve().parent


def is_running(number):
    """Whether a process runs; one that has ended and waits for its parent does not."""
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
    """A folder of programs that do as `plan` says, and one for results."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.programs, self.out, self.scratch = (
            self.root / name for name in ["programs", "out", "scratch"])
        self.programs.mkdir()
        self.scratch.mkdir()
        program = (HERE / "fake_program.py").read_text()
        for name in ["moh-bench", "test-kernels", "test-devices"]:
            path = self.programs / name
            path.write_text(program)
            path.chmod(0o755)
        self.plan([["", "answer"]])

    def plan(self, pairs):
        (self.programs / "plan.json").write_text(json.dumps(pairs))

    def start(self, run, *options):
        return subprocess.Popen(
            [sys.executable, HERE / "measure.py", run, "--programs", self.programs, "--out",
             self.out, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=dict(os.environ, TMPDIR=str(self.scratch)))

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
        # Few small files, and nothing anywhere else.
        self.assertEqual(sorted(os.listdir(self.out)), ["results.md", "speed.jsonl"])
        self.assertLess(sum(path.stat().st_size for path in self.out.iterdir()), 100_000)
        self.assertEqual(os.listdir(self.scratch), [])
        document = (self.out / "results.md").read_text()
        self.assertIn("| attention/8192/tiled | 1 x 8192 | 75% | 1.000 |", document)
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
        # Neither what passed nor what failed ran again.
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
        self.assertFalse(record.is_final(self.rows()["attention/8192/hopper"]))
        self.assertFalse(any(map(is_running, self.processes())))
        self.assertIn("| limits | a GPU |", (self.out / "results.md").read_text())
        self.assertEqual(os.listdir(self.scratch), [])

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
        # And takes nothing from what was there.
        self.measure("speed", *named("limits"))
        self.measure("speed", "--deadline", "1", *named("limits"))
        self.assertEqual(self.statuses()["limits"], "passed")


class Correctness(WithPrograms):
    TESTS = ["attention_paths::d64_agrees", "attention_paths::dense_agrees",
             "attention_paths::d128_agrees", "attention_stress::long", "later::test",
             "linear::products_agree"]

    def setUp(self):
        super().setUp()
        (self.programs / "tests").write_text("".join(f"{name}: test\n" for name in self.TESTS))

    def test_tests_run_by_name_and_in_order(self):
        self.plan([["", "tests"]])
        code, _, _ = self.measure("correctness", *named("a*", "linear", "nccl", "later"))
        self.assertEqual(code, 1)
        self.assertEqual(self.statuses("correctness"), {
            "attention_paths/d128_agrees": "passed", "attention_paths/dense_agrees": "passed",
            "attention_paths/d64_agrees": "passed", "attention_stress/long": "passed",
            "linear": "passed", "adamw": "passed", "attention": "passed",
            "attention/tiled": "passed", "later": "passed", "nccl": "cannot start"})
        self.assertEqual(list(self.statuses("correctness"))[0], "attention_paths/d128_agrees")
        row = self.rows("correctness")["attention_paths/d128_agrees"]
        self.assertEqual(row["result"], {"passed": 1, "failed": 0, "largest_relative_errors": {
            "out on any BF16": 2.5e-3, "d_x F32": 3e-6}})
        self.assertIn(" --exact attention_paths::d128_agrees --nocapture --test-threads 1",
                      self.runs()[1])

    def test_attention_runs_without_hopper_where_hopper_fails(self):
        self.plan([["--list", "tests"], ["attention_paths::d64", "failing test"],
                   ["linear", "no test"], ["", "tests"]])
        code, stdout, _ = self.measure("correctness")
        rows = self.rows("correctness")
        self.assertEqual(code, 1)
        self.assertEqual(rows["attention_paths/d64_agrees"]["code"], 101)
        self.assertEqual(rows["attention_paths/d64_agrees"]["result"]["failed_tests"],
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

    def test_the_paths_are_cases_where_no_test_is_listed(self):
        self.plan([["--list", "die"], ["", "tests"]])
        self.measure("correctness", *named("attention_paths/*"))
        self.assertEqual(len(self.rows("correctness")), len(cases.PATHS))


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


class Readers(unittest.TestCase):
    def read(self, kind, text, errors=""):
        return read_output.READERS[kind](
            execute.Finished("exited", 0, 1.0, text, errors), None)

    def refuses(self, kind, text, message):
        with self.assertRaisesRegex(read_output.Unreadable, message):
            self.read(kind, text)

    def test_json_lines_stand_between_others(self):
        found = self.read("pytorch", 'warning\n{"kind": "sdpa", "x": 1}\n{"kind": "fl')
        self.assertEqual(found, {"rows": [{"kind": "sdpa", "x": 1}], "broken_lines": 1})
        self.refuses("pytorch", "Traceback", "no line of JSON")

    def test_json_is_cut_or_lacks_fields(self):
        self.refuses("step", '{"model": {"layers": 1', "cannot be read")
        self.refuses("step", '{"model": {}, "step": {}}', "has no tokens_per_second")
        self.refuses("step", "{" * 100_000, "cannot be read")

    def test_a_relative_error_that_is_no_number_is_the_largest(self):
        for errors in [("1e-3", "NaN"), ("NaN", "1e-3")]:
            text = "".join(f"out: F32 relative error {error}\n" for error in errors)
            found = self.read("tests", text)["largest_relative_errors"]["out F32"]
            self.assertEqual(found, float("inf"))

    def test_counters_are_read_between_the_lines_of_the_program(self):
        text = ('32 heads\n"ID","Process ID","Kernel Name","Section Name","Metric Name",'
                '"Metric Unit","Metric Value"\n'
                '"0","7","hopper_forward_d128","Memory","L2 Hit Rate","%","81.5"\n'
                "dense 100%\n"
                '"0","7","hopper_forward_d128","Speed","Duration","ns","1,234,567"\n'
                '"1","7","hopper_forward_d128","Memory","L2 Hit Rate","%","79"\n'
                '"1","7","hopper_forward_d128","Memory","","",""\n')
        self.assertEqual(self.read("ncu", text)["kernels"], [
            {"kernel": "hopper_forward_d128",
             "metrics": {"L2 Hit Rate": [81.5, "%"], "Duration": [1234567.0, "ns"]}},
            {"kernel": "hopper_forward_d128", "metrics": {"L2 Hit Rate": [79.0, "%"]}}])
        self.refuses("ncu", "==ERROR== No kernels were profiled", "no table")

    def test_the_sanitizer_says_what_it_found(self):
        text = ("========= COMPUTE-SANITIZER\n========= Invalid __global__ read of size 4 bytes\n"
                "=========     at hopper_forward_d128+0x10\n"
                "========= Invalid __global__ read of size 4 bytes\n"
                "========= ERROR SUMMARY: 2 errors\n")
        self.assertEqual(self.read("sanitizer", text), {
            "summary": ["ERROR SUMMARY: 2 errors"],
            "reports": {"Invalid __global__ read of size 4 bytes": 2}})
        text = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
        self.assertEqual(self.read("sanitizer", text)["reports"], {})


class Tables(unittest.TestCase):
    def test_a_row_that_cannot_be_shown_takes_no_other_with_it(self):
        machine = {"device": "GPU", "f32_matmul_flops_per_second": 4e14,
                   "bf16_matmul_flops_per_second": 7e14, "copy_bytes_per_second": 4e12}
        rows = {name: {"name": name, "kind": "limits", "status": "passed", "header": 0,
                       "seconds": 1.0, "result": {"machine": found}}
                for name, found in [("good", machine), ("bad", {"device": None})]}
        document = tables.document({"speed": ([{"gpu": "H200", "commit": "abc"}], rows)})
        self.assertIn("| good | GPU | 400 | 700 | 4,000 |", document)
        self.assertIn("bad: cannot be shown: KeyError", document)
        self.assertIn("on H200, commit abc: 2 of 2 cases passed.", document)


class Sass(unittest.TestCase):
    LISTING = b"""
arch = sm_90a
\t\tFunction : hopper_forward_d128
        /*0000*/                   LDC R1, c[0x0][0x28] ;    /* 0x00000a00ff017b82 */
                                                             /* 0x000fe20000000800 */
        /*0010*/              @!P0 STL.64 [R1], R2 ;         /* 0x0000000005057919 */
        /*0020*/              @UP1 USETMAXREG.DEALLOC 0x18 ; /* 0x0000000005057919 */
        /*12340*/                  HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ; /* 0x1 */
\t\tFunction : rope_forward
        /*0000*/                   LDL R1, [R2] ;            /* 0x00000a00ff017b82 */
"""

    def test_instructions_are_counted_by_kernel(self):
        counts = {}
        sass.count(self.LISTING.splitlines(keepends=True), counts)
        self.assertEqual(counts, {"hopper_forward_d128 sm_90a": {
            "instructions": 4, "LDC": 1, "STL": 1, "USETMAXREG": 1, "HGMMA": 1}})

    def test_fat_binaries_are_cut_out_of_the_program(self):
        binary = sass.MAGIC + struct.pack("<Q", 5) + b"inner"
        too_large = sass.MAGIC + struct.pack("<Q", 1 << 60)
        with tempfile.NamedTemporaryFile() as file:
            file.write(b"ELF" + too_large + b"code" + binary + b"data" + binary + sass.MAGIC)
            file.flush()
            self.assertEqual(list(sass.fat_binaries(file.name)), [binary, binary])


class Lists(unittest.TestCase):
    def test_names_are_unique_and_kinds_are_known(self):
        for run in cases.RUNS:
            found = cases.of(run, Path("programs"), "scratch", ["attention_paths::a", "b::c"])
            names = [case.name for case in found]
            self.assertEqual(len(names), len(set(names)))
            self.assertLessEqual({case.kind for case in found}, set(read_output.READERS))
        self.assertEqual({kind for _, kind, _, _ in tables.TABLES}, set(read_output.READERS))
        self.assertEqual(set(tables.HEADLINES), set(read_output.READERS))


if __name__ == "__main__":
    unittest.main()
