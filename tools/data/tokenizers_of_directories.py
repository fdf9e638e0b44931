#!/usr/bin/env python3
"""Compares the ids of `moh-data prepare` with those of transformers' `AutoTokenizer`, for directories of random small
tokenizers whose files name tokens that tokenizer.json does not have.

    python3 -m venv chat-venv && chat-venv/bin/pip install -r tools/data/chat-requirements.txt
    chat-venv/bin/python tools/data/tokenizers_of_directories.py --program target/release/moh-data

Tokens are named in `added_tokens_decoder`, `additional_special_tokens`, `extra_special_tokens` (with names or without),
`bos_token` and its kin, `special_tokens_map.json`, `added_tokens.json` and the padding. A directory may be refused
where transformers fails too, or because the ids of its vocabulary have gaps; nothing else is an agreement.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

NAMED = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"]
CONTENTS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<tool>", "</tool>", "<pad>", "[MASK]", "one", " two", "ee",
            "\u00e9t", "<|x|>", "<|x|><|y|>", "<|y|>"]
WORDS = ["one", "two", "three", "tool", "see", "\u00e9t\u00e9", "x", "  ", "\n", "12", "tooth", "<|", "|>", "\x04", "\U00050000"]
PROPERTIES = ["single_word", "lstrip", "rstrip", "normalized", "special"]


def vocabulary(rng):
    """Returns the fields of a small BPE tokenizer. Some bytes may be missing."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=rng.choice([270, 300]), show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(WORDS[:-2] * 3, trainer)
    fields = json.loads(tokenizer.to_str())
    vocab = fields["model"]["vocab"]
    if rng.random() < 0.3:
        for missing in ["\u0104", "\u00f1"]:
            del vocab[missing]
        fields["model"]["vocab"] = vocab = {token: id for id, token in enumerate(sorted(vocab, key=vocab.get))}
    for content in rng.sample(CONTENTS[:8], rng.randint(0, 3)):
        vocab[content] = len(vocab) + (rng.choice([0, 0, 0, 5]) if rng.random() < 0.2 else 0)
    return fields


def properties(rng):
    """Returns the properties of an added token, mostly of a plain special token."""
    if rng.random() < 0.6:
        return {name: name == "special" for name in PROPERTIES}
    return {name: rng.random() < 0.25 for name in PROPERTIES}


def token(rng, content, typed):
    """Returns a token of tokenizer_config.json, or of special_tokens_map.json: a text, or an object."""
    if rng.random() < 0.6:
        return content
    fields = {"content": content, **properties(rng)}
    return {"__type": "AddedToken", **fields} if typed else {k: v for k, v in fields.items() if k != "special"}


def some(rng, most=3):
    return rng.sample(CONTENTS, rng.randint(0, most))


def write(rng, directory):
    """Writes the files of a tokenizer."""
    fields = vocabulary(rng)
    own, size = [], len(fields["model"]["vocab"])
    for content in some(rng, 4):
        id = fields["model"]["vocab"].get(content)
        if id is None:
            id, size = size, size + 1
        own.append({"id": id, "content": content, **properties(rng)})
    fields["added_tokens"] = own
    if rng.random() < 0.1:
        fields["padding"] = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                             "pad_type_id": 0, "pad_token": rng.choice(CONTENTS)}
    files = {"tokenizer.json": fields}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 100, "chat_template": "x"}
    keys = []
    for name in rng.sample(NAMED, rng.randint(0, 4)):
        keys.append((name, rng.choice([None] + [token(rng, rng.choice(CONTENTS), True)] * 8)))
    if rng.random() < 0.3:
        keys.append((rng.choice(["image_token", "eot_token"]), token(rng, rng.choice(CONTENTS), True)))
    if rng.random() < 0.4:
        keys.append(("additional_special_tokens", [token(rng, content, True) for content in some(rng)]))
    if rng.random() < 0.3:
        names = {f"{index}_name": content for index, content in enumerate(some(rng))}
        keys.append(("extra_special_tokens", rng.choice([names, list(names.values()), []])))
    if rng.random() < 0.4:
        start = rng.choice([size, size, size + 7, 100])
        listed = {str(start + index): {"content": content, **properties(rng)} for index, content in enumerate(some(rng))}
        listed |= {str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in own}
        items = list(listed.items())
        rng.shuffle(items)
        keys.append(("added_tokens_decoder", dict(items)))
    if rng.random() < 0.05:
        keys.append(("split_special_tokens", True))
    if rng.random() < 0.2:
        keys.append((rng.choice(["add_bos_token", "add_eos_token", "add_prefix_space"]), rng.random() < 0.5))
    rng.shuffle(keys)
    config |= dict(keys)
    files["tokenizer_config.json"] = config
    if rng.random() < 0.5:
        named = {name: token(rng, rng.choice(CONTENTS), False) for name in rng.sample(NAMED, rng.randint(0, 3))}
        if rng.random() < 0.3:
            named[rng.choice(["additional_special_tokens", "extra_special_tokens"])] = some(rng)
        if rng.random() < 0.2:
            named["eot_token"] = token(rng, rng.choice(CONTENTS), False)
        files["special_tokens_map.json"] = named
    if rng.random() < 0.4:
        start = rng.choice([size, size, size + 3])
        files["added_tokens.json"] = {content: start + index for index, content in enumerate(some(rng))}
    directory.mkdir()
    for name, contents in files.items():
        (directory / name).write_text(json.dumps(contents))


def texts(rng):
    pieces = CONTENTS + WORDS + [" "] * 8
    return ["".join(rng.choices(pieces, k=rng.randint(1, 25))) for _ in range(40)]


def expected(directory, documents):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return [id for text in documents for id in tokenizer(text, truncation=False, padding=False)["input_ids"]]


def prepared(program, directory, documents):
    """Returns the ids of a preparation, or its message instead."""
    lines = directory / "text.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    command = [program, "prepare", "--tokenizer", directory, "--out", directory / "out", "--no-append-eos", lines]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return None, done.stderr
    return np.fromfile(directory / "out.bin", dtype=np.uint16).tolist(), done.stderr


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, type=Path)
    parser.add_argument("--directories", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="write the directories here")
    arguments = parser.parse_args()
    counts = {"equal": 0, "with added tokens": 0, "refused by both": 0, "refused for gaps": 0}
    with tempfile.TemporaryDirectory() as temporary:
        place = arguments.keep or Path(temporary)
        place.mkdir(exist_ok=True)
        for number in range(arguments.directories):
            rng = random.Random(f"{arguments.seed} {number}")
            directory = place / str(number)
            write(rng, directory)
            documents = texts(rng)
            try:
                theirs, fault = expected(directory, documents), None
            except Exception as error:  # Any exception: the files are random.
                theirs, fault = None, error
            ours, said = prepared(arguments.program, directory, documents)
            if theirs is not None and ours == theirs:
                counts["equal"] += 1
                counts["with added tokens"] += "beside it adds" in said
            elif theirs is None and ours is None:
                counts["refused by both"] += 1
            elif ours is None and "have gaps" in said:
                counts["refused for gaps"] += 1
            else:
                sys.exit(f"{number}: transformers: {fault or theirs[:60]}\nmoh-data: {ours and ours[:60]}\n{said}")
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    if counts["with added tokens"] < arguments.directories / 4:
        sys.exit("too few of them add a token")


if __name__ == "__main__":
    main()
