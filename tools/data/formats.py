#!/usr/bin/env python3
"""Writes the same documents in every format and compression, with the programs that users write them with, and checks
that `moh-data prepare` makes the same files of them, byte for byte.

    python3 -m venv data-venv && data-venv/bin/pip install -r tools/data/requirements.txt
    data-venv/bin/python tools/data/formats.py --program target/release/moh-data --tokenizer DIR

The tables are pyarrow's (each compression, dictionary pages, version 2 pages, large strings, views, structs, several
row groups) and those of Hugging Face's datasets. Nulls are bad records, which `--skip-bad-lines` skips.
"""

import argparse
import bz2
import gzip
import json
import lzma
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq


def texts(count, seed):
    """Returns documents of many lengths: words, line ends, quotes, other scripts, one of a megabyte, some twice."""
    chance = random.Random(seed)
    words = ["the", "ship", "\n", "left", "\t", "\"quoted\"", "back\\slash", "na\u00efve", "\u4f60\u597d", "\U0001f6a2", "\r\n", "1984", "\u0000"]
    found = [" ".join(chance.choices(words, k=chance.randrange(1, 400))) for _ in range(count)]
    return [*found, "long " * 200_000, found[0], ""]


def write_lines(documents, directory):
    text = "".join(json.dumps({"id": n, "text": text}, ensure_ascii=n % 2 == 0) + "\n" for n, text in enumerate(documents))
    data = text.encode()
    (directory / "a.jsonl").write_bytes(data)
    (directory / "b.jsonl.gz").write_bytes(gzip.compress(data[:1000]) + gzip.compress(data[1000:]))
    (directory / "c.jsonl.bz2").write_bytes(bz2.compress(data))
    (directory / "d.jsonl.xz").write_bytes(lzma.compress(data))
    (directory / "e.jsonl.zst").write_bytes(pa.compress(data, codec="zstd", asbytes=True))
    (directory / "f.jsonl").write_bytes(b"\xef\xbb\xbf" + data.replace(b"}\n", b"}\r\n"))
    # By content, not by name.
    (directory / "g").write_bytes(gzip.compress(data))
    records = [json.loads(line) for line in text.splitlines()]
    (directory / "h.json").write_text(json.dumps(records, indent=1), encoding="utf-8")


def write_tables(documents, directory):
    ids = list(range(len(documents)))
    table = pa.table({"id": ids, "text": documents})
    for codec in ("none", "snappy", "gzip", "zstd", "lz4", "brotli"):
        pq.write_table(table, directory / f"p-{codec}.parquet", compression=codec, row_group_size=37)
    pq.write_table(table, directory / "p-v2.parquet", data_page_version="2.0", use_dictionary=False)
    pq.write_table(table, directory / "p-delta.parquet", use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"})
    dictionary = pa.table({"text": pa.array(documents).dictionary_encode()})
    pq.write_table(dictionary, directory / "p-dictionary.parquet")
    for name, kind in (("large", pa.large_string()), ("view", pa.string_view())):
        other = pa.table({"text": pa.array(documents, kind)})
        pq.write_table(other, directory / f"p-{name}.parquet", row_group_size=50)
        with pyarrow.ipc.new_file(directory / f"i-{name}.arrow", other.schema) as file:
            file.write_table(other, max_chunksize=41)
    for codec in (None, "lz4", "zstd"):
        options = pyarrow.ipc.IpcWriteOptions(compression=codec)
        with pyarrow.ipc.new_stream(directory / f"s-{codec}.arrow", table.schema, options=options) as stream:
            stream.write_table(table, max_chunksize=23)
    dataset = datasets.Dataset.from_dict({"text": documents})
    dataset.to_parquet(directory / "datasets.parquet")
    dataset.to_json(directory / "datasets.jsonl")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    arguments = parser.parse_args()
    documents = texts(300, 1)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)

        def prepare(out, *words):
            words = [arguments.program, "prepare", "--tokenizer", arguments.tokenizer, "--out", directory / out, *words]
            done = subprocess.run(words, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{out}: {done.stderr}")
            return [(directory / f"{out}.{ending}").read_bytes() for ending in ("bin", "idx")]

        inputs = directory / "in"
        inputs.mkdir()
        write_lines(documents, inputs)
        write_tables(documents, inputs)
        expected = prepare("expected", inputs / "a.jsonl")
        paths = sorted(inputs.iterdir())
        for path in paths:
            if prepare(f"out-{path.name}", path) != expected:
                sys.exit(f"{path.name}: other bytes than those of JSON lines")
        nulls = [None if n % 10 == 3 else text for n, text in enumerate(documents)]
        pq.write_table(pa.table({"text": nulls}), directory / "nulls.parquet", row_group_size=64)
        with (directory / "some.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in nulls if text is not None)
        skipping = ["--skip-bad-lines", "--max-bad", "20%"]
        if prepare("nulls", *skipping, directory / "nulls.parquet") != prepare("some", directory / "some.jsonl"):
            sys.exit("nulls.parquet: other bytes than those of the rows without nulls")
        nested = pa.table({"meta": [{"body": text, "n": n} for n, text in enumerate(documents)]})
        pq.write_table(nested, directory / "nested.parquet", row_group_size=100)
        if prepare("nested", "--field", "meta.body", directory / "nested.parquet") != expected:
            sys.exit("nested.parquet: other bytes than those of JSON lines")
    print(f"{len(paths) + 2} files of {len(documents)} documents: the same bytes")


if __name__ == "__main__":
    main()
