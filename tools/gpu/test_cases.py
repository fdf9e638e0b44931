"""Tests of the names and commands of the cases, against the sources that they name."""

import fnmatch
import json
import re
import subprocess
import tempfile
import unittest
from pathlib import Path

import cases
import read_output
import sass
import tables

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

# A test with its preceding attributes, with which a build may exclude the test.
RUST_TEST = re.compile(
    r"((?:^ *#\[[^\n]*\]\n)*?)^ *#\[test\]\n(?:^ *#\[[^\n]*\]\n)*^ *fn (\w+)", re.M)
OPERATORS = ROOT / "kernels/tests/operators"


def rust_tests(path):
    """Returns the names of a file's tests in a build for GPUs, which has no emulator."""
    return [name for attributes, name in RUST_TEST.findall(path.read_text())
            if "cuda-emulator" not in attributes or 'feature = "cuda"' in attributes]


class Lists(unittest.TestCase):
    def test_names_are_unique_and_kinds_are_known(self):
        for run in cases.RUNS:
            found = cases.of(run, Path("programs"), "scratch", ["attention_paths::a", "b::c"])
            names = [case.name for case in found]
            self.assertEqual(len(names), len(set(names)))
            self.assertLessEqual({case.kind for case in found}, set(read_output.READERS))
        self.assertEqual({kind for _, kind, _, _ in tables.TABLES}, set(read_output.READERS))
        self.assertEqual(set(tables.HEADLINES), set(read_output.READERS))

    def test_the_runs_fit_in_twenty_minutes(self):
        self.assertLessEqual(sum(cases.RUNS.values()), 1200)
        found = cases.of("correctness", Path("programs"), "scratch", [])
        limits = {case.seconds for case in found if case.name.startswith("attention_stress/")}
        self.assertEqual(limits, {120})


class Sources(unittest.TestCase):
    """The names that the cases use from the Rust and CUDA files: a test that is renamed there
    would not run here."""

    def test_the_tests_of_the_cases_exist(self):
        modules = {path.stem: rust_tests(path) for path in OPERATORS.glob("*.rs")}
        self.assertEqual(sorted(cases.PATHS), sorted(modules["attention_paths"]))
        self.assertEqual(sorted(cases.STRESS), sorted(modules["attention_stress"]))
        for name in [cases.SANITIZED, cases.SMALL_HEADS]:
            module, test = name.split("::")
            self.assertIn(test, modules[module])
        for module in [*cases.MODULES, *cases.HOPPER, "linear"]:
            self.assertTrue(modules.get(module), module)
        self.assertTrue(rust_tests(ROOT / "workspace/model/tests/model/devices.rs"))
        self.assertTrue(rust_tests(ROOT / "workspace/comm/src/engine/nccl/mod.rs"))

    def test_dense_attention_comes_first_and_small_heads_last(self):
        listed = [f"attention_stress::{name}" for name in
                  sorted(rust_tests(OPERATORS / "attention_stress.rs"))]
        names = [case.name for case in cases.of("correctness", Path("programs"), "", listed)]
        self.assertEqual(names[1], "attention_paths/every_path_of_dense_attention_agrees")
        stress = [name for name in names if name.startswith("attention_stress/")]
        self.assertEqual((stress[0], stress[-1]),
                         ("attention_stress/dense", "attention_stress/heads_of_64"))
        self.assertEqual(len(stress), len(listed))

    def test_the_kernels_and_paths_of_the_cases_exist(self):
        source = (ROOT / "kernels/src/operators/attention/cuda/hopper/hopper.cu").read_text()
        kernels = re.findall(r"__global__ .* (\w+_d)##width\(", source)
        self.assertIn("\nHOPPER_KERNELS(128)", source)
        depth = cases.of("depth", Path("programs"), "scratch", [])
        measured = {word.removeprefix("regex:") for case in depth for word in case.command
                    if str(word).startswith("regex:")}
        self.assertEqual(measured, {"hopper_forward_d128", "hopper_backward_d128"})
        self.assertLessEqual(measured, {f"{kernel}128" for kernel in kernels})
        self.assertIn(cases.ONLY_HOPPER[-1].removeprefix("kns="), "hopper_forward_d128")
        self.assertIn(sass.WANTED, "hopper_forward_d128")
        # The output that shows that the test under compute-sanitizer ran on path hopper.
        self.assertIn('println!("{path:?}, ', (OPERATORS / "attention_paths.rs").read_text())
        known = (ROOT / "kernels/src/operators/attention/cuda/path.rs").read_text()
        paths = {case.variables["MOH_ATTENTION"] for run in cases.RUNS
                 for case in cases.of(run, Path("programs"), "scratch", [])
                 if "MOH_ATTENTION" in case.variables}
        self.assertEqual(paths, {"hopper", "tiled"})
        for path in paths:
            self.assertIn(f'"{path}"', known)

    def test_the_model_of_long_sequences_has_the_recipe_s_shape(self):
        own, long = (json.loads((ROOT / path).read_text()) for path in
                     ["recipes/llama3-8b/config.json", "tools/gpu/long_config.json"])
        self.assertEqual(own.pop("max_position_embeddings"), cases.LONGEST)
        self.assertEqual(long.pop("max_position_embeddings"), 32768)
        self.assertEqual(own, long)

    def test_the_operator_of_the_limits_exists(self):
        source = "".join(path.read_text() for path in (ROOT / "kernels/src/cases").glob("*.rs"))
        self.assertIn('"squared_norm"', source)


