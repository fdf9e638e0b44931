"""The configuration of a Llama with Mixture-of-Head attention (MoH, arXiv 2410.11842).

In a layer, the first `moh_shared_heads` heads, or the heads of its list in
`moh_shared_head_ids`, are active for every token. Each token selects `moh_routed_top_k` of the other
heads. Both counts are integers, or lists with one integer for each layer. A layer with only shared heads
is dense. All other fields are a Llama's.
"""

import transformers

# The first release with everything that the model's code uses, and the newest release with which it was tested.
MINIMUM_VERSION = (5, 5)
TESTED_VERSION = (5, 24)

if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < MINIMUM_VERSION:
    raise ImportError(
        f"Mixture-of-Head models need transformers {'.'.join(map(str, MINIMUM_VERSION))} or later, "
        f"and this is {transformers.__version__}: pip install --upgrade transformers"
    )

from transformers import LlamaConfig


def other_release(fault):
    """Returns the message of a fault caused by a transformers release other than the releases that this code
    supports."""
    minimum, tested = ("{}.{}".format(*version) for version in (MINIMUM_VERSION, TESTED_VERSION))
    return (
        f"{fault} (transformers {transformers.__version__}; the model's code was tested with {minimum} to {tested}): "
        f'pip install "transformers=={tested}.*", or convert the model again with a newer moh-convert'
    )


# How the heads of a token are selected: any heads by the norms of their queries, whole groups of heads that read
# one key/value head, as many heads of each group, only the shared heads, or any heads by learned matrices.
ROUTERS = ("query-norm", "group", "static", "linear", "one-stage", "two-stage")
# The routers that multiply the outputs of active heads by weights other than 1.
WEIGHING_ROUTERS = ("one-stage", "two-stage")
REQUIRED_KEYS = ("moh_router", "moh_shared_heads", "moh_routed_top_k")
SHARED_IDS = "moh_shared_head_ids"


class MohHeads:
    """The checked head counts of a configuration."""

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        if kwargs.get("moh_shared_heads") is not None:
            # A number from the user replaces the heads of the file.
            config_dict = {**config_dict, SHARED_IDS: None, "moh_shared_heads": kwargs["moh_shared_heads"]}
        given = {key for key in (*REQUIRED_KEYS, SHARED_IDS) if config_dict.get(key, kwargs.get(key)) is not None}
        if SHARED_IDS in given and "moh_shared_heads" not in given:
            given.add("moh_shared_heads")
        missing = [key for key in REQUIRED_KEYS if key not in given]
        if missing:
            raise ValueError(
                f"config.json: {missing[0]} is missing: a {cls.model_type} has {', '.join(REQUIRED_KEYS)}"
            )
        return super().from_dict(config_dict, **kwargs)

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.moh_shared_head_ids is not None:
            # Only one of the two keys is written.
            self.moh_shared_heads = None
        self.check_heads()

    def check_heads(self):
        """Raises a ValueError that names the key and the layer if a layer cannot be routed."""
        if self.moh_router not in ROUTERS:
            known = " or ".join(f'"{name}"' for name in ROUTERS)
            raise ValueError(f"moh_router = {self.moh_router!r}: unknown router, expected {known}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads = {self.num_attention_heads}: must be a multiple of "
                f"num_key_value_heads = {self.num_key_value_heads}"
            )
        for layer in range(self.num_hidden_layers):
            self._check_layer(layer)

    def _check_layer(self, layer):
        ids, top_k = self.layer_heads(layer)
        heads, shared = self.num_attention_heads, len(ids)
        routed = heads - shared
        if ids and max(ids) >= heads:
            raise ValueError(f"the shared heads of layer {layer} are {ids}: the model has {heads} heads")
        self._check_router(layer, ids, top_k)
        if not 0 <= top_k <= routed:
            raise ValueError(
                f"moh_routed_top_k of layer {layer} = {top_k}: must be from 0 to the {routed} routed heads"
            )
        if shared + top_k == 0:
            raise ValueError(
                f"moh_shared_heads and moh_routed_top_k of layer {layer} are 0: no head would be active"
            )

    def _check_router(self, layer, ids, top_k):
        """Rejects heads of a layer that its router cannot route."""
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        size = heads // groups
        shared = [sum(head // size == group for head in ids) for group in range(groups)]
        fault = None
        if self.moh_router == "query-norm" and heads - len(ids) == 1:
            fault = (
                f"moh_shared_heads of layer {layer} = {len(ids)} of {heads} leaves one routed head, whose norm has "
                "no standard deviation: route none or at least two"
            )
        elif self.moh_router == "group" and any(count not in (0, size) for count in shared):
            fault = (
                f"moh_shared_heads of layer {layer} are no whole groups: the router \"group\" shares and selects the "
                f"{size} heads of a key/value head together"
            )
        elif self.moh_router == "group" and top_k % size:
            fault = f"moh_routed_top_k of layer {layer} = {top_k}: must be a multiple of {size}, the heads of a group"
        elif self.moh_router == "static" and top_k:
            fault = (
                f"moh_routed_top_k of layer {layer} = {top_k}: must be 0, tokens of the router \"static\" compute the "
                "shared heads alone"
            )
        elif self.moh_router in WEIGHING_ROUTERS and top_k == 0 and len(ids) < heads:
            fault = (
                f"moh_routed_top_k of layer {layer} = 0: the router \"{self.moh_router}\" weighs selected heads, at least "
                "one"
            )
        if fault:
            raise ValueError(fault)

    def layer_heads(self, layer):
        """Returns the shared heads of a layer, and the number of routed heads that a token selects."""
        return self._shared_heads(layer), self._count("moh_routed_top_k", layer)

    def _shared_heads(self, layer):
        layers = self.moh_shared_head_ids
        if layers is None:
            shared = self._count("moh_shared_heads", layer)
            if shared < 0:
                raise ValueError(f"moh_shared_heads of layer {layer} = {shared}: must be from 0")
            return list(range(shared))
        if len(layers) != self.num_hidden_layers:
            raise ValueError(
                f"{SHARED_IDS} has {len(layers)} entries, and the model {self.num_hidden_layers} layers: "
                "give one for each layer"
            )
        heads = layers[layer]
        if len(set(heads)) != len(heads) or any(head < 0 for head in heads):
            raise ValueError(f"{SHARED_IDS} of layer {layer} = {heads}: must name each head once, from 0")
        return sorted(heads)

    def _count(self, key, layer):
        counts = getattr(self, key)
        if isinstance(counts, (list, tuple)):
            if len(counts) != self.num_hidden_layers:
                raise ValueError(
                    f"{key} has {len(counts)} entries, and the model {self.num_hidden_layers} layers: "
                    "give one for each layer, or one number for all"
                )
            counts = counts[layer]
        if isinstance(counts, bool) or not isinstance(counts, int):
            raise ValueError(f"{key} = {counts!r}: expected a whole number, or a list of them")
        return counts


class MohLlamaConfig(MohHeads, LlamaConfig):
    """A Llama's configuration with the heads that a token computes.

    With `output_router_logits`, the model returns the scores of the routed heads and adds the balance
    loss, times `router_aux_loss_coef`, to the loss. The defaults of the counts are the paper's for
    the 32 heads of a LLaMA-3-8B. A `config.json` must have the counts.
    """

    model_type = "moh_llama"

    moh_router: str = "query-norm"
    moh_shared_heads: int | list[int] | None = 16
    moh_shared_head_ids: list[list[int]] | None = None
    moh_routed_top_k: int | list[int] = 8
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.01


__all__ = ["MohLlamaConfig"]
