#!/usr/bin/env python3
"""Checks that Megatron-core reads the token files of `moh-data`, and that `moh-data` reads those of Megatron-core.

    python3 -m venv megatron-venv
    megatron-venv/bin/pip install -r tools/hf/requirements.txt
    megatron-venv/bin/pip install --no-deps -r tools/data/requirements-megatron.txt
    megatron-venv/bin/python tools/data/megatron_files.py --program target/release/moh-data --tokenizer DIR

Documents are compared token by token, with and without a memory map, as u16 and as i32, and with several sequences in
a document; so are the samples of Megatron's GPTDataset with those that the concatenated documents have. A mask is read
as the tokens of a file of type u8 that has the same documents, and equals what Megatron-core writes of it.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy
import torch

# Packages that only GPUs need are not installed here.
warnings.filterwarnings("ignore", message=".*Transformer Engine and Apex are not installed")
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split

SEQUENCE_LENGTH = 64
TEMPLATE = """{% for message in messages %}{{ message.role + ': ' }}{% if message.role == 'assistant' -%}
{% generation %}{{ message.content + '\n' }}{% endgeneration %}{% else %}{{ message.content + '\n' }}{% endif %}{% endfor %}"""


def run(*command):
    """Returns the output of a program. Exits if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: {done.stdout}{done.stderr}")
    return done.stdout


def texts(count):
    """Returns documents of one to four hundred words."""
    chance = random.Random(1)
    words = "the ship left a village at dawn and no one on land saw its lights".split()
    return [" ".join(chance.choices(words, k=chance.randrange(1, 400))) for _ in range(count)]


def documents_of(dataset):
    """Returns the tokens of each document of a dataset of Megatron's."""
    bounds = dataset.document_indices
    return [
        numpy.concatenate([dataset[at] for at in range(first, last)])
        for first, last in zip(bounds[:-1], bounds[1:])
    ]


def ids_of(program, prefix, documents):
    """Returns the tokens of each document, as `moh-data show` prints them."""
    show = [program, "show", "--json", "--max-tokens", str(1 << 40), prefix, "--doc"]
    return [json.loads(run(*show, str(number)))["ids"] for number in range(documents)]


def check(what, is_so):
    if not is_so:
        sys.exit(f"{what}: differs")
    print(f"{what}: the same")


def same(ours, theirs):
    return len(ours) == len(theirs) and all(list(a) == list(b) for a, b in zip(ours, theirs))


def check_ours(program, prefix):
    """Checks that Megatron-core reads a file of `moh-data prepare`."""
    info = json.loads(run(program, "info", "--json", prefix))
    ours = ids_of(program, prefix, info["documents"])
    for mmap in (True, False):
        dataset = IndexedDataset(str(prefix), mmap=mmap)
        name = f"{info['dtype']} of moh-data, {'memory map' if mmap else 'file'}"
        check(f"{name}, {info['documents']} documents", same(ours, documents_of(dataset)))
    check_samples(prefix, ours)


def check_samples(prefix, ours):
    """Checks that Megatron's samples, in their shuffled order, are windows of the concatenated documents."""
    dataset = IndexedDataset(str(prefix))
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=SEQUENCE_LENGTH,
        split="1",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=None,
        tokenizer=SimpleNamespace(vocab_size=None, eod=0, pad=-1, unique_identifiers={}),
    )
    sequences = numpy.arange(len(dataset), dtype=numpy.int32)
    samples = GPTDataset(dataset, str(prefix), sequences, None, Split.train, config)
    # Megatron shuffles the documents of an epoch, concatenates them, and shuffles the windows of the result.
    stream = numpy.concatenate([numpy.asarray(ours[number]) for number in samples.document_index])
    order = samples.shuffle_index
    found = 0
    for number, window in enumerate(order):
        start = int(window) * SEQUENCE_LENGTH
        expected = stream[start : start + SEQUENCE_LENGTH + 1]
        sample = samples[number]
        tokens = torch.cat([sample["tokens"], sample["labels"][-1:]]).numpy()
        found += len(expected) == len(tokens) and bool((expected == tokens).all())
    check(f"{found} of {len(order)} samples of GPTDataset", found == len(order) and found > 0)


