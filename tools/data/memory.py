#!/usr/bin/env python3
"""Measures the peak memory of `moh-data prepare` on the largest documents and tables, and compares it with --memory.

    python3 -m venv data-venv && data-venv/bin/pip install -r tools/data/requirements.txt
    data-venv/bin/python tools/data/memory.py --program target/release/moh-data --tokenizer recipes/quickstart

Each file is read with 2 GB and with 500 MB: Parquet with a row group of 2 GB, or a value of 1 GB; Arrow with batches
of 2 GB; JSON with documents of 1 GB. With --small the files have some tens of megabytes, and the memory is 64 MB.

A run is ok if its peak is at most --memory, and 50 MB that the C library's allocator keeps of what was freed, above
that of a run on a line of text, and if it succeeds or says to raise --memory. Of the tables a tenth of the documents
is encoded (--sample), to spare time. Needs 8 GB of memory and 4 GB of disk, with --small a tenth of that. Exits with 1 if a run is not ok.
"""

import argparse
import gzip
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

MEGABYTE = 1_000_000
KEPT = 50 * MEGABYTE

# Runs a command from a small process: its peak counts that of the process that started it.
LAUNCH = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024, code)
"""


def words(size, seed=1):
    """Text that compresses to about a third, of a size in bytes."""
    chance = random.Random(seed)
    known = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randrange(2, 11))) for _ in range(5000)]
    # Repeated at a distance that compression does not look back.
    block = " ".join(chance.choices(known, k=1_500_000)) + " "
    return (block * (size // len(block) + 1))[:size]


def rows(text, size):
    return [text[start : start + size] for start in range(0, len(text), size)]


def uneven(text):
    """Short rows, and at the end a few that are long."""
    half, long = len(text) // 2, len(text) // 200
    return rows(text[:half], 100) + rows(text[half:], long)


def parquet(path, texts, **options):
    pq.write_table(pa.table({"text": texts}), path, row_group_size=len(texts), **options)


def arrow(path, texts, codec=None, open_file=pyarrow.ipc.new_file, kind=None):
    table = pa.table({"id": pa.array(range(len(texts))), "text": pa.array(texts, kind or pa.string())})
    options = pyarrow.ipc.IpcWriteOptions(compression=codec)
    with open_file(path, table.schema, options=options) as file:
        file.write_table(table)


def json_lines(path, text):
    path.write_text(json.dumps({"text": text}) + "\n")


def cases(large, value):
    """Of each case the name, a function that writes its inputs into a directory, and whether all is encoded."""
    stream = pyarrow.ipc.new_stream
    tables = {
        "parquet, zstd": lambda path: parquet(path, rows(words(large), 10_000), compression="zstd"),
        "parquet, snappy": lambda path: parquet(path, rows(words(large), 10_000), compression="snappy"),
        "parquet, zstd, no dictionary": lambda path: parquet(
            path, rows(words(large), 10_000), compression="zstd", use_dictionary=False),
        "parquet, snappy, no dictionary": lambda path: parquet(
            path, rows(words(large), 10_000), compression="snappy", use_dictionary=False),
        "parquet, gzip, long rows": lambda path: parquet(
            path, rows(words(large), large // 500), compression="gzip", compression_level=1, use_dictionary=False,
            write_batch_size=4),
        "parquet, uneven rows": lambda path: parquet(
            path, uneven(words(large)), use_dictionary=False, write_batch_size=4),
        "arrow file": lambda path: arrow(path, rows(words(large), 10_000)),
        "arrow file, lz4": lambda path: arrow(path, rows(words(large), 10_000), "lz4"),
        "arrow stream": lambda path: arrow(path, rows(words(large), 10_000), None, stream),
        "arrow stream, zstd": lambda path: arrow(path, rows(words(large), 10_000), "zstd", stream),
        "arrow file, views": lambda path: arrow(path, rows(words(large), 10_000), None, kind=pa.string_view()),
    }
    values = {
        "parquet, a value": lambda path: parquet(path, [words(value)], compression="none", use_dictionary=False),
        "parquet, a value, zstd": lambda path: parquet(path, [words(value)], compression="zstd", use_dictionary=False),
        "arrow file, a value": lambda path: arrow(path, [words(value)]),
        "JSON lines, a document": lambda path: json_lines(path, words(value)),
        "JSON array, an element": lambda path: path.write_text(json.dumps([{"text": words(value)}])),
    }

    def line_of_one_letter(path):
        with gzip.open(path, "wb", compresslevel=1) as file:
            for _ in range(large // MEGABYTE):
                file.write(b"a" * MEGABYTE)

    values["JSON lines, gzip, a line of one letter"] = line_of_one_letter
    values["parquet, zstd, a value of one letter"] = lambda path: parquet(path, ["a" * value], compression="zstd")

    def several(path):
        path.mkdir()
        for number in range(3):
            json_lines(path / f"{number}.jsonl", words(value // 2, number))

    values["JSON lines, a document in each of 3 files"] = several
    return [(name, write, False) for name, write in tables.items()] + [(name, write, True) for name, write in values.items()]


def run(arguments, directory, path, memory, encodes_all):
    """Peak bytes, exit code, the last line of what was said, and seconds."""
    words = [arguments.program, "prepare", "--tokenizer", arguments.tokenizer, "--no-append-eos", "--memory", memory]
    words += ["--out", directory / "out", "--force", "--begin-anew"]
    words += [] if encodes_all else ["--sample", "0.1"]
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", LAUNCH, *words, path], capture_output=True, text=True)
    lines = done.stderr.splitlines()
    peak, code = map(int, done.stdout.split())
    return peak, code, lines[-1] if lines else "", time.perf_counter() - started


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="tens of megabytes, with 64 MB")
    parser.add_argument("--directory", type=Path, help="where the files are made")
    parser.add_argument("--only", default="", help="cases whose name has this")
    arguments = parser.parse_args()
    large, value = (96 * MEGABYTE, 30 * MEGABYTE) if arguments.small else (2000 * MEGABYTE, 1000 * MEGABYTE)
    memories = [64] if arguments.small else [2000, 500]
    broken = 0
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        line = directory / "line.jsonl"
        json_lines(line, "a line")
        base, code, said, _ = run(arguments, directory, line, "64MB", True)
        if code:
            sys.exit(said)
        print(f"a line of text takes {base / MEGABYTE:.0f} MB\n")
        print("| file | --memory | peak | seconds | result |\n|---|---|---|---|---|")
        for number, (name, write, encodes_all) in enumerate(cases(large, value)):
            if arguments.only not in name:
                continue
            path = directory / f"in{number}{'.json' if 'JSON' in name and 'files' not in name else ''}"
            write(path)
            for memory in memories:
                peak, code, said, seconds = run(arguments, directory, path, f"{memory}MB", encodes_all)
                is_within = peak <= base + memory * MEGABYTE + KEPT
                is_ok = is_within and (code == 0 or code == 1 and "raise --memory" in said)
                broken += not is_ok
                result = "ok" if code == 0 else "refused" if is_ok else said or f"exit code {code}"
                if not is_within:
                    result += ", MORE THAN --memory"
                print(f"| {name} | {memory} MB | {peak / MEGABYTE:.0f} MB | {seconds:.0f} | {result} |", flush=True)
            for file in [*path.rglob("*")] if path.is_dir() else [path]:
                file.unlink()
    if broken:
        sys.exit(f"{broken} runs are not ok")


if __name__ == "__main__":
    main()
