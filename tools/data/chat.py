#!/usr/bin/env python3
"""Compares the token files of `moh-data prepare --chat` with transformers' `apply_chat_template`, id by id.

    python3 -m venv chat-venv && chat-venv/bin/pip install -r tools/data/chat-requirements.txt
    chat-venv/bin/python tools/data/chat.py --program target/release/moh-data

The templates are in the forms of Llama 3, Qwen 2 and 3, Mistral, Gemma, ChatML and Zephyr. For those with blocks
`{% generation %}` transformers tells which tokens are the assistant's (`return_assistant_tokens_mask`), and the masks are
compared too; a template without them must give the mask of its twin that has them.

More templates read tools, reasoning, parts and all that messages may have; `generated` makes rows for them, which are
compared as JSON lines, as Parquet and, with `--server` and without tools, as requests to moh-serve.
"""

import argparse
import copy
import importlib.metadata
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import safetensors.numpy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import _normalize_chat_messages, render_jinja_template

SPECIAL = ["<s>", "</s>", "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|im_start|>",
           "<|im_end|>", "[INST]", "[/INST]", "<bos>", "<start_of_turn>", "<end_of_turn>"]

# Each template has a place for the start and for the end of the assistant's text.
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


# The types that the further templates read: arguments as an object, a text or either, and content as a text, parts or
# either. A dict has templates by name.
LLAMA_TOOLS = """{{- bos_token }}
{%- if tools is not none %}
    {{- 'Functions:' }}{% for tool in tools %}{{- '\n' + (tool | tojson(indent=2)) }}{% endfor %}{{- '\n\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
    {%- if 'tool_calls' in message and message.role == 'assistant' %}
        {%- if message.tool_calls | length != 1 %}{{- '[several]' }}{%- endif %}
        {%- generation %}{%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "parameters": ' }}{{- call.function.arguments | tojson }}{{- '}' }}
        {%- endfor %}{{- '<|eot_id|>' }}{%- endgeneration %}
    {%- elif message.role == 'assistant' %}
        {%- generation %}{{- (message.content | trim) + '<|eot_id|>' }}{%- endgeneration %}
    {%- elif message.content is defined %}
        {{- (message.content | trim) + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}"""
