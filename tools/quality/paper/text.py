#!/usr/bin/env python3
"""Real text by topic, as JSON lines for training and validation, from Debian's packages of documentation.

    tools/quality/paper/text.py --out runs/paper/text

writes TOPIC-train.jsonl and TOPIC-valid.jsonl for each topic, and prints their sizes. Downloads the packages with
apt-get, which needs no account. About every twentieth file is for validation, whole; of WordNet, about every twentieth meaning. A
document is a file, divided at blank lines where it is long; the same document is written once.

| topic | package | what | licence, as its copyright file has it |
|---|---|---|---|
| perl | perl-doc | manual of Perl | Artistic or GPL-1+ |
| python | python3.11-doc | documentation of Python | PSF |
| debian | debian-handbook | The Debian Administrator's Handbook, English | GPL-2+ or CC-BY-SA-3.0 |
| postgres | postgresql-doc-15 | documentation of PostgreSQL | PostgreSQL |
| dictionary | wordnet-base | words of WordNet with their meanings and examples | WordNet 3.0 |
"""

import argparse
import hashlib
import html
import itertools
import json
import re
import subprocess
import tempfile
from pathlib import Path

# Longer texts are divided at blank lines.
DOCUMENT = 8_000
# One of so many files is for validation.
VALIDATION = 20
PARTS_OF_SPEECH = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}


def is_validation(name):
    """Whether what has this name is for validation: the same on every machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % VALIDATION == 0


def of_html(text):
    """The text of a page, without its navigation."""
    text = re.sub(r"(?s)<(script|style|head)\b.*?</\1>", "", text)
    text = re.sub(r'(?s)<div class="nav(header|footer)".*?</div>', "", text)
    text = re.sub(r"(?i)<(p|h\d|li|tr|dt|dd|pre|div|br)\b[^>]*>", "\n\n", text)
    text = html.unescape(re.sub(r"<[^>]*>", "", text)).replace("\xa0", " ")
    text = re.sub(r"(?m)^[ \t]+|^(Download the ebook|Prev|Next)$", "", text)
    return re.sub(r"\n\s*\n+", "\n\n", text)


def of_pod(text):
    """The text of a manual page of Perl, without the letters of its formats."""
    text = re.sub(r"(?m)^=(begin|for|encoding)\b.*\n", "", text)
    text = re.sub(r"(?m)^=\w+ ?", "", text)
    # From the innermost one: C<...>, B<<< ... >>>.
    for _ in range(4):
        text = re.sub(r"\b[BCEFILSXZ]<+([^<>]*)>+", r"\1", text)
    return text


def of_rst(text):
    """The text of a source of Python's documentation, without directives and roles."""
    text = re.sub(r"(?m)^\.\. .*\n(?:[ \t]+:.*\n)*", "", text)
    text = re.sub(r":[\w:]+:`[~!]?([^`<]*?)(?: <[^`]*>)?`", r"\1", text)
    return re.sub(r"``?([^`]*)``?_{0,2}", r"\1", text)


def pages(root, pattern, clean):
    """The texts of files with their names."""
    for path in sorted(root.rglob(pattern)):
        yield str(path.relative_to(root)), clean(path.read_text(encoding="utf-8", errors="replace"))


def meanings(root):
    """The meanings of WordNet, each as a line: words, part of speech, definition and examples."""
    for path in sorted(root.rglob("wordnet/data.*")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            fields, _, gloss = line.partition(" | ")
            columns = fields.split(" ")
            if line.startswith(" ") or not gloss:
                continue
            count = int(columns[3], 16)
            words = [columns[4 + 2 * word].split("(")[0].replace("_", " ") for word in range(count)]
            part = PARTS_OF_SPEECH[columns[2]]
            yield f"{path.name} {columns[0]}", f"{', '.join(words)} ({part}): {gloss.strip()}"


# By topic: packages, and the texts of each.
TOPICS = {
    "perl": [("perl-doc", lambda root: pages(root, "*.pod", of_pod))],
    "python": [("python3.11-doc", lambda root: pages(root, "*.rst.txt", of_rst))],
    "debian": [("debian-handbook", lambda root: pages(root / "usr/share/doc/debian-handbook/html/en-US", "*.html", of_html))],
    "postgres": [("postgresql-doc-15", lambda root: pages(root, "*.html", of_html))],
    "dictionary": [("wordnet-base", meanings)],
}


def documents(text):
    """A text, divided at blank lines where it is long."""
    document = []
    for paragraph in re.split(r"(?<=\n)\n+", text):
        document.append(paragraph.strip("\n"))
        if sum(map(len, document)) > DOCUMENT:
            yield "\n\n".join(document)
            document = []
    yield "\n\n".join(document)


def write(topic, texts, out):
    """Writes the documents of a topic; their number and bytes in each part."""
    sizes, known = {"train": [0, 0], "valid": [0, 0]}, set()
    files = {part: (out / f"{topic}-{part}.jsonl").open("w", encoding="utf-8") for part in sizes}
    for name, text in texts:
        part = "valid" if is_validation(name) else "train"
        for document in documents(text):
            document = document.strip()
            if len(document) < 20 or document in known:
                continue
            known.add(document)
            files[part].write(json.dumps({"topic": topic, "text": document}, ensure_ascii=False) + "\n")
            sizes[part][0] += 1
            sizes[part][1] += len(document.encode())
    for file in files.values():
        file.close()
    return sizes


def prepare_text(out, topics=TOPICS):
    """Writes the documents of all topics to a directory."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        packages = [package for sources in topics.values() for package, _ in sources]
        subprocess.run(["apt-get", "-q", "download", *packages], cwd=place, check=True)
        for topic, sources in topics.items():
            texts = []
            for package, texts_of in sources:
                (archive,) = place.glob(f"{package}_*.deb")
                subprocess.run(["dpkg-deb", "-x", archive, place / package], check=True)
                texts.append(texts_of(place / package))
            sizes = write(topic, itertools.chain(*texts), out)
            shown = ", ".join(f"{part} {count} documents, {size / 1e6:.2f} MB" for part, (count, size) in sizes.items())
            print(f"{topic}: {shown}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a directory")
    prepare_text(parser.parse_args().out)


if __name__ == "__main__":
    main()