class Document(unittest.TestCase):
    """The commands of docs/gpu.md: if a case is renamed, its figure could not be measured again."""

    # A run and its options, with their values: `measure.py speed --case 'curve/*'`.
    COMMAND = re.compile(r"measure\.py (\w+)((?: --\w+(?: '[^']*'| [^-\s`'][^\s`']*)?)*)")
    CASE = re.compile(r"--case '?([^\s`']+)")

    def test_the_runs_and_cases_of_its_commands_exist(self):
        text = " ".join((ROOT / "docs/gpu.md").read_text().split())
        commands = [(run, self.CASE.findall(options))
                    for run, options in self.COMMAND.findall(text)]
        self.assertEqual({run for run, _ in commands}, set(cases.RUNS))
        for run, patterns in commands:
            names = [case.name for case in cases.of(run, Path("programs"), "scratch", [])]
            for pattern in patterns:
                self.assertTrue(fnmatch.filter(names, pattern), f"{run} has no case {pattern}")
        # Every case is named with its run, except in the explanation of the option.
        in_commands = [pattern for _, patterns in commands for pattern in patterns]
        self.assertEqual(sorted(self.CASE.findall(text)), sorted([*in_commands, "NAME"]))


class CheckCommands(unittest.TestCase):
    ACCEPTS = "echo 'error: --device cuda: this build supports the CPU only: build it' >&2; exit 1"

    def check(self, bench, train):
        with tempfile.TemporaryDirectory() as folder:
            for name, text in [("moh-bench", bench), ("moh-train", train)]:
                path = Path(folder) / name
                path.write_text(f"#!/bin/sh\n{text}\n")
                path.chmod(0o755)
            done = subprocess.run([HERE / "check_commands", "--programs", folder],
                                  capture_output=True, text=True)
        return done.returncode, done.stdout

    def test_commands_that_are_refused_are_faults(self):
        train = f"case $* in *--plan*) exit 0;; esac; {self.ACCEPTS}"
        code, stdout = self.check(self.ACCEPTS, train)
        self.assertEqual(code, 0, stdout)
        self.assertIn(", 2 commands of moh-train, 0 faults", stdout)
        refuses = "case $* in *--kernels*) echo 'unexpected argument' >&2; exit 2;; esac; "
        code, stdout = self.check(refuses + self.ACCEPTS, train)
        self.assertEqual(code, 1)
        self.assertTrue(stdout.startswith("kernels/32/75%: "), stdout)
        self.assertIn("code 2: unexpected argument", stdout)
        self.assertIn(", 1 faults", stdout)
        # An end without an error, a usage error, and a plan that fails, also under a profiler.
        for bench in ["exit 0", self.ACCEPTS.replace("exit 1", "exit 2")]:
            code, stdout = self.check(bench, "exit 1")
            self.assertEqual(code, 1)
            for name in ["quickstart/cpu-f32", "quickstart/gpu-bf16", "limits", "ncu/forward"]:
                self.assertIn(f"{name}: /", stdout)


if __name__ == "__main__":
    unittest.main()
