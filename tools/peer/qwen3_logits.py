"""Writes the logits of small random Qwen3 models, computed by Hugging Face's transformers.

    peer-venv/bin/python tools/peer/qwen3_logits.py > workspace/model/tests/model/qwen3_logits.json

The weights are from `moh_model::initial::initialize`, with norms moved to be around 1, so that the file
contains only configurations, token ids and logits.
"""

import json
import math

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

SEED, DEVIATION, MASK = 3, 0.3, (1 << 64) - 1
IDS = [(i * 11 + 5) % 37 for i in range(13)]


class SplitMix:
    """Uniform 64-bit numbers (Steele et al. 2014)."""

    def __init__(self, state):
        self.state = state

    def next(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    def unit(self):
        return ((self.next() >> 11) + 1) / (1 << 53)


def draw(name, count):
    """Returns normal numbers that depend on the seed and the name, by Box and Muller's transform."""
    key = SEED ^ 0x6D6F685F696E6974
    for byte in name.encode():
        key = SplitMix(key ^ byte).next()
    uniform, numbers = SplitMix(key), []
    while len(numbers) < count:
        radius = DEVIATION * math.sqrt(-2.0 * math.log(uniform.unit()))
        angle = math.tau * uniform.unit()
        numbers += [radius * math.cos(angle), radius * math.sin(angle)]
    return numbers[:count]


def logits(fields):
    """Returns the logits of every token."""
    model = Qwen3ForCausalLM(Qwen3Config(**fields, attn_implementation="eager")).float().eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            values = torch.tensor(draw(name, tensor.numel()), dtype=torch.float64)
            tensor.copy_((values + (tensor.dim() == 1)).float().reshape(tensor.shape))
        return model(torch.tensor([IDS])).logits[0].tolist()


def case(tied, head_dim):
    """Returns a configuration with its logits. head_dim is omitted if it is None."""
    fields = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu",
        "vocab_size": 37, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": tied,
        "attention_bias": False, "use_sliding_window": False,
    }
    if head_dim is not None:
        fields["head_dim"] = head_dim
    rows = [[round(x, 6) for x in row] for row in logits(fields)]
    return {"config": fields, "ids": IDS, "logits": rows}


def main():
    cases = [case(tied=True, head_dim=10), case(tied=False, head_dim=None)]
    print("[" + ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in cases) + "]")


if __name__ == "__main__":
    main()
