"""The models that both sides train, and their target ratios."""

import json
from dataclasses import dataclass
from pathlib import Path

CONTEXT = 2048


@dataclass(frozen=True)
class Shape:
    name: str
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    batch: int
    length: int
    wanted: dict  # dtype -> tokens/s over theirs

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def config(self) -> dict:
        """Returns config.json for both sides: a Llama with a tied head and no end token."""
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }

    def write_config(self, folder: Path) -> Path:
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(self.config(), indent=1))
        return path


SHAPES = {
    shape.name: shape
    for shape in [
        Shape("a", 64, 172, 5, 8, 4, 512, 8, 256, {"f32": 3.0, "bf16": 5.0}),
        Shape("b", 288, 768, 6, 6, 6, 32000, 4, 256, {"f32": 1.15, "bf16": 1.5}),
        Shape("c", 512, 1408, 8, 8, 4, 4096, 2, 512, {"f32": 1.15, "bf16": 1.5}),
    ]
}
