"""Runs this repository's programs for the tests, and writes the models and token files that they read."""

import importlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import types
import unittest
from pathlib import Path

# transformers' dynamic modules are kept apart from the user's, and no hub is contacted.
CACHE = tempfile.TemporaryDirectory()
os.environ.update(HF_HOME=CACHE.name, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
import transformers
from safetensors.torch import load_file, save_file

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
# The models are too small to share among threads.
torch.set_num_threads(1)

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAMS = Path(os.environ.get("MOH_PROGRAMS", REPOSITORY / "target" / "debug"))
FIXTURES = Path(os.environ.get("MOH_FIXTURES", REPOSITORY.parent / "shared" / "fixtures"))
QUICKSTART = REPOSITORY / "recipes" / "quickstart"
VOCABULARY = 160
# Keys of a recipe with a single step. Its first moment is the gradient times 1 - beta1.
BETA1 = 0.5
BALANCE = 0.01
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def code(name):
    """Loads a module of the modelling code, which imports its neighbours as in a package."""
    package = sys.modules.setdefault("moh_hf", types.ModuleType("moh_hf"))
    package.__path__ = [str(Path(__file__).parent)]
    return importlib.import_module(f"moh_hf.{name}")


def run(program, *arguments):
    """Runs a program to its end. Returns its output."""
    command = [PROGRAMS / program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout


def convert(source, out, *options):
    run("moh-convert", "--from", source, "--out", out, "--no-verify", *options)
    return out


def load(directory, attention="sdpa", dtype=torch.float32, **options):
    """Loads the language model in a directory by its auto class."""
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(
        directory, trust_remote_code=True, dtype=dtype, attn_implementation=attention, **options
    )


def random_ids(model, batch, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (batch, length), generator=generator)


def our_logits(directory, ids, scratch):
    """Returns the logits of `ids` by moh-eval, and the selected heads of each layer that routes."""
    (scratch / "ids.json").write_text(json.dumps(ids.tolist()))
    out = scratch / "logits.safetensors"
    files = ("--ids", scratch / "ids.json", "--out", out, "--force")
    run("moh-eval", "logits", "--model", directory, *files, "--dtype", "f32")
    tensors = load_file(out)
    if "routed_mask" in tensors:
        masks = list(tensors["routed_mask"])
    else:
        layers = sorted(int(name.split(".")[1]) for name in tensors if name != "logits")
        masks = [tensors[f"routed_mask.{layer}"] for layer in layers]
    return tensors["logits"], masks


def write_tokens(prefix, ids):
    """Writes a token file with a single document. docs/formats.md has its format."""
    prefix.with_suffix(".bin").write_bytes(struct.pack(f"<{len(ids)}H", *ids))
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1, 2)
    index = struct.pack("<iqqq", len(ids), 0, 0, 1)
    prefix.with_suffix(".idx").write_bytes(header + index)


def train_one_step(directory, windows, scratch):
    """Runs a step of moh-train on windows [batch, length + 1]. Each window starts with the last token of the
    previous window. Returns the step's metrics, and its gradients by name."""
    batch, length = windows.shape[0], windows.shape[1] - 1
    tokens = torch.cat([windows[:, :-1].flatten(), windows[-1, -1:]])
    write_tokens(scratch / "step", tokens.tolist())
    config = json.loads((directory / "config.json").read_text())
    shared = next(key for key in ("shared_heads", "shared_head_ids") if config.get(f"moh_{key}") is not None)
    heads = f"{shared} = {config[f'moh_{shared}']}, routed_top_k = {config['moh_routed_top_k']}"
    recipe = f"""
        [run]
        dir = "{scratch / 'run'}"
        seed = 1
        device = "cpu"
        dtype = "f32"
        [model]
        from = "{directory}"
        [data]
        sequence_length = {length}
        order = "sequential"
        sources = [{{ path = "{scratch / 'step'}" }}]
        [[stage]]
        name = "moh"
        attention = "moh"
        moh = {{ {heads}, balance_loss_weight = {BALANCE} }}
        tokens = {batch * length}
        batch_tokens = {batch * length}
        micro_batch = {batch}
        learning_rate = {{ max = 1e-6, min = 1e-6, warmup_steps = 1 }}
        optimizer = {{ beta1 = {BETA1}, clip_norm = 1e9 }}
        [log]
        tensorboard = false
        """
    (scratch / "step.toml").write_text(recipe)
    shutil.rmtree(scratch / "run", ignore_errors=True)
    run("moh-train", "--recipe", scratch / "step.toml")
    metrics = json.loads((scratch / "run" / "metrics.jsonl").read_text())
    moments = load_file(scratch / "run" / "checkpoints" / "step-1" / "first_moment.safetensors")
    return metrics, {name: moment / (1 - BETA1) for name, moment in moments.items()}


def random_llama(out):
    """Writes an untied Llama with Llama 3's RoPE and a head width that is independent of the other sizes."""
    config = transformers.LlamaConfig(
        **sizes(), num_hidden_layers=3, head_dim=16, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=False
    )
    return save_random(transformers.LlamaForCausalLM, config, out)


def random_qwen3(out):
    config = transformers.Qwen3Config(**sizes(), num_hidden_layers=2, head_dim=32, tie_word_embeddings=True)
    return save_random(transformers.Qwen3ForCausalLM, config, out)


def sizes():
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.15,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def save_random(model_class, config, out):
    torch.manual_seed(1)
    model = model_class(config)
    # With norms of 1, a missing norm would not be detected.
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(out)
    return out


class Models(unittest.TestCase):
    """Tests with converted models, which are created once for a class."""

    @classmethod
    def setUpClass(cls):
        directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(directory.cleanup)
        cls.root = Path(directory.name)

    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.scratch = Path(directory.name)

    @classmethod
    def model(cls, name):
        """Returns the directory of the model `name`, created on first use."""
        directory = cls.root / name
        if not directory.exists():
            cls.make(name, directory)
        return directory

    @classmethod
    def make(cls, name, out):
        uniform = ["--shared-heads", 4, "--routed-top-k", 2]
        if name == "tied":
            convert(QUICKSTART, out, "--dtype", "f32", *uniform)
        elif name == "by-layer":
            counts = ["--shared-heads", "8,4,4,4,2,2", "--routed-top-k", "0,2,2,0,3,6"]
            convert(QUICKSTART, out, "--dtype", "f32", *counts)
        elif name == "untied":
            convert(random_llama(cls.root / "llama"), out, "--shared-heads", 3, "--routed-top-k", 3)
        elif name == "sets":
            convert(random_llama(cls.root / "llama-of-sets"), out, "--shared", "0,5;2;1,2,7", "--routed-top-k", 3)
        elif name == "qwen3":
            convert(random_qwen3(cls.root / "dense-qwen3"), out, "--shared-heads", 2, "--routed-top-k", 3)
        elif name == "group":
            source = random_llama(cls.root / "llama-of-groups")
            convert(source, out, "--router", name, "--shared-heads", 0, "--routed-top-k", 4)
        elif name == "static":
            convert(random_llama(cls.root / "llama-of-few"), out, "--router", name, "--active", 0.75)
        elif name in ("linear", "one-stage", "two-stage"):
            cls.make_learned(name, out)
        else:
            raise ValueError(name)

    @classmethod
    def make_learned(cls, name, out):
        """Writes a model with random router matrices, which conversions would create as zeros or not at all."""
        convert(random_qwen3(cls.root / f"qwen3-{name}"), out, "--router", "two-stage", "--active", 0.5)
        config = json.loads((out / "config.json").read_text())
        weights = load_file(out / "model.safetensors")
        generator = torch.Generator().manual_seed(3)
        for tensor in sorted(key for key in weights if "router" in key):
            if name != "two-stage" and "stages" in tensor:
                del weights[tensor]
            else:
                weights[tensor] = torch.randn(weights[tensor].shape, generator=generator) * 0.2
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
        (out / "config.json").write_text(json.dumps({**config, "moh_router": name}, indent=2))


NAMES = ["tied", "by-layer", "untied", "sets", "qwen3"]
# Models with the other routers, which compute forward and backward passes differently.
ROUTERS = ["group", "static", "linear", "one-stage", "two-stage"]
