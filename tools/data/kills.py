#!/usr/bin/env python3
"""Kills a preparation at random moments until it ends, and compares its files with those of one that ran through.

    tools/data/kills.py --program target/release/moh-data --tokenizer tok128k --text text.jsonl --kills 40

The text is divided among 20 files: plain, gzip, Zstandard if the program zstd is there, and JSON arrays.
"""

import argparse
import gzip
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FILES = 20


def inputs(text, repeat, directory):
    """Writes the files of the text."""
    lines = text.read_text(encoding="utf-8").splitlines(keepends=True) * repeat
    for number in range(FILES):
        part = lines[len(lines) * number // FILES : len(lines) * (number + 1) // FILES]
        path = directory / f"part{number:02}.jsonl"
        if number % 4 == 1:
            with gzip.open(path.with_suffix(".jsonl.gz"), "wt", encoding="utf-8", compresslevel=1) as file:
                file.writelines(part)
        elif number % 4 == 2:
            path.with_suffix(".json").write_text("[" + ",".join(part) + "]", encoding="utf-8")
        else:
            path.write_text("".join(part), encoding="utf-8")
            if number % 4 == 3 and shutil.which("zstd"):
                subprocess.run(["zstd", "-q", "--rm", path], check=True)


def is_complete(prefix):
    """Returns whether a preparation has published its files and has no state from which to resume."""
    return prefix.with_name(f"{prefix.name}-train.bin").exists() and not any(prefix.parent.glob(f"{prefix.name}*.prepare"))


def killed(command, prefix, kills, whole, chance):
    """Runs a command, which takes `whole` seconds, until it ends, and kills it up to `kills` times. Returns the
    number of kills.

    If a kill comes after the files are complete, it is the last, because the command refuses to replace the
    files.
    """
    done = 0
    while True:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        # While kills are left, each waits so short a time that the remaining kills come before the end.
        left = kills - done
        patience = chance.uniform(0, 2.5 * whole / (left + 1)) if left else None
        try:
            _, messages = process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            done += 1
            if is_complete(prefix):
                return done
            continue
        if process.returncode:
            sys.exit(f"failed with exit code {process.returncode} after {done} kills: {messages[-2000:]}")
        return done


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--repeat", type=int, default=1, help="how often the text is read")
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(dir=arguments.text.resolve().parent) as name:
        directory = Path(name)
        (directory / "in").mkdir()
        inputs(arguments.text, arguments.repeat, directory / "in")

        def command(out):
            options = ["--split", "0.95,0.05", "--exact-dedup", "--sync-every", "0.05"]
            words = [arguments.program, "prepare", "--tokenizer", arguments.tokenizer, *options]
            return [*words, "--out", directory / out, directory / "in"]

        started = time.perf_counter()
        subprocess.run(command("whole"), check=True, capture_output=True)
        whole = time.perf_counter() - started
        kills, runs = 0, 0
        while kills < arguments.kills:
            for path in directory.glob("cut*.*"):
                path.unlink()
            kills += killed(command("cut"), directory / "cut", arguments.kills - kills, whole, chance)
            runs += 1
            for part in ("train", "validation"):
                for ending in ("bin", "idx", "json"):
                    files = [(directory / f"{out}-{part}.{ending}").read_bytes() for out in ("whole", "cut")]
                    if files[0] != files[1]:
                        sys.exit(f"{part}.{ending} differs after {kills} kills")
        left = [path.name for path in directory.iterdir() if path.name.endswith(".prepare")]
        if left:
            sys.exit(f"left behind: {left}")
        info = json.loads((directory / "cut-train.json").read_text())
    tokens = f"{info['tokens']} tokens"
    print(f"{kills} kills of {runs} preparations of {whole:.1f} s, each with the same bytes, {tokens}")


if __name__ == "__main__":
    main()
