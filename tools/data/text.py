#!/usr/bin/env python3
"""Real text as JSON lines, from Debian's packages of documentation: a document for each file.

    tools/data/text.py --megabytes 200 --out text.jsonl

Downloads the packages with apt-get, which needs no account, and repeats their files with a number in front until
there is enough text. The packages are the Debian handbook, Perl's and PostgreSQL's manuals and WordNet, each under
a free licence that it names in its own copyright file.
"""

import argparse
import html
import json
import re
import subprocess
import tempfile
from pathlib import Path

PACKAGES = ["debian-handbook", "perl-doc", "postgresql-doc-15", "wordnet-base"]
ENDINGS = {".html", ".pod", ".txt"}
# Files longer than this are divided at blank lines.
DOCUMENT = 20_000


def files(directory):
    """Yields the files of the packages, downloaded and unpacked below a directory."""
    subprocess.run(["apt-get", "download", *PACKAGES], cwd=directory, check=True)
    for package in sorted(directory.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, directory / "files"], check=True)
    for path in sorted((directory / "files").rglob("*")):
        if path.is_file() and (path.suffix in ENDINGS or path.name.startswith("data.")):
            yield path


def documents(path):
    """Yields the text of a file, without the tags of HTML, in documents."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".html":
        text = re.sub(r"(?s)<(script|style).*?</\1>|<[^>]*>", "", text)
        text = re.sub(r"\n\s*\n+", "\n\n", html.unescape(text))
    document = []
    for paragraph in re.split(r"(?<=\n\n)|(?<=\n)(?=\d{8} )", text):
        document.append(paragraph)
        if sum(map(len, document)) > DOCUMENT:
            yield "".join(document)
            document = []
    if document:
        yield "".join(document)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = [text for path in files(Path(directory)) for text in documents(path) if text.strip()]
    done, number, limit = 0, 0, arguments.megabytes * 1e6
    with arguments.out.open("w", encoding="utf-8") as out:
        while done < limit:
            text = found[number % len(found)]
            round_number = number // len(found)
            text = f"{round_number} {text}" if round_number else text
            out.write(json.dumps({"id": number, "text": text}, ensure_ascii=number % 2 == 0) + "\n")
            done += len(text.encode())
            number += 1
    print(f"{arguments.out}: {number} documents, {done / 1e6:.1f} MB of text, {len(found)} of them different")


if __name__ == "__main__":
    main()
