"""Greedy generation of a single sequence with a cache: tokens per second after the prompt."""

import shutil
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from rows import Row
from shapes import SHAPES
from torch_step import build

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes/quickstart"
STORIES_WANTED, RANDOM_WANTED = 20.0, 2.0


def rows(options, programs, folder):
    if options.stories:
        yield compare(
            options, programs, "generation, stories260K", options.stories, "Once upon a time",
            STORIES_WANTED,
        )
    else:
        print("generation of stories260K: skipped, --stories names no directory", flush=True)
    model = folder / "random"
    write_random(model)
    yield compare(options, programs, "generation, 25 M", model, "One day", RANDOM_WANTED)


def write_random(path: Path):
    """Writes random weights of shape c. Any tokenizer with fewer words works, such as the quickstart's."""
    build(SHAPES["c"]).save_pretrained(path)
    shutil.copy(QUICKSTART / "tokenizer.json", path)


def compare(options, programs, what, directory, prompt, wanted) -> Row:
    tokens, repeats = (64, 3) if options.quick else (256, 5)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    ours, theirs = [], []
    generate(model, ids, 8)
    for _ in range(repeats):
        rate, text = programs.generate(directory, prompt, tokens)
        ours.append(rate)
        rate, sequence = decode(model, ids, tokens)
        theirs.append(rate)
    same = tokenizer.decode(sequence, skip_special_tokens=True).strip() == text.strip()
    return Row(
        what, statistics.median(ours), statistics.median(theirs), "tokens/s", at_least=wanted,
        note="the same text" if same else "", samples={"ours": ours, "theirs": theirs},
    )


def decode(model, ids, tokens: int):
    """Returns the tokens per second without the prompt's pass, which also computes the first token."""
    first, _ = generate(model, ids, 1)
    seconds, sequence = generate(model, ids, tokens)
    return (len(sequence) - ids.shape[1] - 1) / (seconds - first), sequence


def generate(model, ids, tokens: int):
    started = time.perf_counter()
    with torch.inference_mode():
        sequence = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
            use_cache=True, pad_token_id=0,
        )
    return time.perf_counter() - started, sequence[0]
