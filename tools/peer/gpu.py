#!/usr/bin/env python3
"""PyTorch on this GPU, as JSON lines: what `tools/gpu/measure.py` holds our figures against.

    python3 tools/peer/gpu.py attention --length 8192 --batch 1
    python3 tools/peer/gpu.py step --layers 32 --length 8192
    python3 tools/peer/gpu.py limits

attention  causal grouped-query attention in bf16, forward and backward, by every backend of
           scaled_dot_product_attention that takes it, and FlexAttention with the heads of each token
           chosen at random, 75% and 50% of them.
step       forward, backward and fused AdamW of transformers' Llama, compiled, all of it in bf16 and
           without f32 master weights, which flatters PyTorch.
limits     the rate of an 8192 x 8192 x 8192 bf16 product, and of a copy of 4 GiB.
"""

import argparse
import json
import statistics

import torch
from torch.nn import functional


def median_seconds(work, warmup=3, runs=10):
    seconds = []
    for index in range(warmup + runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if index >= warmup:
            seconds.append(start.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def report(kind, **fields):
    print(json.dumps({"kind": kind, **fields}), flush=True)


def random(*shape, grad=False):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad)


class Attention:
    def __init__(self, options):
        self.options = options
        shape = (options.length, options.head_dim)
        self.query = random(options.batch, options.heads, *shape, grad=True)
        self.key = random(options.batch, options.kv_heads, *shape, grad=True)
        self.value = random(options.batch, options.kv_heads, *shape, grad=True)
        self.gradient = random(options.batch, options.heads, *shape)

    def report(self, kind, call, **fields):
        """Times a call forward, and forward and backward; a backend may refuse the shape."""
        fields |= {"batch": self.options.batch, "length": self.options.length}
        try:
            with torch.no_grad():
                forward = median_seconds(call)
            both = median_seconds(lambda: call().backward(self.gradient))
        except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
            report(kind, error=str(error).splitlines()[0], **fields)
            return
        report(kind, forward_ms=forward * 1e3, forward_backward_ms=both * 1e3, **fields)

    def scaled_dot_product(self):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        for backend in [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]:
            def call(backend=backend):
                with sdpa_kernel(backend):
                    return functional.scaled_dot_product_attention(
                        self.query, self.key, self.value, is_causal=True, enable_gqa=True)

            self.report("sdpa", call, backend=backend.name.lower())

    def flex(self, active, shared):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        options = self.options
        chosen = torch.rand(options.batch, options.length, options.heads, device="cuda")
        chosen[..., :shared] = 2.0
        count = round(active * options.heads)
        selected = torch.zeros_like(chosen, dtype=torch.bool)
        selected.scatter_(-1, chosen.topk(count, dim=-1).indices, True)

        def visible(batch, head, query, key):
            return selected[batch, query, head] & (key <= query)

        mask = create_block_mask(
            visible, options.batch, options.heads, options.length, options.length, device="cuda")
        compiled = torch.compile(flex_attention)
        self.report("flex", lambda: compiled(
            self.query, self.key, self.value, block_mask=mask, enable_gqa=True), active=active)


def attention(options):
    case = Attention(options)
    case.scaled_dot_product()
    case.flex(0.75, options.heads // 2)
    case.flex(0.5, options.heads // 4)


def step(options):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=options.layers,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=options.vocab,
        max_position_embeddings=options.length, use_cache=False, attn_implementation="sdpa")
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    if options.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(options.vocab, (options.batch, options.length), device="cuda")

    def work():
        compiled(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds = median_seconds(work, runs=5)
    report("step", tokens_per_second=ids.numel() / seconds, layers=options.layers,
           vocab=options.vocab, length=options.length, batch=options.batch,
           checkpointing=options.checkpointing,
           peak_gib=torch.cuda.max_memory_allocated() / 2**30)


def limits(_options):
    left, right = random(8192, 8192), random(8192, 8192)
    report("matmul", flops_per_second=2 * 8192**3 / median_seconds(lambda: left @ right))
    source = random(2**31)
    target = torch.empty_like(source)
    report("copy", bytes_per_second=2**33 / median_seconds(lambda: target.copy_(source)))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["attention", "step", "limits"])
    for name, default in [("length", 8192), ("batch", 1), ("heads", 32), ("kv-heads", 8),
                          ("head-dim", 128), ("layers", 32), ("vocab", 128256)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--checkpointing", action="store_true")
    options = parser.parse_args()
    {"attention": attention, "step": step, "limits": limits}[options.part](options)


if __name__ == "__main__":
    main()
