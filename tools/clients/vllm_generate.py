"""Generates with vLLM, in a separate process: reads a job from standard input, writes the answers to a file.

The job is a JSON object: `model`, `options` of the engine, `batches` of prompts, which are answered one batch
after another, `max_tokens`, `score_prompts` and `out`.
"""

import json
import os
import sys

# A gibibyte of keys and values is more than enough. Faults must be visible.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from vllm import LLM, SamplingParams


def dense(by_token):
    """Returns log-probabilities in the order of the vocabulary."""
    return [by_token[token].logprob for token in range(len(by_token))]


def answer(request):
    prompt = request.prompt_token_ids
    completion = request.outputs[0]
    values = {
        place: dense(by_token) for place, by_token in enumerate(request.prompt_logprobs or []) if by_token is not None
    }
    values |= {len(prompt) + place: dense(by_token) for place, by_token in enumerate(completion.logprobs)}
    return {
        "tokens": list(completion.token_ids),
        "log_probabilities": values,
        "reused": request.num_cached_tokens or 0,
    }


def main():
    job = json.load(sys.stdin)
    engine = LLM(
        model=job["model"],
        trust_remote_code=True,
        dtype="float32",
        skip_tokenizer_init=True,
        max_logprobs=-1,
        seed=0,
        **job["options"],
    )
    sampling = SamplingParams(
        temperature=0,
        max_tokens=job["max_tokens"],
        ignore_eos=True,
        detokenize=False,
        logprobs=-1,
        prompt_logprobs=-1 if job["score_prompts"] else None,
    )
    answers = []
    for batch in job["batches"]:
        prompts = [{"prompt_token_ids": prompt} for prompt in batch]
        answers.extend(answer(request) for request in engine.generate(prompts, sampling, use_tqdm=False))
    with open(job["out"], "w", encoding="utf-8") as file:
        json.dump(answers, file)


if __name__ == "__main__":
    main()