def check_theirs(program, directory, kind):
    """Checks that `moh-data` reads a file of Megatron-core with several sequences in its documents."""
    chance = random.Random(2)
    prefix = directory / f"megatron-{kind.__name__}"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=kind)
    documents = []
    for _ in range(50):
        lengths = [chance.randrange(0, 90) for _ in range(chance.randrange(1, 4))]
        tokens = [chance.randrange(200) for _ in range(sum(lengths))]
        builder.add_document(torch.tensor(tokens, dtype=torch.int64), lengths)
        documents.append(tokens)
    builder.finalize(f"{prefix}.idx")
    report = json.loads(run(program, "verify", "--json", prefix))
    name = f"{kind.__name__} of Megatron-core"
    check(f"{name}, {report['documents']} documents", report["documents"] == len(documents))
    check(f"{name}, ids", same(ids_of(program, prefix, len(documents)), documents))


def check_mask(program, tokenizer, directory):
    """Checks that the mask of conversations is the `.bin` of a file of Megatron's with the same documents."""
    with_template, conversations, prefix = directory / "chat", directory / "chat.jsonl", directory / "masked"
    with_template.mkdir()
    for file in tokenizer.glob("*.json"):
        (with_template / file.name).write_bytes(file.read_bytes())
    (with_template / "chat_template.jinja").write_text(TEMPLATE)
    turns = texts(40)
    conversation = lambda question, answer: {
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    }
    lines = [conversation(question, answer) for question, answer in zip(turns[::2], turns[1::2])]
    conversations.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(program, "prepare", "--chat", "--tokenizer", with_template, "--out", prefix, conversations)
    tokens = IndexedDataset(str(prefix))
    show = [program, "show", "--json", "--max-tokens", str(1 << 40), prefix, "--doc"]
    masks = [json.loads(run(*show, str(number)))["mask"] for number in range(len(tokens))]
    copy = directory / "mask"
    builder = IndexedDatasetBuilder(f"{copy}.bin", dtype=numpy.uint8)
    for mask in masks:
        builder.add_document(torch.tensor(mask), [len(mask)])
    builder.finalize(f"{copy}.idx")
    written = prefix.with_suffix(".mask").read_bytes()
    trained = json.loads(prefix.with_suffix(".json").read_text())["mask"]["trained_tokens"]
    check(f"mask with {trained} of {len(written)} tokens", Path(f"{copy}.bin").read_bytes() == written)
    Path(f"{copy}.bin").write_bytes(written)
    read = documents_of(IndexedDataset(str(copy)))
    check("mask, read as u8", same(read, masks) and sum(int(mask.sum()) for mask in read) == trained and 0 < trained < len(written))
    check("mask, documents", [len(mask) for mask in read] == [len(ids) for ids in documents_of(tokens)])


def with_large_vocabulary(tokenizer, directory):
    """Writes a copy of a tokenizer with more ids than u16 can represent."""
    content = json.loads((tokenizer / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first = max([*vocabulary.values(), *(token["id"] for token in content["added_tokens"])]) + 1
    vocabulary |= {f"unused {number}": number for number in range(first, 70_000)}
    copy = directory / "large"
    copy.mkdir()
    for file in tokenizer.glob("*.json"):
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "tokenizer.json").write_text(json.dumps(content))
    return copy


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    arguments = parser.parse_args()
    program = arguments.program.resolve()
    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory)
        text = directory / "text.jsonl"
        text.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(60)))
        for tokenizer in (arguments.tokenizer, with_large_vocabulary(arguments.tokenizer, directory)):
            prefix = directory / f"tokens-{tokenizer.name}"
            run(program, "prepare", "--tokenizer", tokenizer, "--out", prefix, text)
            check_ours(program, prefix)
        check_mask(program, arguments.tokenizer, directory)
        for kind in (numpy.uint8, numpy.uint16, numpy.int32, numpy.int64):
            check_theirs(program, directory, kind)


if __name__ == "__main__":
    main()
