#!/usr/bin/env python3
"""Six tasks from the held-out text, as task files of tools/eval.

    tools/quality/paper/tasks.py --text runs/paper/text --out runs/paper/tasks

| task | kind | a right answer needs |
|---|---|---|
| cloze | cloze | the last word of a paragraph of a manual, which occurs in it or the one before |
| paragraph | 4 choices | the paragraph that follows, among others of the same topic |
| topic | 4 choices | the paragraph that follows, among those of other topics |
| definition | 4 choices | the meaning of a word, among those of words of the same part of speech |
| word | 4 choices | the word of a meaning, likewise |
| example | 4 choices | the example of a meaning, likewise |

The same text gives the same tasks.
"""

import argparse
import json
import random
import re
from pathlib import Path

from text import TOPICS

MANUALS = [topic for topic in TOPICS if topic != "dictionary"]
# Most examples of a task.
EXAMPLES = 500
CHOICES = 4
# Characters of a paragraph.
PARAGRAPH = range(80, 400)
MEANING = re.compile(r"(?P<words>.+?) \((?P<part>noun|verb|adjective|adverb)\): (?P<gloss>.+)")


def read(directory, topic):
    return [json.loads(line)["text"] for line in (directory / f"{topic}-valid.jsonl").open(encoding="utf-8")]


def paragraphs(text):
    """The paragraphs of prose of a document, each in one line, and whether they follow one another."""
    lines = [" ".join(part.split()) for part in text.split("\n\n")]
    return [line if len(line) in PARAGRAPH and line.endswith(".") else None for line in lines]


def pairs(documents):
    """Paragraphs and those that follow them."""
    found = []
    for text in documents:
        lines = paragraphs(text)
        found += [(first, second) for first, second in zip(lines, lines[1:]) if first and second]
    return found


def choice(draw, context, right, wrong, delimiter=" "):
    """An example with the right choice in a random place."""
    answer = draw.randrange(CHOICES)
    choices = [*wrong[:answer], right, *wrong[answer:]]
    return {"context": context, "choices": choices, "answer": answer, "target_delimiter": delimiter}


def cloze(draw, following):
    """Last words that their paragraph, or the one before, has already."""
    found = []
    for first, second in following:
        *words, last = second.rstrip(".").split(" ")
        if last.isalpha() and len(last) > 3 and last in [*first.split(" "), *words]:
            found.append({"context": f"{first}\n\n{' '.join(words)}", "answer": last})
    draw.shuffle(found)
    return found


def continuations(draw, by_topic, others):
    """Paragraphs that follow, among others of the same topic, or of other topics."""
    found = []
    for topic, following in by_topic.items():
        for first, second in following:
            pool = [pair[1] for name, pairs in by_topic.items() if (name != topic) == others for pair in pairs]
            wrong = draw.sample([text for text in pool if text not in (first, second)], CHOICES - 1)
            found.append(choice(draw, first, second, wrong, "\n\n"))
    draw.shuffle(found)
    return found


def meanings(draw, texts):
    """The tasks of words, their meanings and examples."""
    parsed = [match.groupdict() for match in map(MEANING.fullmatch, texts) if match]
    for entry in parsed:
        definition, *examples = re.split(r'; "', entry["gloss"])
        entry["definition"] = definition
        entry["example"] = f'"{examples[0]}' if examples and examples[0].endswith('"') else None
    tasks = {"definition": [], "word": [], "example": []}
    for entry in parsed:
        alike = [other for other in parsed if other["part"] == entry["part"] and other is not entry]
        wrong = draw.sample(alike, CHOICES - 1)
        head = f"{entry['words']} ({entry['part']}):"
        tasks["definition"].append(choice(draw, head, entry["definition"], [other["definition"] for other in wrong]))
        line = "{words} ({part}): {definition}"
        words = [line.format(**entry | {"words": other["words"]}) for other in wrong]
        tasks["word"].append(choice(draw, "", line.format(**entry), words, ""))
        with_example = [other for other in alike if other["example"]]
        if entry["example"] and len(with_example) >= CHOICES - 1:
            wrong = [other["example"] for other in draw.sample(with_example, CHOICES - 1)]
            tasks["example"].append(choice(draw, f"{head} {entry['definition']};", entry["example"], wrong))
    for examples in tasks.values():
        draw.shuffle(examples)
    return tasks


def write_tasks(text, out):
    """Writes the tasks to a directory, and returns the numbers of their examples."""
    draw = random.Random(1)
    by_topic = {topic: pairs(read(text, topic)) for topic in MANUALS}
    tasks = {
        "cloze": cloze(draw, [pair for following in by_topic.values() for pair in following]),
        "paragraph": continuations(draw, by_topic, others=False),
        "topic": continuations(draw, by_topic, others=True),
        **meanings(draw, read(text, "dictionary")),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, examples in tasks.items():
        lines = [json.dumps(example, ensure_ascii=False) + "\n" for example in examples[:EXAMPLES]]
        (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return {name: min(len(examples), EXAMPLES) for name, examples in tasks.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="what text.py has written")
    parser.add_argument("--out", type=Path, required=True, help="a directory")
    options = parser.parse_args()
    print(write_tasks(options.text, options.out))


if __name__ == "__main__":
    main()
