"""Generation of several sequences at once, with caches of a given length: tokens per second of a pass."""

import inspect
import statistics
import time

import torch
from transformers import DynamicCache

from rows import Row
from shapes import SHAPES
from torch_step import build

BATCHES, CONTEXTS = (1, 8, 32), (256, 4096)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
WANTED = 1.0


def rows(options, programs, folder):
    for name in set(options.shapes) & {"b", "c"}:
        shape = SHAPES[name]
        config = shape.write_config(folder)
        model = build(shape).eval()
        for dtype in options.dtypes:
            model = model.to(DTYPES[dtype])
            for context in CONTEXTS[:1] if options.quick else CONTEXTS:
                for batch in BATCHES:
                    yield compare(programs, options, config, model, name, dtype, batch, context)


def compare(programs, options, config, model, name, dtype, batch, context) -> Row:
    tokens, repeats = (8, 1) if options.quick else (32, 3)
    ours, theirs = [], []
    for _ in range(repeats):
        found = programs.bench(
            "generation", "--config", config, "--batch", batch, "--context", context,
            "--tokens", tokens, "--dtype", dtype, "--dense",
        )
        ours.append(found["measurements"][0]["tokens_per_second"]["median"])
        theirs.append(batch / statistics.median(passes(model, batch, context, tokens)))
    return Row(
        f"{batch} sequences after {context}, {name}, {dtype}", statistics.median(ours),
        statistics.median(theirs), "tokens/s", at_least=WANTED,
        samples={"ours": ours, "theirs": theirs},
    )


@torch.inference_mode()
def passes(model, batch, context, count):
    """Returns the seconds of passes with a token of each sequence. The cached keys and values are random, as the
    weights are."""
    config = model.config
    shape = (batch, config.num_key_value_heads, context, config.head_dim)
    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        cache.update(torch.randn(shape, dtype=model.dtype), torch.randn(shape, dtype=model.dtype), layer)
    # Its name since 5.24, and its name before.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    ids, seconds = torch.zeros(batch, 1, dtype=torch.long), []
    for _ in range(count + 1):
        started = time.perf_counter()
        logits = model(ids, use_cache=True, **{name: cache}).logits
        seconds.append(time.perf_counter() - started)
        ids = logits[:, -1:].argmax(-1)
    return seconds[1:]
