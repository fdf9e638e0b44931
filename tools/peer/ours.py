"""Our side: the programs, run with a given number of threads."""

import json
import os
import re
import subprocess
from pathlib import Path


class Programs:
    def __init__(self, folder: Path, threads: int):
        self.folder, self.threads = folder, threads
        for name in ("moh-bench", "moh-generate"):
            if not (folder / name).is_file():
                raise SystemExit(
                    f"{folder / name} is missing: cargo build --release --workspace --bins"
                )

    def run(self, name: str, *arguments) -> subprocess.CompletedProcess:
        command = [str(self.folder / name), *map(str, arguments)]
        env = {**os.environ, "RAYON_NUM_THREADS": str(self.threads)}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
        return done

    def bench(self, *arguments) -> dict:
        return json.loads(self.run("moh-bench", *arguments, "--json").stdout)

    def step(self, config: Path, shape, dtype: str, steps: int) -> dict:
        """Returns dense training steps of a shape."""
        return self.bench(
            "step", "--config", config, "--batch", shape.batch, "--length", shape.length,
            "--dtype", dtype, "--steps", steps, "--dense",
        )

    def generate(self, model: Path, prompt: str, tokens: int) -> tuple[float, str]:
        """Returns the tokens per second after the prompt, and the text."""
        done = self.run(
            "moh-generate", "--model", model, "--prompt", prompt, "--max-tokens", tokens, "--dtype", "f32"
        )
        found = re.search(r"([\d.]+) tokens/s after a prompt", done.stderr)
        if not found:
            raise SystemExit(f"moh-generate did not print its speed: {done.stderr.strip()}")
        return float(found[1]), done.stdout
