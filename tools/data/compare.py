#!/usr/bin/env python3
"""Compares `moh-data prepare` with Python's tokenizers and with the library that it encodes with.

    cargo build --release --bin moh-data --example encode_alone
    python3 -m venv data-venv && data-venv/bin/pip install -r tools/data/requirements.txt
    tools/data/text.py --megabytes 210 --out text.jsonl
    data-venv/bin/python tools/data/train_tokenizer.py --vocab-size 128256 --out tok128k text.jsonl
    data-venv/bin/python tools/data/compare.py --text text.jsonl tok128k OTHER_TOKENIZER...

Each round runs, one after the other and on the same number of threads: the whole command, from JSON lines to
synced token files; the library by itself, with the texts in memory, and the whole of that program, which loads the
tokenizer, reads the JSON lines and writes nothing; and `encode_batch_fast` of Python's tokenizers, also with the texts
in memory, on a part of them. Prints the median rates in MB of text a second, and ratios.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PYTHON = """
import json, sys, time
import tokenizers
tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1])
limit, bytes_, texts = int(sys.argv[3]), 0, []
for line in open(sys.argv[2], encoding="utf-8"):
    text = json.loads(line)["text"]
    bytes_ += len(text.encode())
    texts.append(text)
    if bytes_ >= limit:
        break
started = time.perf_counter()
tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch_fast(texts))
seconds = time.perf_counter() - started
print(json.dumps({"bytes": bytes_, "tokens": tokens, "seconds": seconds, "version": tokenizers.__version__}))
"""


def run(command, threads):
    environment = os.environ | {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{command[0]} failed: {done.stderr}")
    return done.stdout


def prepared(programs, tokenizer, text, threads):
    """Returns the bytes of text, the tokens and the seconds of the whole command."""
    with tempfile.TemporaryDirectory(dir=text.parent) as directory:
        out = Path(directory) / "tokens"
        started = time.perf_counter()
        run([programs / "moh-data", "prepare", "--tokenizer", tokenizer, "--no-append-eos", "--out", out, text], threads)
        seconds = time.perf_counter() - started
        info = json.loads(out.with_suffix(".json").read_text())
        size = sum(path.stat().st_size for path in Path(directory).iterdir())
    return {"bytes": info["text_bytes"], "tokens": info["tokens"], "seconds": seconds, "written": size}


def rate(results):
    return statistics.median(result["bytes"] / result["seconds"] / 1e6 for result in results)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="JSON lines with the field text")
    parser.add_argument("--programs", type=Path, default=ROOT / "target/release")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python-megabytes", type=float, default=20, help="text that Python encodes in a round")
    parser.add_argument("tokenizers", nargs="+", type=Path, help="directories with tokenizer.json")
    arguments = parser.parse_args()
    threads, text = arguments.threads, arguments.text.resolve()
    for tokenizer in arguments.tokenizers:
        file = tokenizer / "tokenizer.json"
        ours, alone, whole, python = [], [], [], []
        for _ in range(arguments.rounds):
            ours.append(prepared(arguments.programs, tokenizer, text, threads))
            started = time.perf_counter()
            alone.append(json.loads(run([arguments.programs / "examples/encode_alone", file, text], threads)))
            whole.append(alone[-1] | {"seconds": time.perf_counter() - started})
            limit = str(int(arguments.python_megabytes * 1e6))
            python.append(json.loads(run([sys.executable, "-c", PYTHON, file, text, limit], threads)))
        command, library, program, peer = rate(ours), rate(alone), rate(whole), rate(python)
        print(
            f"{tokenizer}, {threads} threads, {ours[0]['bytes'] / 1e6:.0f} MB: moh-data prepare {command:.1f} MB/s, "
            f"{ours[0]['tokens'] / 1e6 * command / ours[0]['bytes'] * 1e6:.1f} M tokens/s; "
            f"the library alone {library:.1f} ({command / library:.2f}), with loading and parsing {program:.1f} "
            f"({command / program:.2f}); "
            f"tokenizers {python[0]['version']} {peer:.2f} ({command / peer:.1f} times)",
            flush=True,
        )


if __name__ == "__main__":
    main()
