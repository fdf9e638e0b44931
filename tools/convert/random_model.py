"""Writes models with random weights, in bf16 and in Hugging Face's layout."""

import json
import multiprocessing
import os
import random
import struct
import sys
from pathlib import Path

LLAMA3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA3_1B = LLAMA3_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
# Qwen3 with the 32 heads of its 4B and 8B models, at a tenth of their width.
QWEN3_32_HEADS = LLAMA3_8B | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
SHAPES = {"llama3-8b": LLAMA3_8B, "llama3-1b": LLAMA3_1B, "qwen3-32-heads": QWEN3_32_HEADS}

SHARD_BYTES = 5_000_000_000
# Random values that the weights repeat. Their number is a prime, so that no two rows of a matrix are equal.
BLOCK_VALUES = 4_194_301
DEVIATION = 0.02


def shapes(config):
    """Yields the tensors in the order of transformers: by name within a layer."""
    hidden, mlp, vocab = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, kv_heads, width = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    yield "model.embed_tokens.weight", [vocab, hidden]
    for layer in range(config["num_hidden_layers"]):
        tensors = {
            "input_layernorm": [hidden],
            "mlp.down_proj": [hidden, mlp],
            "mlp.gate_proj": [mlp, hidden],
            "mlp.up_proj": [mlp, hidden],
            "post_attention_layernorm": [hidden],
            "self_attn.k_proj": [kv_heads * width, hidden],
            "self_attn.o_proj": [hidden, heads * width],
            "self_attn.q_proj": [heads * width, hidden],
            "self_attn.v_proj": [kv_heads * width, hidden],
        }
        if config["model_type"] == "qwen3":
            tensors |= {"self_attn.q_norm": [width], "self_attn.k_norm": [width]}
        for name, shape in tensors.items():
            yield f"model.layers.{layer}.{name}.weight", shape
    yield "model.norm.weight", [hidden]
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", [vocab, hidden]


def num_bytes(shape):
    count = 2
    for size in shape:
        count *= size
    return count


def shards(config):
    """Returns the tensors of each file."""
    found, size = [[]], 0
    for name, shape in shapes(config):
        if size > 0 and size + num_bytes(shape) > SHARD_BYTES:
            found.append([])
            size = 0
        found[-1].append((name, shape))
        size += num_bytes(shape)
    return found


def bf16(value):
    """Returns the upper half of an f32."""
    return struct.pack("<f", value)[2:]


class Weights:
    """Normal values for matrices, and ones for norms."""

    def __init__(self):
        draw = random.Random(1)
        # 65,536 different values, in any order.
        values = [bf16(draw.gauss(0, DEVIATION)) for _ in range(1 << 16)]
        self.block = b"".join(draw.choices(values, k=BLOCK_VALUES))
        self.offset = 0

    def write(self, file, shape):
        left = num_bytes(shape)
        if len(shape) == 1:
            file.write(bf16(1.0) * shape[0])
            return
        while left > 0:
            part = self.block[self.offset : self.offset + left]
            file.write(part)
            left -= len(part)
            self.offset = (self.offset + len(part)) % len(self.block)


def write_model(directory: Path, config):
    """Writes a model directory. Returns the bytes of its weights."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    weights, weight_map, total = Weights(), {}, 0
    parts = shards(config)
    for number, tensors in enumerate(parts, 1):
        name = f"model-{number:05}-of-{len(parts):05}.safetensors"
        header, end = {}, 0
        for tensor, shape in tensors:
            start, end = end, end + num_bytes(shape)
            header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
            weight_map[tensor] = name
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(directory / name, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, shape in tensors:
                weights.write(file, shape)
            file.flush()
            os.fsync(file.fileno())
        total += end
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def apart(write, *arguments):
    """Calls a function in a separate process, since a program's largest memory includes the memory of its parent
    process."""
    writer = multiprocessing.Process(target=write, args=arguments)
    writer.start()
    writer.join()
    if writer.exitcode != 0:
        sys.exit(f"{arguments[0]} could not be written")
