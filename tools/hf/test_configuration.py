"""Every key of config.json that changes what transformers computes is read, or refused by name."""

import ast
import dataclasses
import inspect
import json
import os
import subprocess
import tempfile
import unittest
from pathlib import Path

from programs import (  # Must be first: it sets the environment of transformers.
    PROGRAMS,
    REPOSITORY,
    our_logits,
    random_ids,
    save_random,
    sizes,
)

import torch
import transformers
from transformers import cache_utils, masking_utils, modeling_rope_utils
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

KEYS = json.loads((REPOSITORY / "workspace/hf/src/config_file/keys.json").read_text())
MODULES = [cache_utils, masking_utils, modeling_llama, modeling_qwen3, modeling_rope_utils]
CONFIGS = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}
# Relative to the largest logit. Both sides add in f32 in another order, and transformers computes frequencies in f32.
TOLERANCE = 5e-5

LINEAR = {"rope_type": "linear", "factor": 3.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
DEFAULT = {"rope_type": "default", "rope_theta": 300.0}

# For each: entries of config.json in addition to the sizes. None removes a key.
SAME = {
    "nothing about RoPE": {},
    "a base": {"rope_theta": 500.0},
    "a whole base": {"rope_theta": 500},
    "a base in rope_parameters": {"rope_parameters": DEFAULT},
    "a base in rope_scaling": {"rope_scaling": DEFAULT},
    "two bases, rope_parameters": {"rope_parameters": DEFAULT, "rope_theta": 900.0},
    "two bases, rope_scaling": {"rope_scaling": DEFAULT, "rope_theta": 900.0},
    "a table without a type": {"rope_parameters": {"rope_theta": 300.0}},
    "empty tables": {"rope_parameters": {}, "rope_scaling": {}, "rope_theta": 500.0},
    "null tables": {"rope_parameters": None, "rope_scaling": None, "rope_theta": 500.0},
    "linear": {"rope_scaling": LINEAR},
    "linear, older name of the type": {"rope_scaling": {"type": "linear", "factor": 3}},
    "linear in rope_parameters": {"rope_parameters": {**LINEAR, "rope_theta": 300.0}},
    "linear, which counts before rope_parameters": {"rope_scaling": LINEAR, "rope_parameters": DEFAULT},
    "two types": {"rope_scaling": {"type": "linear", "factor": 3, "rope_type": "default"}},
    "llama3": {"rope_scaling": LLAMA3, "rope_theta": 500.0},
    "llama3, base inside": {"rope_scaling": {**LLAMA3, "rope_theta": 500.0}},
    "llama3 in rope_parameters": {"rope_parameters": {**LLAMA3, "rope_theta": 500.0}},
    "llama3 in rope_parameters, base outside": {"rope_parameters": LLAMA3, "rope_theta": 500.0},
    "llama3, original length outside": {"rope_scaling": LLAMA3, "original_max_position_embeddings": 64},
    "llama3 without an original length": {
        "rope_scaling": {key: value for key, value in LLAMA3.items() if key[:8] != "original"}
    },
    "yarn": {"rope_scaling": YARN},
    "yarn on a file of transformers 5": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": YARN},
    "yarn in rope_parameters": {"rope_parameters": {**YARN, "rope_theta": 1e6}},
    "yarn with an attention factor": {"rope_scaling": {**YARN, "attention_factor": 1.4}},
    "yarn with an attention factor of 1": {"rope_scaling": {**YARN, "attention_factor": 1.0}},
    "yarn with multipliers": {"rope_scaling": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.5}},
    "yarn with one multiplier": {"rope_scaling": {**YARN, "mscale": 1.5}},
    "yarn with other turns": {"rope_scaling": {**YARN, "beta_fast": 8, "beta_slow": 0.5}},
    "yarn with null turns": {"rope_scaling": {**YARN, "beta_fast": None, "beta_slow": None}},
    "yarn without truncation": {"rope_scaling": {**YARN, "truncate": False, "beta_fast": 5, "beta_slow": 0.7}},
    "yarn without an original length": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    "yarn without a factor": {"rope_scaling": {**YARN, "factor": None}},
    "yarn that scales nothing": {"rope_scaling": {**YARN, "factor": 1.0, "attention_factor": None}},
    "yarn, older name of the type": {"rope_parameters": {"type": "yarn", "factor": 2, "rope_theta": 1e6}},
    "yarn, base inside": {"rope_scaling": {**YARN, "rope_theta": 50.0}, "rope_theta": 900.0},
    "a whole rotary factor": {"partial_rotary_factor": 1.0, "rope_theta": 500.0},
    "causal": {"is_causal": True},
    "tied embeddings": {"tie_word_embeddings": True},
    "a large epsilon": {"rms_norm_eps": 0.1},
    "the default epsilon": {"rms_norm_eps": None},
    "swish": {"hidden_act": "swish"},
    "a list of ends": {"eos_token_id": [1, 2]},
    "full attention": {"layer_types": ["full_attention"] * 2},
    "keys of other models": {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "attn_logit_softcapping": 5.0},
}
REFUSED = {
    "dynamic": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    "longrope": ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}}, "longrope"),
    "an unknown type": ({"rope_parameters": {"rope_type": "other", "rope_theta": 1e4}}, "rope_type"),
    "RoPE by layer type": ({"rope_parameters": {"full_attention": DEFAULT}}, "full_attention"),
    "a null base": ({"rope_theta": "NULL"}, "rope_theta"),
    "a null base inside": ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, "rope_theta"),
    "not causal": ({"is_causal": False}, "is_causal"),
    "null causality": ({"is_causal": "NULL"}, "is_causal"),
    "half of a head rotated": ({"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    "a null epsilon": ({"rms_norm_eps": "NULL"}, "rms_norm_eps"),
    "a window": ({"sliding_window": 8, "use_sliding_window": True}, "sliding_window"),
    "layers with windows": ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    "layers of their own": ({"per_layer_config": {"1": {"intermediate_size": 32}}}, "per_layer_config"),
    "biases": ({"attention_bias": True}, "attention_bias"),
}


def names_read(module):
    """Yields the attributes of configurations that a module reads."""

    def is_config(node):
        return "config" in (getattr(node, "id", None) or getattr(node, "attr", None) or "")

    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Attribute) and is_config(node.value):
            yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            if is_config(node.args[0]) and isinstance(node.args[1], ast.Constant):
                yield node.args[1].value


