#!/usr/bin/env python3
"""Trains a tokenizer like Llama 3's, a byte-level BPE, on the field `text` of JSON lines.

    python3 -m venv data-venv && data-venv/bin/pip install -r tools/data/requirements.txt
    data-venv/bin/python tools/data/train_tokenizer.py --vocab-size 1024 --out tokenizer text.jsonl

Writes tokenizer.json, tokenizer_config.json and special_tokens_map.json, which AutoTokenizer loads. Every encoding starts with
<|begin_of_text|>; `moh-data prepare` appends <|end_of_text|> to each document. The same text gives the same files.
"""

import argparse
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
# Llama 3's pattern of words.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def texts(paths):
    for path in paths:
        with path.open(encoding="utf-8") as lines:
            yield from (json.loads(line)["text"] for line in lines if line.strip())


def train(paths, vocab_size):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(name, special=True) for name in (BEGIN, END)],
    )
    tokenizer.train_from_iterator(texts(paths), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN}:1 $B:1", special_tokens=[(BEGIN, 0)]
    )
    return tokenizer


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab-size", type=int, required=True, help="number of ids, with 256 bytes and two special tokens")
    parser.add_argument("--out", type=Path, required=True, help="directory for the tokenizer's files")
    parser.add_argument("text", type=Path, nargs="+", help="files of JSON lines")
    arguments = parser.parse_args()
    tokenizer = train(arguments.text, arguments.vocab_size)
    arguments.out.mkdir(parents=True)
    content = json.loads(tokenizer.to_str())
    # As in the pre-tokenizer. Decoding does not depend on these fields, and Python cannot set them.
    content["decoder"] |= {"add_prefix_space": False, "use_regex": False}
    names = {"bos_token": BEGIN, "eos_token": END}
    config = names | {"clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    for name, value in (("tokenizer", content), ("tokenizer_config", config), ("special_tokens_map", names)):
        (arguments.out / f"{name}.json").write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")
    print(f"{arguments.out / 'tokenizer.json'}: {tokenizer.get_vocab_size()} ids")


if __name__ == "__main__":
    main()
