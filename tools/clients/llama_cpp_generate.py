"""Generates with llama.cpp's server, in a separate process: reads a job from standard input, writes the answers to
a file.

The job is a JSON object: `model`, a GGUF file; `context`, the maximum tokens of a prompt with its answer;
`vocabulary`, its size; `prompts`, which are answered one after another; `max_tokens`, and `out`.
"""

import json
import sys

import xllamacpp


def start(path, context):
    options = xllamacpp.CommonParams()
    options.model.path = path
    options.n_ctx = context
    options.n_parallel = 1
    # By default the cache is f16.
    options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(options)


def complete(server, prompt, count, vocabulary):
    """Yields the tokens of greedy generation, up to a token that ends the text, each with the log-probabilities
    of all tokens."""
    answer = server.handle_completions(
        {"prompt": prompt, "max_tokens": count, "temperature": 0, "logprobs": vocabulary}
    )
    for step in answer["choices"][0]["logprobs"]["content"]:
        by_token = {other["id"]: other["logprob"] for other in step["top_logprobs"]}
        yield step["id"], [by_token[token] for token in range(vocabulary)]


def answer(server, prompt, count, vocabulary):
    tokens, values = [], {}
    # The end of a text is a token like any other.
    while len(tokens) < count:
        for token, by_token in complete(server, prompt + tokens, count - len(tokens), vocabulary):
            values[len(prompt) + len(tokens)] = by_token
            tokens.append(token)
    return {"tokens": tokens, "log_probabilities": values}


def main():
    job = json.load(sys.stdin)
    server = start(job["model"], job["context"])
    answers = [answer(server, prompt, job["max_tokens"], job["vocabulary"]) for prompt in job["prompts"]]
    with open(job["out"], "w", encoding="utf-8") as file:
        json.dump(answers, file)


if __name__ == "__main__":
    main()
