"""Tests of tools/eval that need neither lm-evaluation-harness nor a model."""

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

import harness  # noqa: E402
import paper_tasks  # noqa: E402


def program(name):
    """Loads a program without an extension as a module."""
    loader = importlib.machinery.SourceFileLoader(name, str(FOLDER / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


class Published(unittest.TestCase):
    def test_the_averages_are_those_of_the_rows(self):
        count = len(paper_tasks.PAPER)
        self.assertEqual(count, 14)
        llama3 = sum(row.llama3 for row in paper_tasks.PAPER) / count
        moh_llama3 = sum(row.moh_llama3 for row in paper_tasks.PAPER) / count
        self.assertEqual((round(llama3, 1), round(moh_llama3, 1)), paper_tasks.AVERAGE)

    def test_a_table_has_an_average_of_all_or_none(self):
        scores = {row.name: row.llama3 for row in paper_tasks.PAPER}
        self.assertEqual(paper_tasks.table(scores)[-1].split(), ["average", "61.6", "61.6", "64.0"])
        del scores["PIQA"]
        lines = paper_tasks.table(scores)
        self.assertEqual(lines[-1].split(), ["average", "-", "61.6", "64.0"])
        self.assertEqual(len({len(line) for line in lines}), 1)
        self.assertIn(["PIQA", "0", "acc_norm", "-", "81.0", "78.8"], [line.split() for line in lines])

    def test_benchmarks_are_chosen_by_name(self):
        chosen = program("paper").chosen
        self.assertEqual([row.task for row in chosen("sciq, mmlu")], ["mmlu", "sciq"])
        with self.assertRaisesRegex(harness.Failure, "--tasks none: no benchmark of the paper"):
            chosen("piqa,none")


class LocalTasks(unittest.TestCase):
    def write(self, *examples):
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        path = folder / "in.jsonl"
        path.write_text("".join(json.dumps(example) + "\n" for example in examples))
        harness.write_local_task(path, "task", folder)
        rows = harness.read_lines(folder / "task.jsonl")
        return json.loads((folder / "task.yaml").read_text()), rows

    def test_choices_have_a_delimiter_and_clozes_contain_it(self):
        example = {"context": "a", "choices": ["b", "c"], "answer": 1, "target_delimiter": "\n"}
        task, rows = self.write(example)
        self.assertEqual((task["output_type"], task["target_delimiter"]), ("multiple_choice", "\n"))
        self.assertEqual(rows, [{"context": "a", "choices": ["b", "c"], "answer": 1}])
        task, rows = self.write({"context": "a", "answer": "b"})
        self.assertEqual(task["output_type"], "loglikelihood")
        self.assertEqual(rows, [{"context": "a", "target": " b"}])

    def test_faults_are_sentences(self):
        with self.assertRaisesRegex(harness.Failure, "several target_delimiter"):
            self.write({"context": "", "answer": "b"}, {"context": "", "answer": "b", "target_delimiter": ""})
        with self.assertRaisesRegex(harness.Failure, "no valid 'context'"):
            self.write({"answer": "b"})
        with self.assertRaisesRegex(harness.Failure, "must contain JSON objects"):
            self.write()
        with self.assertRaisesRegex(harness.Failure, "none.jsonl: No such file"):
            harness.read_lines("none.jsonl")

    def test_the_committed_tasks_can_be_read_and_are_small(self):
        paths = sorted((FOLDER / "tasks").glob("*.jsonl"))
        self.assertEqual([path.stem for path in paths], ["village-choice", "village-cloze"])
        self.assertLess(sum(path.stat().st_size for path in paths), 50_000)
        for path in paths:
            self.assertEqual(len(harness.read_lines(path)), 40)


class Comparison(unittest.TestCase):
    def test_a_difference_is_found(self):
        compare = program("check").compare

        def task(accuracy, *sums):
            return {"acc,none": accuracy}, [{"doc_id": 0, "filtered_resps": [(found, False) for found in sums]}]

        faults, largest = compare(task(1.0, -1.0, -2.0), task(1.0, -1.0, -2.0005))
        self.assertEqual(faults, [])
        self.assertAlmostEqual(largest, 0.0005)
        faults, _ = compare(task(1.0, -1.0, -2.0), task(0.0, -1.1, -2.0005))
        self.assertEqual(len(faults), 2)
        self.assertEqual(len(compare(task(1.0, float("nan"), -2.0), task(1.0, -1.0, -2.0))[0]), 1)
        with self.assertRaises(ValueError):
            compare(task(1.0, -1.0), task(1.0, -1.0, -2.0))


class Programs(unittest.TestCase):
    def test_help_and_wrong_arguments_need_no_installation(self):
        for name in ("check", "paper"):
            result = subprocess.run([FOLDER / name, "--help"], capture_output=True, text=True)
            self.assertEqual(result.returncode, 0, result.stderr)
        arguments = [FOLDER / "paper", "model", "--tasks", "none"]
        result = subprocess.run(arguments, capture_output=True, text=True)
        self.assertEqual(result.returncode, 1)
        self.assertRegex(result.stderr, "^error: --tasks none: ")


if __name__ == "__main__":
    unittest.main()
