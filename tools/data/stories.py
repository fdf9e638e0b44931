#!/usr/bin/env python3
"""Writes stories as JSON lines: pairs of the quickstart's stories, drawn with a seed.

    tools/data/stories.py --count 25000 --out stories.jsonl

Needs Python's tokenizers (requirements.txt).
"""

import argparse
import array
import json
import random
from pathlib import Path

from tokenizers import Tokenizer

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes/quickstart"


def stories():
    """Returns the texts of the quickstart's token file."""
    tokenizer = Tokenizer.from_file(str(QUICKSTART / "tokenizer.json"))
    end = tokenizer.token_to_id("<|end_of_text|>")
    ids = array.array("H", (QUICKSTART / "voyage.bin").read_bytes())
    documents = [[]]
    for token in ids:
        if token == end:
            documents.append([])
        else:
            documents[-1].append(token)
    return [text for text in tokenizer.decode_batch(documents) if text]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, required=True, help="number of lines")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    known, chance = stories(), random.Random(arguments.seed)
    with arguments.out.open("w", encoding="utf-8") as out:
        for _ in range(arguments.count):
            out.write(json.dumps({"text": "\n".join(chance.sample(known, 2))}) + "\n")


if __name__ == "__main__":
    main()
