"""Random models with which other programs are compared, their conversions, and the results of this repository's
programs with them. Other code for models and programs is in the tests of tools/hf."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "hf"))

from programs import LLAMA3_ROPE, convert, our_logits, save_random  # First: it sets the environment of transformers.

import torch
import transformers

VOCABULARY = 256
LAYERS = 4
CONTEXT = 512
# Eight heads: a uniform conversion, and a conversion with counts by layer and a dense first layer.
UNIFORM = ["--shared-heads", 3, "--routed-top-k", 3]
BY_LAYER = ["--shared-heads", "8,4,2,2", "--routed-top-k", "0,2,2,4"]
# Of log-probabilities: both sides add in f32 in another order.
TOLERANCE = 5e-4
# A dense model differs from its conversion by more than this.
APART = 0.1
# Lengths of prompts, and number of tokens generated after each prompt.
LENGTHS = [3, 5, 8, 13, 21, 34, 55, 120, 200]
NEW_TOKENS = 24


def sizes():
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_hidden_layers": LAYERS,
        # vLLM's kernels for CPUs do not support narrower heads.
        "head_dim": 64,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.15,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def random_llama(out, **options):
    config = transformers.LlamaConfig(**sizes(), tie_word_embeddings=False, **options)
    return save_random(transformers.LlamaForCausalLM, config, out)


def random_qwen3(out):
    config = transformers.Qwen3Config(**sizes(), tie_word_embeddings=True)
    return save_random(transformers.Qwen3ForCausalLM, config, out)


def random_prompts(lengths, seed=0):
    """Returns a prompt of random tokens for each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def log_probabilities(directory, rows, scratch):
    """Returns the log-probabilities of each row's next tokens by moh-eval: [length, vocabulary] for each row."""
    longest = max(map(len, rows))
    # Later tokens do not change earlier logits.
    padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    logits, _ = our_logits(directory, padded, scratch)
    return [logits[i, : len(row)].double().log_softmax(-1) for i, row in enumerate(rows)]


def compare(directory, prompts, found, scratch):
    """Compares a program's generated tokens with the results of moh-eval for the same tokens.

    `found` has, for each prompt, the tokens, and the log-probabilities of all tokens at the places that the
    program reports. A place counts tokens of the prompt and the answer, and is the place of the predicted
    token. Returns the largest difference of log-probabilities, the number of tokens that greedy generation
    would choose, and the number of all tokens.
    """
    rows = [prompt + answer["tokens"] for prompt, answer in zip(prompts, found)]
    largest, greedy, tokens = 0.0, 0, 0
    for row, prompt, answer, expected in zip(rows, prompts, found, log_probabilities(directory, rows, scratch)):
        for place, values in answer["log_probabilities"].items():
            difference = (torch.tensor(values).double() - expected[int(place) - 1]).abs().max().item()
            largest = max(largest, difference)
        best = expected[len(prompt) - 1 : len(row) - 1].argmax(-1).tolist()
        greedy += sum(ours == theirs for ours, theirs in zip(best, answer["tokens"]))
        tokens += len(answer["tokens"])
    return largest, greedy, tokens


def distance(directory, other, scratch):
    """Returns the distance of two models' log-probabilities: if it is near 0, masks that are not applied would not
    be detected."""
    prompt = random_prompts([64])
    one, two = (log_probabilities(each, prompt, scratch)[0] for each in (directory, other))
    return (one - two).abs().max().item()