class Keys(unittest.TestCase):
    def known(self, keys):
        lists = [keys["read"], keys["no_effect"], keys["one_of"], keys.get("one_of_in_llama", []), keys.get("each_one_of", [])]
        return {key for entries in lists for key in entries}

    def test_every_key_of_transformers_is_decided(self):
        found = {name for module in MODULES for name in names_read(module)}
        for config in CONFIGS.values():
            found |= {field.name for field in dataclasses.fields(config)}
            found -= {name for name in found if callable(getattr(config, name, None))}
        self.assertGreater(len(found), 30)
        self.assertEqual(found - self.known(KEYS), set(), f"transformers {transformers.__version__}")

    def test_every_key_of_rope_is_decided(self):
        found = set(modeling_rope_utils.RopeParameters.__annotations__)
        self.assertGreater(len(found), 10)
        self.assertEqual(found - self.known(KEYS["rope"]), set(), f"transformers {transformers.__version__}")


class Configurations(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(directory.cleanup)
        cls.root = Path(directory.name)
        cls.sources = {}
        for name, config in CONFIGS.items():
            tied = {**sizes(), "num_hidden_layers": 2, "head_dim": 16, "tie_word_embeddings": False}
            cls.sources[name] = cls.root / name
            save_random(transformers.AutoModelForCausalLM.from_config, config(**tied), cls.sources[name])

    def directory(self, name, entries):
        """Writes a model that has only the sizes and these entries in its configuration."""
        out = Path(tempfile.mkdtemp(dir=self.root))
        os.link(self.sources[name] / "model.safetensors", out / "model.safetensors")
        fields = {"model_type": name, "rms_norm_eps": 1e-5, "num_hidden_layers": 2, "head_dim": 16, **sizes(), **entries}
        removed = [key for key, value in fields.items() if value is None and "rope" not in key]
        fields = {key: None if value == "NULL" else value for key, value in fields.items() if key not in removed}
        (out / "config.json").write_text(json.dumps(fields))
        return out

    def test_logits_are_those_of_transformers(self):
        compared = 0
        for title, entries in SAME.items():
            for name in CONFIGS if "RoPE" in title or "yarn" in title else ["llama"]:
                with self.subTest(title=title, model=name):
                    directory = self.directory(name, entries)
                    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
                    ids = random_ids(model, 1, 120)
                    with torch.no_grad():
                        theirs = model(ids).logits
                    ours, _ = our_logits(directory, ids, directory)
                    self.assertLess((ours - theirs).abs().max().item(), TOLERANCE * theirs.abs().max().item())
                    compared += 1
        self.assertGreaterEqual(compared, 40)

    def test_what_is_not_computed_is_refused_by_name(self):
        for title, (entries, named) in REFUSED.items():
            with self.subTest(title=title):
                directory = self.directory("qwen3" if "window" in title else "llama", entries)
                (directory / "ids.json").write_text("[[1, 2]]")
                command = [PROGRAMS / "moh-eval", "logits", "--model", directory]
                command += ["--ids", directory / "ids.json", "--out", directory / "logits.safetensors"]
                done = subprocess.run(command, capture_output=True, text=True)
                self.assertNotEqual(done.returncode, 0)
                self.assertIn(named, done.stderr)


if __name__ == "__main__":
    unittest.main()
