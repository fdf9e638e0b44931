"""A Llama with Mixture-of-Head attention (MoH, arXiv 2410.11842), for transformers.

The model is a transformers Llama with three changes:

1. In each attention layer, a router selects the heads of each token, by the norms of their queries or by its
own    matrices. Without a router, all tokens have the same heads. 2. The outputs of heads that a token has not
selected are multiplied by 0. All other outputs are multiplied by 1, or    by the weights of the router
"one-stage" or "two-stage". 3. A loss that balances the use of the heads can be added to the model's loss.

The names and shapes of all tensors except the routers' matrices are a Llama's.

All heads are computed, so this is no faster than the dense model.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps

from .configuration_moh_llama import WEIGHING_ROUTERS, MohLlamaConfig, other_release

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaModel,
    LlamaPreTrainedModel,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.output_capturing import OutputRecorder

# The names of the key/value cache as an argument of transformers' modules and in their outputs: from release 5.24
# on, and before it.
CACHE_NAMES = ("cache", "past_key_values")
CACHE = next((name for name in CACHE_NAMES if name in inspect.signature(LlamaModel.forward).parameters), None)
if CACHE is None:
    raise ImportError(other_release("the key/value cache of a Llama has a name that this code does not know"))

# Keywords of calls of the model that attention passes on, or that do not concern attention.
KNOWN_KEYWORDS = frozenset(
    {
        *TransformersKwargs.__annotations__,
        *FlashAttentionKwargs.__annotations__,
        # Keywords of tokenizers, of packing collators and of the loss function under sequence parallelism.
        *("token_type_ids", "seq_idx", "shift_labels"),
        # The pages of transformers' `generate_batch`.
        *("cache", "read_index", "write_index", "block_table", "max_seqlen_q", "max_seqlen_k"),
        *("logits_indices", "logits_processor_args"),
        # The layers of vLLM and SGLang, which hold their caches.
        *("attention_instances", "forward_batch"),
    }
)


class MohRouter(nn.Module):
    """Selects the heads of each token by the norms of their queries.

    The router "query-norm" ranks the routed heads of a token. The router "group" ranks whole groups of heads
    that read one key/value head, by the sum of their squares. Sums of squares are in f64, and a tie selects the
    lower head, so that every program selects the same heads. The gates are softmax(norm / std), with the
    unbiased standard deviation over the routed heads. If all norms are equal, the gates are uniform, without a
    gradient. The gates of "group" are the softmax of the groups' root mean squares, the same for each head of a
    group.
    """

    def __init__(self, config, layer_idx):
        super().__init__()
        self.num_heads = config.num_attention_heads
        shared_heads, self.top_k = config.layer_heads(layer_idx)
        self.routed_heads = [head for head in range(self.num_heads) if head not in shared_heads]
        self.by_groups = config.moh_router == "group"
        # The heads that are selected together.
        self.unit = self.num_heads // config.num_key_value_heads if self.by_groups else 1

    def forward(self, queries, hidden_states):
        """Routes queries of shape [..., heads, head_dim], as the projection returns them.

        `hidden_states` [..., hidden_size] is the block's normed input, which a learned router reads. Returns
        the weights of all heads [..., heads], and for the routed heads [..., routed] their scores and whether
        they were selected. The gates are the softmax of the scores. A weight is 1 or 0. The weight of a
        selected head has its gate's gradient.
        """
        check_heads(queries, self.num_heads)
        device = queries.device
        routed = queries[..., self.routed_heads, :]
        if device.type == "mps":
            # Apple's GPUs have no f64.
            routed = routed.cpu()
        with torch.no_grad():
            selected = self.select(routed.double().square().sum(-1))
        scores = self.scores(routed)
        gates = scores.softmax(-1).float()
        # In this order the forward value is exactly 1.
        straight_through = 1 + (gates - gates.detach())
        weights = torch.where(selected, straight_through, 0)
        all_weights = weights.new_ones(*weights.shape[:-1], self.num_heads)
        all_weights[..., self.routed_heads] = weights
        return all_weights.to(device), scores.float().to(device), selected.to(device)

    def select(self, squares):
        """Returns whether each routed head is selected, by their squares [..., routed]."""
        # The heads of a group are adjacent.
        units = squares.unflatten(-1, (-1, self.unit)).sum(-1)
        best = units.sort(dim=-1, descending=True, stable=True).indices[..., : self.top_k // self.unit]
        selected = torch.zeros_like(units, dtype=torch.bool).scatter(-1, best, True)
        return selected.repeat_interleave(self.unit, -1)

    def scores(self, queries):
        """Returns the scores of routed queries [..., routed, head_dim]."""
        if self.by_groups:
            of_groups = queries.unflatten(-2, (-1, self.unit)).flatten(-2)
            norms = torch.linalg.vector_norm(of_groups, dim=-1, dtype=torch.float64) / self.unit**0.5
            return norms.repeat_interleave(self.unit, -1)
        return normalized_norms(queries)


class MohLogitRouter(MohRouter):
    """Selects the heads of each token by logits, linear functions of the block's normed input.

    Row i of `weight` belongs to head i. The gates are the softmax of the logits of the routed heads. With the
    router "linear" a weight is 1 or 0, as by norms. "two-stage" weighs the heads (equations 5 and 6, normalised
    as in the authors' code):

    1. A selected head has the number of selected heads times its share of the selected gates. 2. A shared head
    has the number of shared heads times the softmax of their logits. 3. Both are multiplied by twice the
    softmax of two more logits.

    "one-stage" omits step 3.
    """

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.shared_heads, _ = config.layer_heads(layer_idx)
        self.weight = nn.Parameter(torch.zeros(config.num_attention_heads, config.hidden_size))
        self.weighs = config.moh_router in WEIGHING_ROUTERS
        self.stages = nn.Linear(config.hidden_size, 2, bias=False) if config.moh_router == "two-stage" else None

    def forward(self, queries, hidden_states):
        check_heads(queries, self.num_heads)
        logits = nn.functional.linear(hidden_states, self.weight).float()
        scores = logits[..., self.routed_heads]
        best = scores.detach().sort(dim=-1, descending=True, stable=True).indices[..., : self.top_k]
        selected = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
        gates = scores.softmax(-1)
        weights = scores.new_ones(*scores.shape[:-1], self.num_heads)
        if not self.weighs:
            weights[..., self.routed_heads] = torch.where(selected, 1 + (gates - gates.detach()), 0)
            return weights, scores, selected
        kept = torch.where(selected, gates, 0)
        routed = self.top_k * kept / kept.sum(-1, keepdim=True)
        if self.shared_heads:
            shared = len(self.shared_heads) * logits[..., self.shared_heads].softmax(-1)
            if self.stages is not None:
                stages = 2 * self.stages(hidden_states).float().softmax(-1)
                shared, routed = stages[..., :1] * shared, stages[..., 1:] * routed
            weights[..., self.shared_heads] = shared
        weights[..., self.routed_heads] = routed
        return weights, scores, selected


class SharedHeads(nn.Module):
    """The weights of a layer without a router: 1 for shared heads, 0 for other heads."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.shared_heads, _ = config.layer_heads(layer_idx)

    def forward(self, queries, hidden_states):
        """Returns the weights [heads] of all tokens, as the first element of a tuple."""
        check_heads(queries, self.num_heads)
        weights = torch.zeros(self.num_heads, dtype=queries.dtype, device=queries.device)
        weights[self.shared_heads] = 1
        return (weights,)


def check_heads(queries, num_heads):
    """Rejects queries that lack some of the heads."""
    if queries.shape[-2] != num_heads:
        raise NotImplementedError(
            f"{queries.shape[-2]} of {num_heads} heads are on this device: Mixture-of-Head ranks all "
            "heads of a token together, use a tensor-parallel size of 1"
        )


def router_of(config, layer_idx):
    """Returns the router of a layer. None if the layer is dense, with all heads shared."""
    shared_heads, _ = config.layer_heads(layer_idx)
    if len(shared_heads) == config.num_attention_heads:
        return None
    routers = {"static": SharedHeads, **dict.fromkeys(("linear", *WEIGHING_ROUTERS), MohLogitRouter)}
    return routers.get(config.moh_router, MohRouter)(config, layer_idx)


def normalized_norms(queries):
    """Returns the norms of queries [..., heads, head_dim] divided by their standard deviation over the heads, and 0
    where all norms are equal."""
    norms = torch.linalg.vector_norm(queries, dim=-1, dtype=torch.float64)
    # The mean of equal norms may differ from them by a rounding, so equality is tested directly.
    equal = norms.amax(-1, keepdim=True) == norms.amin(-1, keepdim=True)
    # A single norm has no deviation, and is equal to itself.
    std = norms.std(-1, keepdim=True, correction=min(1, norms.shape[-1] - 1)).masked_fill(equal, 1)
    return (norms / std).masked_fill(equal, 0)


def balance_loss(router_logits, selected_heads, attention_mask=None, weighs=False):
    """Returns the mean over layers of sum_i f_i P_i: f_i is the share of tokens that select head i, P_i its mean
    gate. If the router weighs heads, multiplies it by the number of routed heads. Tokens with 0 in
    `attention_mask` [batch, length] do not count. None if no layer routes."""
    losses = []
    for scores, selected in zip(router_logits or (), selected_heads or ()):
        gates = scores.softmax(-1)
        if attention_mask is None:
            loads, means = selected.float().mean((0, 1)), gates.mean((0, 1))
        else:
            counted = token_mask(attention_mask, gates)
            tokens = counted.sum().clamp(min=1)
            loads = (selected * counted).sum((0, 1)) / tokens
            means = (gates * counted).sum((0, 1)) / tokens
        losses.append((loads * means).sum() * (gates.shape[-1] if weighs else 1))
    if not losses:
        return None
    return torch.stack([loss.to(losses[0].device) for loss in losses]).mean()


def is_token_mask(attention_mask):
    return isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2


def token_mask(attention_mask, gates):
    """Returns the mask of the tokens of this pass as numbers [batch, length, 1]."""
    if not is_token_mask(attention_mask):
        raise ValueError(
            "output_router_logits needs an attention_mask of shape [batch, length], to leave padding out of the "
            "balance loss: give one, or none if no token is padding"
        )
    # The mask also has the tokens of the cache, which come first.
    return attention_mask[:, -gates.shape[1] :, None].to(gates.device, gates.dtype)


def take_cache(past_key_values, keywords):
    """Returns the key/value cache of a call by either name, and removes it from the keywords."""
    cache = keywords.get("cache")
    # Before 5.24, `cache` is also the cache of `generate_batch`, which the attention function updates.
    if CACHE != "cache" and not isinstance(cache, Cache | None):
        return past_key_values
    keywords.pop("cache", None)
    if None in (cache, past_key_values):
        return past_key_values if cache is None else cache
    if cache is not past_key_values:
        raise ValueError("`cache` and `past_key_values` are two names of one argument: give one of them")
    return cache


def check_keywords(attention_function, cache, keywords):
    """Rejects a call of attention that means something else in another release of transformers.

    A keyword that is neither known nor an argument of the attention function would be lost. It may be
    the cache, a mask or positions, without which the result is wrong. Numbers and strings are none of these.
    """
    for name, value in keywords.items():
        if value is None or isinstance(value, (bool, int, float, str)):
            continue
        if name in KNOWN_KEYWORDS and not isinstance(value, Cache):
            continue
        if name not in inspect.signature(attention_function).parameters:
            raise TypeError(other_release(f"attention has no argument `{name}`, a {type(value).__name__}"))
    if keywords.get("use_cache") and cache is None:
        raise RuntimeError(other_release("a layer is to use the key/value cache, and its attention was given none"))


def update_cache(cache, keys, values, layer_idx, keywords):
    """Adds keys and values to the cache. Returns all keys and values of the layer."""
    if CACHE == "cache":
        # The pages of `generate_batch` read and change the keywords of the attention function.
        return cache.update(keys, values, layer_idx, kwargs=keywords)
    return cache.update(keys, values, layer_idx)


def forward_body(forward, *args, past_key_values=None, **keywords):
    """Runs the forward pass `forward` of a body. It accepts the cache by either name, and must have written to it."""
    cache = take_cache(past_key_values, keywords)
    if cache is not None:
        keywords[CACHE] = cache
    outputs = forward(*args, **keywords)
    for value in outputs if isinstance(outputs, tuple) else outputs.values():
        if isinstance(value, Cache) and not value.is_initialized:
            raise RuntimeError(other_release("no layer has written to the key/value cache"))
    return outputs


class MohLlamaAttention(LlamaAttention):
    """A Llama's attention with the outputs of its heads multiplied by the router's weights."""

    def __init__(self, config: MohLlamaConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.router = router_of(config, layer_idx)

    # The servers' transformers backends read this source. The projections are called with the same
    # expression, and the attention function once, by a local name.
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
        keys = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        values = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        weights = None if self.router is None else self.router(queries, hidden_states)[0]

        cos, sin = position_embeddings
        queries, keys = apply_rotary_pos_emb(queries.transpose(1, 2), keys, cos, sin)
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
            **kwargs,
        )
        if weights is not None:
            attn_output = attn_output.reshape(hidden_shape)
            attn_output = attn_output * weights.unsqueeze(-1).to(attn_output.dtype)
        attn_output = attn_output.reshape(*input_shape, -1).contiguous()
        return self.o_proj(attn_output), attn_weights


class MohLlamaPreTrainedModel(LlamaPreTrainedModel):
    config_class = MohLlamaConfig
    config: MohLlamaConfig
    _can_record_outputs = {
        "hidden_states": LlamaDecoderLayer,
        "attentions": MohLlamaAttention,
        "router_logits": OutputRecorder(MohRouter, index=1),
        "selected_heads": OutputRecorder(MohRouter, index=2),
    }


class MohLlamaModel(MohLlamaPreTrainedModel, LlamaModel):
    """A Llama's body with Mixture-of-Head attention."""

    def __init__(self, config: MohLlamaConfig):
        # Keys may have been set since the configuration was read.
        config.check_heads()
        super().__init__(config)
        for layer_idx, layer in enumerate(self.layers):
            layer.self_attn = MohLlamaAttention(config, layer_idx)
        self.post_init()

    @wraps(LlamaModel.forward)
    def forward(self, *args, **kwargs):
        return forward_body(super().forward, *args, **kwargs)


@dataclass
class MohCausalLMOutputWithPast(MoeCausalLMOutputWithPast):
    """A language model's outputs.

    With `output_router_logits`, `aux_loss` is the balance loss. `router_logits` has the scores of each
    layer that routes, [batch, length, routed heads]. The gates are their softmax. `selected_heads` says
    whether the token selected the head. The routed heads are the heads that are not shared, in ascending order.
    """

    selected_heads: tuple[torch.Tensor] | None = None


class MohCausalLM:
    """The language model of each architecture: a body `model_class` and a head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    model_class = None

    def __init__(self, config):
        super().__init__(config)
        self.model = self.model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        output_router_logits=None,
        logits_to_keep=0,
        **kwargs,
    ):
        """Runs a Llama's forward pass, with the key/value cache as `past_key_values` or `cache`. With
        `output_router_logits`, the balance loss times `router_aux_loss_coef` is part of the loss. See
        `MohCausalLMOutputWithPast`."""
        cache = take_cache(past_key_values, kwargs)
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_router_logits=output_router_logits,
            output_selected_heads=output_router_logits,
            **{CACHE: cache},
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept, :])

        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        router_logits = outputs.get("router_logits")
        selected_heads = outputs.get("selected_heads")
        weighs = self.config.moh_router in WEIGHING_ROUTERS
        # In generation with a static cache the mask is for attention, and no loss is needed.
        wanted = labels is not None or attention_mask is None or is_token_mask(attention_mask)
        aux_loss = balance_loss(router_logits, selected_heads, attention_mask, weighs) if wanted else None
        if aux_loss is not None and loss is not None:
            self._check_recorded(router_logits)
            share = share_of_step(labels, kwargs.get("num_items_in_batch"))
            loss = loss + self.config.router_aux_loss_coef * share * aux_loss.to(loss.device)

        return MohCausalLMOutputWithPast(
            loss=loss,
            aux_loss=aux_loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=router_logits,
            selected_heads=selected_heads,
            **{CACHE: outputs.get(CACHE)},
        )

    def _check_recorded(self, router_logits):
        """Refuses to train with scores that have lost their gradient."""
        trains = torch.is_grad_enabled() and self.training
        queries = (layer.self_attn.q_proj for layer in self.model.layers if layer.self_attn.router is not None)
        if trains and any(p.requires_grad for q in queries for p in q.parameters()):
            if not any(scores.requires_grad for scores in router_logits):
                raise ValueError(
                    "the balance loss has no gradient with reentrant checkpointing: enable checkpointing with "
                    '{"use_reentrant": False}'
                )


def share_of_step(labels, num_items_in_batch):
    """Returns this micro-batch's share of a step's targets, if the trainer passes the number of targets in the
    step. The balance losses of its micro-batches then add up to their mean, as the cross-entropies do."""
    if num_items_in_batch is None:
        return 1
    targets = (labels[..., 1:] != -100).sum()
    return targets / torch.as_tensor(num_items_in_batch, device=targets.device)


class MohLlamaForCausalLM(MohCausalLM, MohLlamaPreTrainedModel, GenerationMixin):
    """A Llama with Mixture-of-Head attention and a language-model head."""

    model_class = MohLlamaModel


__all__ = ["MohLlamaForCausalLM", "MohLlamaModel", "MohLlamaPreTrainedModel"]
