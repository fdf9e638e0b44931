#!/usr/bin/env python3
"""Asks models ten questions, and writes their greedy answers side by side as a page of Markdown.

    cargo build --release --bin moh-generate
    tools/quality/smol/answers.py dense=runs/smol/model chosen=runs/smol/converted/7-chosen-32768 > answers.md

Each argument is a column's name and a directory. A model's speed is that of its answers, which moh-generate prints.
"""

import argparse
import re
import subprocess
from pathlib import Path

from bed import ROOT

QUESTIONS = [
    "What is the capital of France?",
    "How many days does a week have?",
    "Name three colours of the rainbow.",
    "What is 7 plus 5?",
    "Why is the sky blue?",
    "Write one sentence about a lighthouse.",
    "Who wrote Romeo and Juliet?",
    "How do I list the files of a directory in Python?",
    "What do bees make?",
    "Translate 'good morning' into French.",
]


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME=DIR")
    parser.add_argument("--program", type=Path, default=ROOT / "target/release/moh-generate", help="%(default)s")
    parser.add_argument("--max-tokens", type=int, default=40, help="tokens of an answer: %(default)s")
    return parser.parse_args()


def answer(options, model, question):
    """Returns a model's answer, and its tokens/s."""
    command = [options.program, "--model", model, "--chat", "--max-tokens", str(options.max_tokens), "--prompt", question]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.strip(), float(re.search(r"([\d.]+) tokens/s", done.stderr)[1])


def main():
    options = parse()
    models = dict(model.split("=", 1) for model in options.models)
    print("| question |", " | ".join(models), "|\n|---|" + "---|" * len(models))
    rates = {name: [] for name in models}
    for question in QUESTIONS:
        cells = [question]
        for name, model in models.items():
            text, rate = answer(options, model, question)
            rates[name].append(rate)
            cells.append(text.replace("|", "\\|").replace("\n", "<br>"))
        print("|", " | ".join(cells), "|")
    print("| tokens/s |", " | ".join(f"{sum(found) / len(found):.1f}" for found in rates.values()), "|")


if __name__ == "__main__":
    main()
