"""The configuration of a Qwen3 with Mixture-of-Head attention. See `configuration_moh_llama`."""

from .configuration_moh_llama import MohHeads

from transformers import Qwen3Config


class MohQwen3Config(MohHeads, Qwen3Config):
    """A Qwen3's configuration with the heads that a token computes. See `MohLlamaConfig`."""

    model_type = "moh_qwen3"

    moh_router: str = "query-norm"
    moh_shared_heads: int | list[int] | None = 16
    moh_shared_head_ids: list[list[int]] | None = None
    moh_routed_top_k: int | list[int] = 8
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.01


__all__ = ["MohQwen3Config"]
