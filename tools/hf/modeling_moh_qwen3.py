"""A Qwen3 with Mixture-of-Head attention. See `modeling_moh_llama`.

The router reads the projection's output, before the norm of queries: normed queries have nearly equal
norms, which do not distinguish heads.
"""

from collections.abc import Callable
from functools import wraps

from .configuration_moh_qwen3 import MohQwen3Config
from .modeling_moh_llama import (
    MohCausalLM,
    MohRouter,
    check_keywords,
    forward_body,
    router_of,
    take_cache,
    update_cache,
)

from transformers.generation import GenerationMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3Model,
    Qwen3PreTrainedModel,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.utils.output_capturing import OutputRecorder


class MohQwen3Attention(Qwen3Attention):
    """A Qwen3's attention with the outputs of its heads multiplied by the router's weights."""

    def __init__(self, config: MohQwen3Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.router = router_of(config, layer_idx)

    # Servers read this source, as the source of `MohLlamaAttention`.
    def forward(
        self,
        hidden_states,
        position_embeddings=None,
        attention_mask=None,
        past_key_values=None,
        **kwargs,
    ):
        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        cache = take_cache(past_key_values, kwargs)
        check_keywords(attention_interface, cache, kwargs)

        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)

        queries = self.q_proj(hidden_states).view(hidden_shape)
        keys = self.k_proj(hidden_states).view(hidden_shape)
        values = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        weights = None if self.router is None else self.router(queries, hidden_states)[0]

        cos, sin = position_embeddings
        queries, keys = self.q_norm(queries).transpose(1, 2), self.k_norm(keys).transpose(1, 2)
        queries, keys = apply_rotary_pos_emb(queries, keys, cos, sin)
        if cache is not None:
            keys, values = update_cache(cache, keys, values, self.layer_idx, kwargs)

        attn_output, attn_weights = attention_interface(
            self,
            queries,
            keys,
            values,
            attention_mask,
            dropout=0.0 if not self.training else self.attention_dropout,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        if weights is not None:
            attn_output = attn_output.reshape(hidden_shape)
            attn_output = attn_output * weights.unsqueeze(-1).to(attn_output.dtype)
        attn_output = attn_output.reshape(*input_shape, -1).contiguous()
        return self.o_proj(attn_output), attn_weights


class MohQwen3PreTrainedModel(Qwen3PreTrainedModel):
    config_class = MohQwen3Config
    config: MohQwen3Config
    _can_record_outputs = {
        "hidden_states": Qwen3DecoderLayer,
        "attentions": MohQwen3Attention,
        "router_logits": OutputRecorder(MohRouter, index=1),
        "selected_heads": OutputRecorder(MohRouter, index=2),
    }


class MohQwen3Model(MohQwen3PreTrainedModel, Qwen3Model):
    """A Qwen3's body with Mixture-of-Head attention."""

    def __init__(self, config: MohQwen3Config):
        # Keys may have been set since the configuration was read.
        config.check_heads()
        super().__init__(config)
        for layer_idx, layer in enumerate(self.layers):
            layer.self_attn = MohQwen3Attention(config, layer_idx)
        self.post_init()

    @wraps(Qwen3Model.forward)
    def forward(self, *args, **kwargs):
        return forward_body(super().forward, *args, **kwargs)


class MohQwen3ForCausalLM(MohCausalLM, MohQwen3PreTrainedModel, GenerationMixin):
    """A Qwen3 with Mixture-of-Head attention and a language-model head."""

    model_class = MohQwen3Model


__all__ = ["MohQwen3ForCausalLM", "MohQwen3Model", "MohQwen3PreTrainedModel"]
