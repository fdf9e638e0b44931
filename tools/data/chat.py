#!/usr/bin/env python3
"""Compares the token files of `moh-data prepare --chat` with transformers' `apply_chat_template`, id by id.

    python3 -m venv chat-venv && chat-venv/bin/pip install -r tools/data/chat-requirements.txt
    chat-venv/bin/python tools/data/chat.py --program target/release/moh-data

The templates are in the forms of Llama 3, Qwen 2 and 3, Mistral, Gemma, ChatML and Zephyr. For those with blocks
`{% generation %}` transformers tells which tokens are the assistant's (`return_assistant_tokens_mask`), and the masks are
compared too; a template without them must give the mask of its twin that has them.
"""

import argparse
import importlib.metadata
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|im_start|>",
           "<|im_end|>", "[INST]", "[/INST]", "<bos>", "<start_of_turn>", "<end_of_turn>"]

# Each with a place for what begins and what ends the assistant's text.
LLAMA = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {%- if message['role'] == 'assistant' %}
        BEGIN{{- message['content'] | trim + '<|eot_id|>' }}END
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
QWEN2 = """{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n<tools>' }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role != 'system' %}
    {{- '<|im_start|>system\nYou help.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}
        BEGIN{{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}END
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
QWEN3 = """{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        BEGIN{%- if loop.index0 > ns.last and thought %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {{- '<|im_end|>' }}END
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' }}
    {%- endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
MISTRAL = """{{- '<s>' }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] + '\n\n' %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set turns = messages %}
{%- endif %}
{%- for message in turns %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        BEGIN{{- ' ' + message['content'] + eos_token }}END
    {%- else %}
        {{- raise_exception('only user and assistant roles are supported') }}
    {%- endif %}
{%- endfor %}
"""
GEMMA = """{{- '<bos>' }}
{%- for message in messages %}
    {%- set role = 'model' if message['role'] == 'assistant' else 'user' %}
    {{- '<start_of_turn>' + role + '\n' }}
    {%- if role == 'model' %}
        BEGIN{{- message['content'] | trim + '<end_of_turn>' }}END
    {%- else %}
        {{- message['content'] | trim + '<end_of_turn>' }}
    {%- endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\n' }}
{%- endif %}
"""
CHAT_ML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}\
{% if message['role'] == 'assistant' %}BEGIN{{ message['content'] + '<|im_end|>' }}END\
{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'assistant' %}
{{ '<|assistant|>\n' }}BEGIN{{ message['content'] + eos_token }}END{{ '\n' }}{% else %}
{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
TEMPLATES = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "mistral": MISTRAL, "gemma": GEMMA, "chatml": CHAT_ML, "zephyr": ZEPHYR}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<b> \u00e9 'x'", "parameters": {
    "type": "object", "properties": {"n": {"type": "number", "default": 1e-07}, "m": {"default": 2.0}}, "required": []}}}]


def conversations(count, seed, tools):
    """Messages with words, scripts, spaces, code and names of special tokens, of one to six turns."""
    chance = random.Random(seed)
    words = ["the", " ship ", "\n", "left", "\t", "\"quoted\"", "{{ x }}", "{% if %}", "na\u00efve", "\u4f60\u597d",
             "\U0001f6a2", "\r\n", "1984", "  ", "<|im_end|>", "</s>", "def f(x):\n    return x"]
    def text():
        return " ".join(chance.choices(words, k=chance.randrange(1, 30)))
    for number in range(count):
        messages = [{"role": "system", "content": text()}] if number % 3 == 0 else []
        for turn in range(chance.randrange(1, 4)):
            messages.append({"role": "user", "content": text()})
            answer = {"role": "assistant", "content": text()}
            if tools and turn == 0:
                answer["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": {"n": 0.5, "s": "\u00e9<"}}}]
            messages.append(answer)
        yield {"messages": messages, **({"tools": TOOLS} if tools and number % 2 == 0 else {})}


def write_tokenizer(directory, template):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = ["the ship left the harbour in 1984", "def f(x): return x", "assistant user system model"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|begin_of_text|>", eos_token="</s>")
    made.chat_template = template
    made.save_pretrained(directory)
    return PreTrainedTokenizerFast.from_pretrained(directory)


def read(prefix):
    """The documents of a token file: ids and mask."""
    index = Path(f"{prefix}.idx").read_bytes()
    sequences = int.from_bytes(index[18:26], "little")
    lengths = np.frombuffer(index, np.int32, sequences, 34)
    ids = np.fromfile(f"{prefix}.bin", np.uint16).astype(int)
    mask = np.fromfile(f"{prefix}.mask", np.uint8)
    assert len(ids) == len(mask) == lengths.sum(), "lengths"
    ends = np.cumsum(lengths)
    return [(ids[end - length:end].tolist(), mask[end - length:end].tolist()) for end, length in zip(ends, lengths)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, help="moh-data")
    parser.add_argument("--conversations", type=int, default=200)
    arguments = parser.parse_args()
    print("transformers", importlib.metadata.version("transformers"), "jinja2", importlib.metadata.version("jinja2"))
    failures = 0
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        for name, template in TEMPLATES.items():
            records = list(conversations(arguments.conversations, 1, name == "qwen2"))
            (scratch / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
            masks = {}
            for kind, begin, end in [("blocks", "{%- generation %}", "{%- endgeneration %}"), ("plain", "", "")]:
                source = template.replace("BEGIN", begin).replace("END", end)
                if not begin:
                    # White space around the places is a block's.
                    source = template.replace("BEGIN{", "{").replace("}END", "}")
                directory = scratch / f"{name}-{kind}"
                tokenizer = write_tokenizer(directory, source)
                prefix = scratch / f"{name}-{kind}-out"
                command = [arguments.program, "prepare", "--chat", "--tokenizer", directory, "--out", prefix, scratch / "in.jsonl"]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode != 0:
                    print(f"{name} {kind}: {done.stderr}")
                    failures += 1
                    continue
                found = read(prefix)
                masks[kind] = [mask for _, mask in found]
                different = [0, 0]
                for record, (ids, mask) in zip(records, found, strict=True):
                    expected = tokenizer.apply_chat_template(
                        record["messages"], tools=record.get("tools"), tokenize=True, return_dict=True,
                        return_assistant_tokens_mask=kind == "blocks")
                    different[0] += ids != expected["input_ids"]
                    if kind == "blocks":
                        different[1] += mask != expected["assistant_masks"]
                        assert sum(expected["assistant_masks"]) > 0
                trained = sum(map(sum, masks[kind])) / sum(map(len, masks[kind]))
                print(f"{name} {kind}: {len(found)} conversations, {trained:.1%} of {sum(map(len, masks[kind]))} tokens trained on; "
                      f"other ids in {different[0]}, other masks in {different[1]}")
                failures += any(different)
            twins = masks.get("blocks") == masks.get("plain")
            print(f"{name}: the masks with and without blocks are {'the same' if twins else 'different'}")
            failures += not twins
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
