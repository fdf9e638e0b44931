#!/usr/bin/env python3
"""Compares what a calibration fits to the first layer of a model with ridge regressions computed here in f64.

    cargo build --bin moh-convert
    peer-venv/bin/python tools/peer/calibration.py --programs target/debug

converts the quickstart's model on its own text. The first layer reads the dense model's stream in every case, so that plain
PyTorch can tell what its output projection and the matrix of its router must be (docs/design.md, "Conversion by
measurement" and "Learned routers"): with the ridge of five that leaves the least error of the ninth pass, without the
fifth pass, which is held out; and logits that spread by 0.3 where they weigh heads and by 1 where they do not.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from two_stage import QUICKSTART, norm, rotate, run

TEXT = "voyage-valid"
FIRST_TOKEN = 32
LENGTH, RIDGE, RIDGES, TOLERANCE = 256, 1e-3, (10, 1, 0.1, 0.01, 0.001), 1e-4
SPREADS = {"two-stage": 0.3, "one-stage": 0.3, "linear": 1.0}


def first_layer(ids):
    """Returns, for the first layer and windows of ids: its normed input, its heads' outputs, `[tokens, heads,
    size]`, the output projection, and the factors of errors, `[tokens, 1]`. A factor is RMSNorm's factor of the
    stream before or after attention, whichever is less. For the first token of a window it is multiplied by the
    root of FIRST_TOKEN."""
    config = json.loads((QUICKSTART / "config.json").read_text())
    tensors = {name: tensor.double() for name, tensor in load_file(QUICKSTART / "model.safetensors").items()}
    of = lambda name: tensors[f"model.layers.0.{name}.weight"]  # noqa: E731
    heads, groups, size = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    inputs, outputs, streams = [], [], []
    for window in ids:
        streams.append(tensors["model.embed_tokens.weight"][window])
        x = norm(tensors["model.embed_tokens.weight"][window], of("input_layernorm"), config)
        query = rotate((x @ of("self_attn.q_proj").T).view(LENGTH, heads, size), config)
        key = rotate((x @ of("self_attn.k_proj").T).view(LENGTH, groups, size), config)
        value = (x @ of("self_attn.v_proj").T).view(LENGTH, groups, size)
        key, value = (part.repeat_interleave(heads // groups, 1) for part in (key, value))
        scores = torch.einsum("thd,shd->hts", query, key) / size**0.5
        inputs.append(x)
        outputs.append(torch.einsum("hts,shd->thd", scores.masked_fill(later, -torch.inf).softmax(-1), value))
    outputs, old = torch.cat(outputs), of("self_attn.o_proj")
    before = torch.cat(streams)
    squares = torch.stack([before, before + outputs.flatten(1) @ old.T]).pow(2).mean(-1, keepdim=True).amax(0)
    scales = (squares + config["rms_norm_eps"]).rsqrt()
    scales[::LENGTH] *= FIRST_TOKEN**0.5
    return torch.cat(inputs), outputs, old, scales


def parts(windows):
    """Returns the tokens that fits read, that choose their ridge, and that are held out, of nine passes or more."""
    batch = min(4096 // LENGTH, windows // 9)
    place = torch.arange(windows // batch * batch).div(batch, rounding_mode="floor") % 9
    place = place.repeat_interleave(LENGTH)
    return [selected.nonzero().flatten() for selected in ((place != 4) & (place != 8), place == 8, place == 4)]


def ridge(features, targets, factor=RIDGE):
    """Returns W with the least |targets - features W^T|^2 + lambda |W|^2."""
    gram = features.T @ features
    gram.diagonal().add_(factor * gram.diagonal().mean())
    return torch.linalg.solve(gram, features.T @ targets).T


def best_ridge(features, targets, fitted, others):
    """Returns the ridge with the least error of its fit on other tokens. Tries ridges from the largest, until the
    error grows."""
    errors = []
    for factor in RIDGES:
        fit = ridge(features[fitted], targets[fitted], factor)
        errors.append((targets[others] - features[others] @ fit.T).pow(2).sum().item())
        if len(errors) > 1 and errors[-1] >= errors[-2]:
            return RIDGES[len(errors) - 2]
    return RIDGES[-1]


def calibrated(options, ids, folder, *words):
    """Returns the first layer's tensors of a conversion."""
    out = folder / "-".join(words).replace("--", "")
    windows = ("--calibration", QUICKSTART / TEXT, "--calibration-tokens", ids.numel(), "--calibration-length", LENGTH)
    convert = (options.programs / "moh-convert", "--from", QUICKSTART, "--dtype", "f32", "--no-verify", "--out", out)
    run(*convert, *windows, "--shared", "first", *words)
    tensors = load_file(out / "model.safetensors")
    return lambda name: tensors[f"model.layers.0.self_attn.{name}.weight"].double()


def compare(what, ours, theirs):
    difference = ((ours - theirs).norm() / theirs.norm()).item()
    fine = difference < TOLERANCE
    print(f"{what}: relative difference {difference:.1e}{'' if fine else ': too much'}")
    return fine


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, required=True)
    options = parser.parse_args()
    options.programs = options.programs.resolve()
    text = torch.frombuffer(bytearray((QUICKSTART / f"{TEXT}.bin").read_bytes()), dtype=torch.uint16).long()
    ids = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    x, outputs, old, scales = first_layer(ids)
    heads, size = outputs.shape[1:]
    fitted, others, _ = parts(len(ids))
    both = torch.cat((fitted, others))
    fine = []
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        # Fixed heads: the heads after the sixth are left out.
        kept = outputs.clone()
        kept[:, 6:] = 0
        kept = kept.flatten(1) * scales
        left = (outputs.flatten(1) * scales - kept) @ old.T
        found = calibrated(options, ids, folder, "--router", "static", "--shared-heads", "6", "--routed-top-k", "0")
        factor = best_ridge(kept, left, fitted, others)
        print(f"ridge {factor}")
        fine.append(compare("output projection", found("o_proj") - old, ridge(kept[both], left[both], factor)))
        contributions = torch.stack(
            [(outputs[:, head] @ old[:, head * size:(head + 1) * size].T).norm(dim=-1) for head in range(heads)], -1
        )
        centred = contributions - contributions.mean(-1, keepdim=True)
        x, centred = x[both], centred[both]
        spread = (centred.pow(2).sum() / (len(x) * (heads - 1))).sqrt()
        for router, wanted in SPREADS.items():
            found = calibrated(options, ids, folder, "--router", router, "--shared-heads", "4", "--routed-top-k", "2")
            fine.append(compare(f"router {router}", found("router"), wanted / spread * ridge(x, centred)))
    sys.exit(0 if all(fine) else 1)


if __name__ == "__main__":
    main()