QWEN_TOOLS = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{%- if message.content %}{{- '\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}{{- '<|im_end|>' }}{%- endgeneration %}
    {%- else %}{{- '\n' + (message.content or '') + '<|im_end|>' }}{%- endif %}{{- '\n' }}
{%- endfor %}"""
THINKS = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{%- if message.reasoning_content is string %}
            {{- '<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}{{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function.arguments is string %}{{- '\n' + call.function.arguments }}
            {%- else %}{{- '\n' }}{{- call.function.arguments | tojson }}{%- endif %}
        {%- endfor %}{{- '<|im_end|>' }}{%- endgeneration %}
    {%- else %}{{- (message.content or '') + '<|im_end|>' }}{%- endif %}{{- '\n' }}
{%- endfor %}"""
THINKS_BY_OLDER_NAME = """{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ ':' ~ message.keys() | list | join(',') ~ '\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- '(' ~ message.thinking ~ ')' if message.thinking else '' }}{{- message.content or '' }}{{- '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}{{- message.content }}{%- endif %}{{- '\n' }}
{%- endfor %}"""
GUARD = """{%- for message in messages %}
    {{- '\n' + message['role'] + ': ' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{%- for part in message['content'] %}{%- if part['type'] == 'text' %}{{- part['text'] | trim }}{%- endif %}{%- endfor %}
        {{- eos_token }}{%- endgeneration %}
    {%- else %}{%- for part in message['content'] %}{%- if part['type'] == 'text' %}{{- part['text'] | trim }}{%- endif %}{%- endfor %}{%- endif %}
{%- endfor %}"""
VISION = """{%- macro shown(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}{%- for part in content or [] %}{%- if 'image' in part %}{{- '[IMAGE]' }}{%- elif 'text' in part %}{{- part.text }}{%- endif %}{%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}{%- generation %}{{- shown(message.content) + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}{{- shown(message.content) + '<|im_end|>' }}{%- endif %}{{- '\n' }}
{%- endfor %}"""
JOINS = """{{- bos_token }}{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{%- if message['tool_calls'] is defined and message['tool_calls'] is not none %}
            {%- for call in message['tool_calls'] %}
                {{- 'call ' + call['type'] + ' ' + call['function']['name'] + '\n' + '```json' + '\n' + call['function']['arguments'] + '\n```' }}
            {%- endfor %}
        {%- else %}{{- message['content'] }}{%- endif %}{{- eos_token }}{%- endgeneration %}
    {%- elif message['content'] is string %}{{- message['role'] + ': ' + message['content'] + '\n' }}{%- endif %}
{%- endfor %}"""
ITEMS = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<function=' + call.function.name + '>' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '<parameter=' + key + '>' }}{{- value | tojson if value is mapping or value is sequence and value is not string else value | string }}{{- '</parameter>' }}
            {%- endfor %}
        {%- endfor %}{{- '<|im_end|>' }}{%- endgeneration %}
    {%- else %}{{- (message.content or '') + '<|im_end|>' }}{%- endif %}{{- '\n' }}
{%- endfor %}"""
INST_TOOLS = """{{- bos_token }}
{%- set ns = namespace(turns=[], calls=0) %}
{%- for message in messages %}{%- set ns.turns = ns.turns + [message.role] %}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or message.role == 'system' %}
        {%- if tools is not none and loop.last %}{{- '[TOOLS]' + (tools | tojson) }}{%- endif %}{{- '[INST] ' ~ message.content ~ ' [/INST]' }}
    {%- elif message.role == 'assistant' %}
        {%- generation %}{%- if message.tool_calls is defined and message.tool_calls | length > 0 %}
            {%- set ns.calls = ns.calls + message.tool_calls | length %}{{- '[TOOL_CALLS] [' }}
            {%- for call in message.tool_calls %}
                {%- set out = call.function | tojson %}{{- out[:-1] }}{{- ', "id": "' ~ (call.id or '') ~ '"}' }}{{- ', ' if not loop.last else ']' }}
            {%- endfor %}
        {%- else %}{{- ' ' ~ (message.content | trim) }}{%- endif %}{{- eos_token }}{%- endgeneration %}
    {%- else %}{{- '[TOOL_RESULTS] ' ~ {'content': message.content, 'id': message.tool_call_id} ~ ' [/TOOL_RESULTS]' }}{%- endif %}
{%- endfor %}{{- ns.turns ~ ns.calls }}"""
PRINTS = """{%- for message in messages %}
    {{- message }}{{- '\n' ~ message.content ~ '\n' }}{{- message | tojson(sort_keys=true, ensure_ascii=true) }}
    {%- if message.role == 'assistant' %}{%- generation %}{{- message.tool_calls }}{{- eos_token }}{%- endgeneration %}{%- endif %}
{%- endfor %}"""
FURTHER = {
    "llama tools": (LLAMA_TOOLS, "object", "text"),
    "qwen tools": (QWEN_TOOLS, "object", "text"),
    "thinks": (THINKS, "either", "text"),
    "thinks by older name": (THINKS_BY_OLDER_NAME, "none", "text"),
    "guard": (GUARD, "none", "parts"),
    "vision": (VISION, "none", "either"),
    "joins": (JOINS, "text", "text"),
    "items": (ITEMS, "object", "text"),
    "inst tools": (INST_TOOLS, "object", "text"),
    "prints": (PRINTS, "prints", "prints"),
    "named": ({"default": THINKS.replace("<think>", "<none>"), "tool_use": QWEN_TOOLS.replace("<|im_start|>", "<|im_end|>"), "rag": "{{ raise_exception('rag') }}"},
              "by tools", "text"),
    "named in files": ({"default": VISION, "tool_use": INST_TOOLS}, "by tools", "text"),
}


def generated(count, seed, arguments, content, flat):
    """Yields rows with nulls, names of reasoning, tools, weights, parts and large integers. With `flat`, each key
    has a single type, as a table's columns have."""
    chance = random.Random(seed)
    words = ["ship", " left ", "\n", "it's", "\"", "\\", "\u4f60\u597d", "\U0001f6a2", "</s>", "1984", "{", "\t", "\x07", "NaN", "<b>&"]
    def text():
        return " ".join(chance.choices(words, k=chance.randrange(1, 8)))
    def value(depth):
        kinds = [text, lambda: chance.randrange(-5, 5), lambda: chance.choice([True, False, None]), lambda: chance.choice([0.5, 1e-7, 1e22, 2.0])]
        if not flat:
            kinds += [lambda: chance.choice([2**63, -2**63 - 1, 2**64, 10**21, -10**30, 2**127]), lambda: float(chance.choice(["nan", "inf", "-inf"]))]
            if depth < 2:
                kinds += [lambda: [value(depth + 1) for _ in range(chance.randrange(3))], lambda: {text(): value(depth + 1) for _ in range(chance.randrange(3))}]
        return chance.choice(kinds)()
    def called():
        given = {key: value(0) for key in chance.sample(["n", "s", "\u00e9"], k=chance.randrange(1, 4))}
        written = flat or arguments == "text" or arguments != "prints" and chance.random() < 0.5
        function = {"name": "f", "arguments": json.dumps(given, separators=(",", ":") if chance.random() < 0.5 else None) if written else given}
        return {"id": "call12345", "type": "function", "function": function}
    def parts():
        return [{"type": "text", "text": text()} for _ in range(chance.randrange(1, 4))]
    def said():
        listed = content == "parts" or content in ("either", "prints") and not flat and chance.random() < 0.5
        return parts() if listed else text()
    def noise(message):
        for key in ["refusal", "function_call", "name", "tool_calls", "audio", "reasoning", "thinking", "weight"]:
            if key not in message and chance.random() < 0.3:
                message[key] = None
        if chance.random() < 0.2:
            message["annotations"] = text()
        if chance.random() < 0.2:
            message["loss"] = chance.choice([0.5, 1e22, float("nan"), float("-inf")])
        return message
    for number in range(count):
        messages = [noise({"role": "system", "content": said()})] if chance.random() < 0.3 else []
        for _ in range(chance.randrange(1, 4)):
            messages.append(noise({"role": "user", "content": said()}))
            answer = {"role": "assistant", "content": said()}
            if chance.random() < 0.4:
                answer[chance.choice(["reasoning_content", "thinking", "reasoning"])] = text()
            if chance.random() < 0.2:
                answer.update(chance.choice([{"weight": 0}, {"weight": 1}, {"train": False}, {"train": True}]))
            if arguments != "none" and chance.random() < 0.5:
                answer["tool_calls"] = [called() for _ in range(chance.randrange(1, 3))]
                answer["content"] = chance.choice([None, "", answer["content"]]) if content == "text" else answer["content"]
                messages.append(noise(answer))
                messages.append({"role": "tool", "content": said(), "tool_call_id": "call12345"})
                answer = {"role": "assistant", "content": said()}
            messages.append(noise(answer))
        chance.shuffle(items := list(messages[-1].items()))
        messages[-1] = dict(items)
        row = {"messages": messages, "id": number, "score": float("nan")}
        if arguments not in ("none", "prints") and chance.random() < 0.5:
            row["tools"] = json.dumps(TOOLS) if flat else TOOLS
        yield row


def as_read(messages, arguments, tools=None):
    """Returns the messages, with arguments as objects if the template reads objects."""
    messages = copy.deepcopy(messages)
    if arguments == "object" or arguments == "by tools" and tools:
        for message in messages:
            for call in message.get("tool_calls") or []:
                if isinstance(call["function"]["arguments"], str):
                    call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages


def without_nulls(value):
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def expected_of(tokenizer, messages, tools):
    """Returns the ids and the mask: the blocks of the turns that are trained on."""
    rendered, spans = render_jinja_template(
        conversations=[_normalize_chat_messages(messages)], tools=tools, chat_template=tokenizer.get_chat_template(tools=tools),
        return_assistant_tokens_mask=True, **tokenizer.special_tokens_map)
    answers = [message for message in messages if message["role"] == "assistant"]
    assert len(answers) == len(spans[0])
    spans = [span for span, answer in zip(spans[0], answers) if answer.get("weight") != 0 and answer.get("train") is not False]
    encoded = tokenizer(rendered[0], add_special_tokens=False, return_offsets_mapping=True)
    mask = [int(any(start < end_of and end > start_of for start_of, end_of in spans)) for start, end in encoded["offset_mapping"]]
    assert tokenizer.apply_chat_template(messages, tools=tools, tokenize=False) == rendered[0]
    return encoded["input_ids"], mask


def table(rows):
    """Returns the rows as a table, with the keys of all messages in each message."""
    function = pyarrow.struct([("name", pyarrow.string()), ("arguments", pyarrow.string())])
    call = pyarrow.struct([("id", pyarrow.string()), ("type", pyarrow.string()), ("function", function)])
    part = pyarrow.struct([("type", pyarrow.string()), ("text", pyarrow.string())])
    lists = isinstance(rows[0]["messages"][-1]["content"], list)
    keys = sorted({key for row in rows for message in row["messages"] for key in message} - {"role"})
    kinds = {"content": pyarrow.list_(part) if lists else pyarrow.string(), "tool_calls": pyarrow.list_(call), "weight": pyarrow.float64(), "loss": pyarrow.float64(), "train": pyarrow.bool_()}
    message = pyarrow.struct([("role", pyarrow.string())] + [(key, kinds.get(key, pyarrow.string())) for key in keys])
    schema = pyarrow.schema([("messages", pyarrow.list_(message)), ("tools", pyarrow.string()), ("score", pyarrow.float64())])
    return pyarrow.Table.from_pylist([{**row, "tools": row.get("tools")} for row in rows], schema=schema)


def prepare(program, tokenizer, prefix, path):
    command = [program, "prepare", "--chat", "--tokenizer", tokenizer, "--out", prefix, "--force", path]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        print(f"{path.name}: {done.stderr}")
        return [], done.stderr
    return read(prefix), done.stderr


def compare_further(name, program, server, scratch):
    template, arguments, content = FURTHER[name]
    directory = scratch / name
    tokenizer = write_tokenizer(directory, template, in_files=name == "named in files")
    different = 0
    for flat in [False, True]:
        rows = list(generated(60, name, arguments, content, flat))
        path = scratch / f"{name}-{flat}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found, notes = prepare(program, directory, scratch / "out", path)
        if flat:
            # A table has no order of keys, and does not distinguish null from a missing key.
            pyarrow.parquet.write_table(rows_of := table(rows), path.with_suffix(".parquet"))
            with pyarrow.ipc.new_file(path.with_suffix(".arrow"), rows_of.schema) as file, pyarrow.ipc.new_stream(path.with_suffix(".stream"), rows_of.schema) as stream:
                file.write_table(rows_of)
                stream.write_table(rows_of)
            path.with_suffix(".json").write_text(json.dumps(rows))
            different += prepare(program, directory, scratch / "out", path.with_suffix(".json"))[0] != found
            tables = [prepare(program, directory, scratch / "out", path.with_suffix(end))[0] for end in [".parquet", ".arrow", ".stream"]]
            different += tables[0] != tables[1] or tables[0] != tables[2]
            if arguments != "prints" and name != "thinks by older name":
                different += tables[0] != found
            else:
                order = pyarrow.parquet.read_table(path.with_suffix(".parquet"))["messages"].to_pylist()
                found = tables[0]
                rows = [{**row, "messages": without_nulls(messages)} for row, messages in zip(rows, order)]
        elif "annotations" not in str(template):
            unread = sum("annotations" in message for row in rows for message in row["messages"])
            different += content != "prints" and f'"annotations" in {unread} messages' not in notes
        different += len(rows) != len(found)
        for row, (ids, mask) in zip(rows, found):
            tools = row.get("tools")
            tools = json.loads(tools) if isinstance(tools, str) else tools
            expected = expected_of(tokenizer, as_read(row["messages"], arguments, tools), tools)
            if (ids, mask) != expected:
                different += 1
                if different == 1:
                    print(repr(tokenizer.decode(expected[0])), repr(tokenizer.decode(ids)), sep="\n")
                    print([number for number, (one, other) in enumerate(zip(mask, expected[1])) if one != other][:20])
    print(f"{name}: other ids, masks or notes in {different} of 120 rows")
    if server:
        different += compare_served(name, server, tokenizer, directory, list(generated(8, name, arguments, content, False)))
    return different


def compare_cases(path):
    """Compares the cases of the crate's test: their expected texts are transformers' own."""
    different, count = 0, 0
    for case in json.loads(path.read_text()):
        if "text" not in case:
            continue
        messages = case.get("record", case)["messages"]
        messages = json.loads(messages) if isinstance(messages, str) else messages
        variables = case.get("record", {}).get("chat_template_kwargs", {})
        others = "adapted" in case or "unnamed" in case and not variables or any("tool_calls" in message or "from" in message for message in messages)
        if others:
            continue
        tools = json.loads(case.get("tools") or "null") if isinstance(case.get("tools"), str) else case.get("tools")
        rendered, _ = render_jinja_template(
            conversations=[_normalize_chat_messages(messages)], tools=tools or None, chat_template=case["template"],
            add_generation_prompt=case.get("prompts", False), **{"bos_token": "<s>", "eos_token": "</s>", **variables})
        count += 1
        if rendered[0] != case["text"]:
            different += 1
            print(case["template"], rendered[0], case["text"], sep="\n")
    print(f"{path.name}: {different} of {count} texts are others")
    return different


def compare_served(name, server, tokenizer, directory, rows):
    """Compares the number of a prompt's tokens and the likeliest token after it, for a chat and for its ids."""
    _, arguments, content = FURTHER[name]
    write_model(directory, len(tokenizer))
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(
            [server, "--model", directory, "--port", "0"], stdout=log, stderr=log) as running:
        try:
            address = None
            for _ in range(200):
                log.seek(0)
                if address := re.search(r"http://[\d.]+:\d+", log.read()):
                    break
                time.sleep(0.05)
            def post(path, body):
                request = urllib.request.Request(address.group() + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
                try:
                    return json.load(urllib.request.urlopen(request))
                except urllib.error.HTTPError as error:
                    return {"error": error.read().decode()}
            different = 0
            for row in rows:
                messages = row["messages"]
                read_ones = as_read(messages, arguments)
                for message in read_ones:
                    if content in ("text", "prints") and isinstance(message.get("content"), list):
                        message["content"] = "\n".join(part["text"] for part in message["content"])
                ids = tokenizer.apply_chat_template(read_ones, add_generation_prompt=True, return_dict=False)
                chat = post("/v1/chat/completions", {"messages": messages, "max_tokens": 1, "temperature": 0, "logprobs": True})
                plain = post("/v1/completions", {"prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 0})
                if "error" in chat or "error" in plain:
                    print(name, chat, plain)
                    different += 1
                    continue
                of_chat = chat["choices"][0]["logprobs"]["content"][0]["logprob"]
                different += (chat["usage"]["prompt_tokens"], of_chat) != (len(ids), plain["choices"][0]["logprobs"]["token_logprobs"][0])
            print(f"{name}: {different} of {len(rows)} prompts are others in moh-serve")
            return different
        finally:
            running.terminate()


def write_model(directory, vocabulary):
    """Writes a Llama with a single layer and random weights."""
    chance = np.random.default_rng(0)
    width, heads, inner = 16, 2, 32
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": heads,
              "num_hidden_layers": 1, "intermediate_size": inner, "vocab_size": vocabulary, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
              "max_position_embeddings": 8192, "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config))
    layer = {f"self_attn.{part}_proj": (width, width) for part in "qkvo"} | {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
    weights = {"model.embed_tokens.weight": (vocabulary, width), **{f"model.layers.0.{part}.weight": shape for part, shape in layer.items()}}
    weights = {part: chance.normal(size=shape).astype(np.float32) for part, shape in weights.items()}
    for part in ["model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"]:
        weights[f"{part}.weight"] = np.ones(width, np.float32)
    safetensors.numpy.save_file(weights, directory / "model.safetensors", {"format": "pt"})


def conversations(count, seed, tools):
    """Yields messages with words, scripts, spaces, code and names of special tokens, in one to six turns."""
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


def write_tokenizer(directory, template, in_files=True):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = ["the ship left the harbour in 1984", "def f(x): return x", "assistant user system model"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|begin_of_text|>", eos_token="</s>")
    made.chat_template = template
    made.save_pretrained(directory, save_jinja_files=in_files)
    return PreTrainedTokenizerFast.from_pretrained(directory)


def read(prefix):
    """Returns the documents of a token file: ids and mask."""
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
    parser.add_argument("--server", help="moh-serve")
    parser.add_argument("--conversations", type=int, default=100)
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
                    # White space around the places belongs to a block.
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
        failures += compare_cases(Path(__file__).parents[2] / "workspace/text/tests/text/templates.json")
        for name in FURTHER:
            failures += compare_further(name, os.path.abspath(arguments.program), arguments.server, scratch) > 0
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
