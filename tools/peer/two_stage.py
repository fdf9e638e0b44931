#!/usr/bin/env python3
"""Compares two-stage routing with a reference in PyTorch of the form that the authors of MoH released.

    cargo build --bin moh-train --bin moh-eval
    peer-venv/bin/python tools/peer/two_stage.py --programs target/debug

trains a small Mixture-of-Head model from scratch for a few steps, computes a text with it in plain PyTorch, and compares
logits, gates and the weights of the heads with `moh-eval logits` and `moh-eval heads`. Its layers share several heads, one,
none and all. With `--device cuda` our programs compute on a GPU.

The reference has a projection for each of the authors' three (github.com/SkyworkAI/MoH, MoH-ViT/attention.py): `wg` of
the routed heads, `wg_1` of the shared heads and `wg_0` of the two stages.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart"
TEXT = 'One day Ada gave the lamp to Tom. "Who has the lamp?" asked the cook. Tom has the lamp.'
TOLERANCE = 1e-5
RECIPE = """
[run]
dir = "{directory}/run"
seed = 3
device = "{device}"
dtype = "f32"

[model]
tokenizer = "{quickstart}"

[model.new]
vocab_size = 1024
hidden_size = 96
intermediate_size = 256
num_hidden_layers = 4
num_attention_heads = 8
num_key_value_heads = 4
initializer_range = 0.1
moh = {{ router = "two-stage", shared_heads = [3, 1, 0, 8], routed_top_k = [2, 3, 4, 0] }}

[data]
sequence_length = 128
sources = [{{ path = "{quickstart}/voyage" }}]

[[stage]]
name = "pretrain"
attention = "moh"
tokens = 40960
batch_tokens = 2048
micro_batch = 4
learning_rate = {{ max = 3e-3, warmup_steps = 5 }}
"""


def run(*command):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: {done.stderr}")
    return done.stdout


class Layer:
    """A block of the model. Its tensors have their names after the block's prefix."""

    def __init__(self, config, tensors, layer):
        prefix = f"model.layers.{layer}."
        self.tensors = {name[len(prefix):]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        self.config = config
        counts = [config[key] for key in ("moh_shared_heads", "moh_routed_top_k")]
        self.shared, self.top_k = (count[layer] if isinstance(count, list) else count for count in counts)

    def linear(self, x, name):
        return x @ self.tensors[f"{name}.weight"].T

    def weights(self, x):
        """Returns each token's weights of the heads' outputs, `[tokens, heads]`, and the gates of the routed heads."""
        heads = self.config["num_attention_heads"]
        if self.shared == heads:
            return torch.ones(len(x), heads, dtype=x.dtype), None
        rows = self.tensors["self_attn.router.weight"]
        wg, wg_1 = rows[self.shared:], rows[: self.shared]
        gates = torch.softmax(x @ wg.T, -1)
        chosen = torch.topk(gates, self.top_k, dim=-1).indices
        masked = gates * torch.zeros_like(gates).scatter(-1, chosen, 1.0)
        smallest = torch.finfo(masked.dtype).eps
        routed = masked / masked.sum(-1, keepdim=True).clamp(min=smallest) * self.top_k
        if self.shared == 0:
            return routed, gates
        shared = torch.softmax(x @ wg_1.T, -1) * self.shared
        balance = 2 * torch.softmax(x @ self.tensors["self_attn.router.stages.weight"].T, -1)
        return torch.cat([balance[:, :1] * shared, balance[:, 1:] * routed], -1), gates

    def forward(self, stream, found):
        config, length = self.config, len(stream)
        heads, groups, dim = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        x = norm(stream, self.tensors["input_layernorm.weight"], config)
        query = rotate(self.linear(x, "self_attn.q_proj").view(length, heads, dim), config)
        key = rotate(self.linear(x, "self_attn.k_proj").view(length, groups, dim), config)
        value = self.linear(x, "self_attn.v_proj").view(length, groups, dim)
        key, value = (part.repeat_interleave(heads // groups, 1) for part in (key, value))
        scores = torch.einsum("thd,shd->hts", query, key) / dim**0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        output = torch.einsum("hts,shd->thd", scores.masked_fill(later, -torch.inf).softmax(-1), value)
        weights, gates = self.weights(x)
        found.append((weights, gates))
        stream = stream + self.linear((output * weights[:, :, None]).flatten(1), "self_attn.o_proj")
        x = norm(stream, self.tensors["post_attention_layernorm.weight"], config)
        gated = torch.nn.functional.silu(self.linear(x, "mlp.gate_proj")) * self.linear(x, "mlp.up_proj")
        return stream + self.linear(gated, "mlp.down_proj")


def norm(x, weight, config):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]) * weight


def rotate(x, config):
    """Applies RoPE in Hugging Face's order: the first half of a head with the second."""
    length, _, dim = x.shape
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    frequencies = theta ** -(torch.arange(0, dim, 2, dtype=x.dtype) / dim)
    angles = torch.arange(length, dtype=x.dtype)[:, None, None] * frequencies
    cosine, sine = angles.cos(), angles.sin()
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def reference(directory, ids):
    """Returns the logits of ids, and each layer's weights and gates, in f32."""
    config = json.loads((directory / "config.json").read_text())
    tensors = {name: tensor.float() for name, tensor in load_file(directory / "model.safetensors").items()}
    stream, found = tensors["model.embed_tokens.weight"][ids], []
    for layer in range(config["num_hidden_layers"]):
        stream = Layer(config, tensors, layer).forward(stream, found)
    return norm(stream, tensors["model.norm.weight"], config) @ tensors["lm_head.weight"].T, found


def compare(what, ours, theirs):
    """Prints the largest difference. Returns whether it is small enough for values of this size."""
    difference, size = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    fine = difference <= TOLERANCE * max(1.0, size)
    print(f"{what}: {difference:.1e}, of at most {size:.3g}{'' if fine else ': too much'}")
    return fine


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", type=Path, default=ROOT / "target" / "release")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        recipe = place / "recipe.toml"
        recipe.write_text(RECIPE.format(directory=directory, quickstart=QUICKSTART, device=options.device))
        run(options.programs / "moh-train", "--recipe", recipe)
        model = place / "run" / "export"
        evaluate = [options.programs / "moh-eval"]
        device = ["--device", options.device]
        sentence = json.loads(run(*evaluate, "heads", model, "--sentence", TEXT, "--json", *device))["sentence"]
        ids = [token["id"] for token in sentence["tokens"]]
        (place / "ids.json").write_text(json.dumps([ids]))
        files = ("--ids", place / "ids.json", "--out", place / "logits")
        run(*evaluate, "logits", "--model", model, *files, "--dtype", "f32", *device)
        logits, found = reference(model, torch.tensor(ids))
        fine = [compare("logits", load_file(place / "logits")["logits"][0], logits)]
        for index, (layer, (weights, gates)) in enumerate(zip(sentence["layers"], found)):
            if gates is None:
                fine.append(layer["gates"] is None and layer["weights"] is None)
                continue
            routed = [head for head in range(weights.shape[1]) if head not in layer["shared_heads"]]
            fine.append(compare(f"layer {index}, gates", torch.tensor(layer["gates"])[:, routed], gates))
            fine.append(compare(f"layer {index}, weights", torch.tensor(layer["weights"]), weights))
    print("the same" if all(fine) else "different")
    return not all(fine)


if __name__ == "__main__":
    sys.exit(main())
