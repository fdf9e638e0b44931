"""Tests of tools/gpu/prepare without a compiler."""

import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent


class Prepare(unittest.TestCase):
    """tools/gpu/prepare with a cargo that compiles kernels once, as cargo does if nothing
    changes."""

    TOOLS = {
        "cargo": """#!/usr/bin/env bash
            mkdir -p target/release
            echo "$*" >>target/cargo
            if [ ! -e target/compiled ]; then
                touch target/compiled
                echo "table of $MOH_CUDA_ARCHITECTURES" >"$MOH_CUDA_RESOURCES"
            fi
            touch target/release/moh-{bench,train} target/{model,moh_comm}
            if [ ! -e target/operators ]; then
                printf '#!/bin/sh\necho "rope::agrees: test"\n' >target/operators
                chmod +x target/operators
            fi
            case $* in
                *"-p moh-comm"*) names=moh_comm;;
                test*) names="operators model";;
            esac
            for name in $names; do
                echo '{"executable": "target/'$name'", "profile": {"test": true},' \\
                    '"target": {"name": "'$name'"}}'
            done
            """,
        "strip": "#!/usr/bin/env bash\ncp $3 $2\n",
        "xz": "#!/usr/bin/env bash\ncat\n",
    }

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.tools, self.out = self.root / "tools", self.root / "out"
        script = self.root / "repository/tools/gpu/prepare"
        for path, text in [(script, (HERE / "prepare").read_text()),
                           *((self.tools / name, text) for name, text in self.TOOLS.items())]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
        for words in ["init", "add .", "-c user.name=a -c user.email=a commit --message all"]:
            self.git(*words.split())
        self.script, self.target = script, self.root / "repository/target"

    def git(self, *words):
        return subprocess.run(["git", *words], cwd=self.root / "repository", check=True, text=True,
                              capture_output=True).stdout

    def prepare(self):
        variables = dict(os.environ, PATH=f"{self.tools}:{os.environ['PATH']}")
        variables.pop("MOH_CUDA_ARCHITECTURES", None)
        return subprocess.run([self.script, self.out], capture_output=True, text=True,
                              env=variables)

    def test_the_script_can_be_parsed(self):
        done = subprocess.run(["bash", "-n", HERE / "prepare"], capture_output=True)
        self.assertEqual((done.returncode, done.stderr), (0, b""))

    def test_a_folder_that_was_deleted_gets_everything_again(self):
        for _ in range(2):
            done = self.prepare()
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(sorted(os.listdir(self.out)), [
                "commit", "moh-bench", "moh-train", "resources.md", "test-devices",
                "test-kernels", "test-nccl", "tests"])
            self.assertEqual((self.out / "tests").read_text(), "rope::agrees: test\n")
            self.assertEqual((self.out / "resources.md").read_text(), "table of 90a\n")
            shutil.rmtree(self.out)

    def test_everything_is_built_for_gpus_and_nccl(self):
        self.prepare()
        build, test, test_nccl = (self.target / "cargo").read_text().splitlines()
        for words in [build, test]:
            features = words.partition("--features ")[2].split()[0].split(",")
            self.assertEqual(features, ["moh-train/nccl", "moh-kernels/cuda", "moh-model/cuda"])
        self.assertIn("-p moh-comm --features nccl ", test_nccl)

    def test_an_archive_that_is_too_large_is_an_error(self):
        (self.tools / "xz").write_text(
            "#!/usr/bin/env bash\ncat >/dev/null\ntruncate --size 51MB /dev/stdout\n")
        done = self.prepare()
        self.assertEqual(done.returncode, 1)
        self.assertIn("has 51000000 bytes, the limit is 50000000", done.stderr)

    def test_the_commit_says_whether_files_are_changed(self):
        head = self.git("rev-parse", "--short", "HEAD").strip()
        for expected in [head, head + "-dirty"]:
            self.assertEqual(self.prepare().returncode, 0)
            self.assertEqual((self.out / "commit").read_text(), expected + "\n")
            self.script.write_text(self.script.read_text() + "# changed\n")

    def test_tests_that_cannot_be_listed_here_leave_no_list(self):
        self.assertEqual(self.prepare().returncode, 0)
        (self.target / "operators").write_text("#!/bin/sh\necho begun\nexit 1\n")
        self.assertEqual(self.prepare().returncode, 0)
        self.assertFalse((self.out / "tests").exists())

    def test_a_table_that_is_lost_is_an_error(self):
        self.assertEqual(self.prepare().returncode, 0)
        (self.out.with_suffix(".tar.xz")).unlink()
        (self.target / "resources-90a.md").unlink()
        done = self.prepare()
        self.assertEqual(done.returncode, 1)
        self.assertIn("resources-90a.md is missing", done.stderr)
        self.assertIn("cargo clean --release -p moh-kernels", done.stderr)
        self.assertFalse(self.out.with_suffix(".tar.xz").exists())


if __name__ == "__main__":
    unittest.main()
