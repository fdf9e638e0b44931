#!/usr/bin/env python3
"""Makes the task files of tools/eval/tasks from the quickstart's stories.

    stories --seed 11 --count 300 --setting village >stories.jsonl
    tools/eval/make_tasks.py stories.jsonl --out tools/eval/tasks

village-choice.jsonl asks for the sentence that continues a story, among sentences at the same place of three
other stories; village-cloze.jsonl asks for the last word of a sentence that the story has had before. The same
stories give the same files.
"""

import argparse
import json
import re
import sys
from pathlib import Path

# Examples of each file, which stays small enough for the repository.
EXAMPLES = 40
CHOICES = 4


def sentences(story):
    """The sentences of a story, each with the space that follows it."""
    return re.findall(r'.*?[.!?]["]?(?:\s+|$)', story, flags=re.DOTALL)


def choice(stories, number):
    """The question for the sentence after two thirds of story `number`, and its answer."""
    place = 2 * len(stories[number]) // 3
    context = "".join(stories[number][:place]).rstrip()
    right = stories[number][place].strip()
    wrong = []
    for other in stories[number + 1 :] + stories[:number]:
        sentence = other[min(place, len(other) - 1)].strip()
        if sentence != right and sentence not in wrong:
            wrong.append(sentence)
        if len(wrong) == CHOICES - 1:
            break
    answer = number % CHOICES
    choices = wrong[:answer] + [right] + wrong[answer:]
    return {"context": context, "choices": choices, "answer": answer}


def cloze(story):
    """The question for the last word of a sentence whose word came before; None if there is none."""
    for place in range(len(story) - 1, 1, -1):
        before = "".join(story[:place])
        found = re.fullmatch(r"(.*) (\w{3,})[.!?]\s*", story[place], flags=re.DOTALL)
        if found and re.search(rf"\b{found[2]}\b", before):
            return {"context": before + found[1], "answer": found[2]}
    return None


def write(path, examples):
    if len(examples) < EXAMPLES:
        sys.exit(f"error: {path}: {len(examples)} examples of {EXAMPLES}: give more stories")
    lines = (json.dumps(example, ensure_ascii=False) for example in examples[:EXAMPLES])
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stories", type=Path, help="stories, JSON lines with the field text")
    parser.add_argument("--out", type=Path, required=True, help="directory of the task files")
    arguments = parser.parse_args()
    lines = arguments.stories.read_text(encoding="utf-8").splitlines()
    stories = [sentences(json.loads(line)["text"]) for line in lines]
    stories = [story for story in stories if len(story) > CHOICES]
    write(
        arguments.out / "village-choice.jsonl",
        [choice(stories, number) for number in range(min(EXAMPLES, len(stories)))],
    )
    clozes = (cloze(story) for story in stories[EXAMPLES:])
    write(arguments.out / "village-cloze.jsonl", [found for found in clozes if found])


if __name__ == "__main__":
    main()
