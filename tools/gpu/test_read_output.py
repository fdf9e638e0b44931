"""Tests of the readers of the programs' output, and of the tables made from it."""

import json
import struct
import tempfile
import time
import unittest

import cases
import execute
import read_output
import sass
import tables


PASSED = "test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 9 filtered out\n"


class Readers(unittest.TestCase):
    def read(self, kind, text, errors="", command=(), variables=None, num_tests=None):
        case = cases.Case("a case", kind, 1.0, command, variables or {}, num_tests=num_tests)
        return read_output.READERS[kind](
            execute.Finished("exited", 0, 1.0, text, errors), case)

    def refuses(self, kind, text, message, how=read_output.Unreadable, **options):
        with self.assertRaisesRegex(how, message) as caught:
            self.read(kind, text, **options)
        return caught.exception

    def test_json_lines_stand_between_others(self):
        found = self.read("pytorch", 'warning\n{"kind": "sdpa", "x": 1}\n{"kind": "fl')
        self.assertEqual(found, {"rows": [{"kind": "sdpa", "x": 1}], "broken_lines": 1})
        self.refuses("pytorch", "Traceback", "no line of JSON")

    def test_rows_of_which_each_has_an_error_are_a_failure(self):
        bad, good = '{"kind": "flash", "error": "no package"}\n', '{"kind": "sdpa", "ms": 1}\n'
        fault = self.refuses("pytorch", bad + bad, "every row has an error: no package",
                             read_output.NotPassed)
        self.assertEqual((fault.status, len(fault.result["rows"])), ("failed", 2))
        self.assertEqual(len(self.read("pytorch", bad + good)["rows"]), 2)

    def test_attention_is_compared_with_the_path_that_was_selected(self):
        def printed(*paths):
            rows = [{"active": 1.0, "path": path} for path in paths]
            return json.dumps({"shape": {"length": 1}, "cases": rows})

        selected = {"variables": {"MOH_ATTENTION": "hopper"}}
        found = self.read("attention", printed("hopper", "hopper"), **selected)
        self.assertEqual(len(found["cases"]), 2)
        for paths, ran in [(["plain"], "plain"), (["hopper", "tiled"], "hopper, tiled"), ([None], "None")]:
            fault = self.refuses("attention", printed(*paths), f"ran on {ran}: expected hopper",
                                 read_output.NotPassed, **selected)
            self.assertEqual(fault.status, "failed")
        # A CPU has no paths.
        self.assertIn("shape", self.read("attention", printed(None)))

    def test_a_step_without_kernels_is_refused(self):
        step = {"model": {"layers": 1}, "step": {"tokens": 1}}
        self.refuses("kernels", json.dumps(step | {"gpu_time": None}), "has no gpu_time")
        self.refuses("kernels", json.dumps(step | {"gpu_time": {"launches": 0, "kernels": []}}),
                     "no kernel was recorded", read_output.NotPassed)

    def test_a_step_whose_loss_is_not_finite_is_refused(self):
        found = {"model": {"layers": 1}, "step": {"tokens": 1}, "tokens_per_second": {"median": 1},
                 "gpu_time": {"kernels": [{"name": "matmul"}]}}
        for kind in ["step", "kernels"]:
            for losses in [{"first": None, "last": 1.0}, {"first": 1.0, "last": float("inf")}]:
                fault = self.refuses(kind, json.dumps(found | {"loss": losses}),
                                     "the loss is not finite", read_output.NotPassed)
                self.assertEqual(fault.status, "failed")
                self.assertEqual(fault.result["tokens_per_second"], {"median": 1})

    def test_instructions_of_no_kernel_are_refused(self):
        self.refuses("sass", '{"kernels": {}}', "has no kernels")

    def test_tests_that_did_not_run_are_refused(self):
        self.refuses("tests", "out: F32 relative error 1e-3\n", "no summary of tests")
        self.refuses("tests", PASSED.replace("1 passed", "0 passed"), "no test ran")
        self.refuses("tests", PASSED, "1 tests ran, expected 2", read_output.NotPassed,
                     num_tests=2)
        fault = self.refuses("tests", "skipped: no GPU\n" + PASSED, "no GPU", read_output.Skipped)
        self.assertEqual(fault.result["passed"], 1)

    def test_json_is_cut_or_lacks_fields(self):
        self.refuses("step", '{"model": {"layers": 1', "cannot be read")
        self.refuses("step", '{"model": {"layers": 1}, "step": {"tokens": 1}}',
                     "has no tokens_per_second")
        self.refuses("operators", '{"operators": []}', "has no operators")

    def test_json_stands_behind_other_braces(self):
        found = {"operators": [{"operator": "rope"}], "machine": {}}
        for before in ["warn: {cuda} ", "{", '{"a": 1} {"operators": []}\n', '{"a": [{']:
            self.assertEqual(self.read("operators", before + json.dumps(found) + "}"), found)

    def test_a_flood_of_braces_ends(self):
        start = time.monotonic()
        for flood in ["{" * 4_000_000, "{}" * 2_000_000, '{"a":' * 800_000]:
            self.refuses("operators", flood, "the JSON (cannot be read|has no operators)")
        self.assertLess(time.monotonic() - start, 3 * read_output.SEARCH + 2)

    def test_a_relative_error_that_is_no_number_is_the_largest(self):
        for errors in [("1e-3", "NaN"), ("NaN", "1e-3")]:
            text = "".join(f"out: F32 relative error {error}\n" for error in errors)
            found = self.read("tests", text + PASSED)["largest_relative_errors"]["out F32"]
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
        hopper = {"num_tests": 1, "command": ["compute-sanitizer", *cases.ONLY_HOPPER]}
        ran = "test a::b ... Hopper, true, on a GPU\n"
        self.assertEqual(self.read("sanitizer", text + ran + PASSED, **hopper)["reports"], {})
        self.refuses("sanitizer", text + ran, "0 tests ran", read_output.NotPassed, **hopper)
        self.refuses("sanitizer", text + PASSED, "on path hopper", read_output.Skipped, **hopper)


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


    def test_a_result_is_tried_on_its_table_and_its_line(self):
        for kind, result, error in [
                ("operators", {"operators": [{"operator": "rope"}]}, "KeyError: 'seconds'"),
                ("sanitizer", {"summary": [], "reports": {}}, "IndexError"),
                ("sanitizer", {"summary": ["0 errors"], "reports": {}}, None)]:
            found = tables.fault({"kind": kind, "seconds": 1.0, "result": result})
            if error:
                self.assertIn(f"the result cannot be shown: {error}", found)
            else:
                self.assertIsNone(found)


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


if __name__ == "__main__":
    unittest.main()
