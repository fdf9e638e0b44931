#!/usr/bin/env python3
"""Measures the peak memory of `moh-data prepare` on large tables and documents, and compares it with --memory.

    python3 -m venv data-venv && data-venv/bin/pip install -r tools/data/requirements.txt
    data-venv/bin/python tools/data/memory.py --program target/release/moh-data --tokenizer recipes/quickstart

Each file is read with 2 GB and with 500 MB: 2 GB of text in JSON lines, in a row group of Parquet and in batches of
Arrow, and documents of 200 MB. With --small the files have some tens of megabytes, and the memory is 64 MB. A line of
300 MB, which is more than a document may have, is refused in both.

A run is ok if it ends as it should, and if its peak is at most that of a run on a line of text, --memory, 50 MB that the
C library's allocator keeps of what was freed, and eight times the largest document; a line that is refused is held once.
Of the tables a tenth of the documents is encoded (--sample), to spare time. Needs 8 GB of memory and 4 GB of disk, with
--small a tenth of that. Exits with 1 if a run is not ok.
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
# Bytes in memory for each byte of a document that is encoded.
FACTOR = 8
# Rows of a batch of Arrow.
BATCH_ROWS = 1000
# Maximum bytes of a document.
LARGEST = 256 * MEGABYTE

# Runs a command from a small process, since its peak includes the peak of its parent process.
LAUNCH = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024, code)
"""


def words(size, seed=1):
    """Returns text of a size in bytes that compresses to about a third."""
    chance = random.Random(seed)
    known = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randrange(2, 11))) for _ in range(5000)]
    # Repeats at a distance beyond the window of compression.
    block = " ".join(chance.choices(known, k=1_500_000)) + " "
    return (block * (size // len(block) + 1))[:size]


def rows(text, size):
    return [text[start : start + size] for start in range(0, len(text), size)]


def parquet(path, texts, **options):
    pq.write_table(pa.table({"text": texts}), path, row_group_size=len(texts), **options)


def arrow(path, texts, codec=None, open_file=pyarrow.ipc.new_file, kind=None):
    schema = pa.schema({"id": pa.int64(), "text": kind or pa.string()})
    options = pyarrow.ipc.IpcWriteOptions(compression=codec)
    with open_file(path, schema, options=options) as file:
        for start in range(0, len(texts), BATCH_ROWS):
            part = texts[start : start + BATCH_ROWS]
            file.write(pa.record_batch({"id": range(len(part)), "text": part}, schema=schema))


def json_lines(path, *texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def line_of_one_letter(path):
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(300):
            file.write(b"a" * MEGABYTE)


def cases(large, value):
    """Returns for each case: the name, a function that writes its inputs into a directory, the bytes that it may
    use in addition to --memory, and the share of the documents that is encoded. A case without a share is
    rejected."""
    stream = pyarrow.ipc.new_stream
    texts = {
        "parquet, zstd": lambda path, rows: parquet(path, rows, compression="zstd"),
        "parquet, snappy": lambda path, rows: parquet(path, rows, compression="snappy"),
        "parquet, zstd, no dictionary": lambda path, rows: parquet(path, rows, compression="zstd", use_dictionary=False),
        "parquet, snappy, no dictionary": lambda path, rows: parquet(
            path, rows, compression="snappy", use_dictionary=False),
        "arrow file": lambda path, rows: arrow(path, rows),
        "arrow file, lz4": lambda path, rows: arrow(path, rows, "lz4"),
        "arrow stream": lambda path, rows: arrow(path, rows, None, stream),
        "arrow stream, zstd": lambda path, rows: arrow(path, rows, "zstd", stream),
        "arrow file, views": lambda path, rows: arrow(path, rows, kind=pa.string_view()),
        "JSON lines": lambda path, rows: json_lines(path, *rows),
        "JSON array": lambda path, rows: path.write_text(json.dumps([{"text": text} for text in rows])),
    }

    def several(path):
        path.mkdir()
        for number in range(3):
            json_lines(path / f"{number}.jsonl", words(value // 3, number))

    values = {
        "parquet, a value, zstd": lambda path: parquet(path, [words(value)], compression="zstd", use_dictionary=False),
        "arrow file, a value": lambda path: arrow(path, [words(value)]),
        "JSON lines, a document": lambda path: json_lines(path, words(value)),
        "JSON array, an element": lambda path: path.write_text(json.dumps([{"text": words(value)}])),
        "JSON lines, a document in each of 3 files": several,
    }

    def of_rows(write):
        return lambda path: write(path, rows(words(large), 10_000))

    return [
        *((name, of_rows(write), 0, 0.1) for name, write in texts.items()),
        *((name, write, FACTOR * value, 1) for name, write in values.items()),
        ("JSON lines, gzip, a line of 300 MB", line_of_one_letter, LARGEST, None),
    ]


def run(arguments, directory, path, memory, share):
    """Returns the peak bytes, the exit code, the last line of output, and the seconds."""
    words = [arguments.program, "prepare", "--tokenizer", arguments.tokenizer, "--no-append-eos", "--memory", memory]
    words += ["--out", directory / "out", "--force", "--begin-anew", "--sample", str(share or 1)]
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
    large, value = (96 * MEGABYTE, 30 * MEGABYTE) if arguments.small else (2000 * MEGABYTE, 200 * MEGABYTE)
    memories = [64] if arguments.small else [2000, 500]
    broken = 0
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        line = directory / "line.jsonl"
        json_lines(line, "a line")
        base, code, said, _ = run(arguments, directory, line, "64MB", 1)
        if code:
            sys.exit(said)
        print(f"a line of text takes {base / MEGABYTE:.0f} MB\n")
        print("| file | --memory | most | peak | seconds | result |\n|---|---|---|---|---|---|")
        for number, (name, write, beside, share) in enumerate(cases(large, value)):
            if arguments.only not in name:
                continue
            path = directory / f"in{number}{'.json' if 'JSON' in name and 'files' not in name else ''}"
            write(path)
            for memory in memories:
                peak, code, said, seconds = run(arguments, directory, path, f"{memory}MB", share)
                most = base + memory * MEGABYTE + KEPT + beside
                is_refused = code == 1 and said.endswith("more than 256 MB, the most of a document: split it")
                is_ok = is_refused if share is None else code == 0
                result = "refused" if is_refused else "ok" if is_ok else said or f"exit code {code}"
                if peak > most:
                    result += ", MORE THAN IT MAY TAKE"
                broken += not is_ok or peak > most
                columns = [name, f"{memory} MB", f"{most / MEGABYTE:.0f} MB", f"{peak / MEGABYTE:.0f} MB", f"{seconds:.0f}", result]
                print(f"| {' | '.join(columns)} |", flush=True)
            for file in [*path.rglob("*")] if path.is_dir() else [path]:
                file.unlink()
    if broken:
        sys.exit(f"{broken} runs are not ok")


if __name__ == "__main__":
    main()
