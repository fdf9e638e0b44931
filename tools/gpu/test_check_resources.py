"""Tests of tools/gpu/check_resources with a document of its own."""

import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
TABLE = ("| kernel | architecture | registers | bytes spilled | static shared bytes |\n"
         "|---|---|---|---|---|\n")
ROWS = ["| rope_forward | sm_90a | 32 | 0 | 0 |\n",
        "| hopper_forward_d64 | sm_90a | 168 | 0 | 0 |\n"]


class CheckResources(unittest.TestCase):
    def check(self, document, built):
        """Returns the exit code and the messages. `built` is the table that the build wrote, or None."""
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "tools/gpu/check_resources"
            script.parent.mkdir(parents=True)
            shutil.copy(HERE / "check_resources", script)
            (Path(folder) / "docs").mkdir()
            (Path(folder) / "docs/gpu.md").write_text(document)
            resources = Path(folder) / "resources.md"
            if built is not None:
                resources.write_text(built)
            done = subprocess.run([script, resources], capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    def test_rows_that_the_build_wrote_pass(self):
        # The document shows some kernels, among other tables.
        document = "# GPUs\n\n| path | supports |\n|---|---|\n| `tiled` | any |\n\n" + TABLE
        for rows in [ROWS, ROWS[1:]]:
            code, text = self.check(document + "".join(rows) + "\nMore.\n", TABLE + "".join(ROWS))
            self.assertEqual((code, text), (
                0, f"{len(rows)} rows of docs/gpu.md are the assembler's\n"))

    def test_a_row_that_the_build_did_not_write_is_named(self):
        stale = ROWS[1].replace("| 168 |", "| 16 |")
        code, text = self.check(TABLE + ROWS[0] + stale, TABLE + "".join(ROWS))
        self.assertEqual(code, 1)
        self.assertIn("copy its rows of these kernels:\n" + stale, text)
        self.assertNotIn(ROWS[0], text)

    def test_a_document_without_rows_is_an_error(self):
        code, text = self.check("# GPUs\n\n" + TABLE, TABLE + "".join(ROWS))
        self.assertEqual(code, 1)
        self.assertIn("docs/gpu.md has no row of a kernel", text)

    def test_a_table_that_is_missing_or_empty_is_an_error(self):
        for built in [None, ""]:
            code, text = self.check(TABLE + "".join(ROWS), built)
            self.assertEqual(code, 1)
            self.assertIn("resources.md is missing or empty: name the table", text)


if __name__ == "__main__":
    unittest.main()
