"""A training step of transformers' Llama in bf16: tokens per second and peak memory.

Weights, gradients and both moments are bf16, without f32 master weights, which flatters PyTorch.
"""

import time

import torch

from gpu_timing import CUDA, DEVICE, attempt, median_ms


def train(options, checkpointing):
    """Yields the figures of forward, backward and fused AdamW."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=options.hidden, intermediate_size=options.mlp,
        num_hidden_layers=options.layers, num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads, head_dim=options.head_dim, vocab_size=options.vocab,
        max_position_embeddings=options.length, tie_word_embeddings=False, use_cache=False,
        attn_implementation="sdpa")
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config).train()
    parameters = sum(weight.numel() for weight in model.parameters())
    yield {"parameters": parameters}
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    run = model if options.eager else torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(options.vocab, (options.batch, options.length), device=DEVICE)

    def work():
        run(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    begin = time.perf_counter()
    seconds = median_ms(work, options) / 1e3
    # A multiply-add is two operations. Each product is computed once forward and twice backward.
    # The embedding multiplies nothing. Attention as elsewhere: 2 and 5 products, causal.
    products = 6.0 * (parameters - options.vocab * options.hidden) * ids.numel()
    attention = (7.0 * options.layers * options.batch * options.heads * options.head_dim
                 * options.length**2)
    yield {"tokens_per_second": ids.numel() / seconds, "step_ms": seconds * 1e3,
           "tflops": (products + attention) / seconds / 1e12,
           "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if CUDA else None,
           "seconds_in_all": time.perf_counter() - begin}


def step(options):
    """Reports a row, and a second row that recomputes every block if memory runs out.

    Yields for each whether it was measured.
    """
    torch.set_default_dtype(torch.bfloat16)
    fields = {name: getattr(options, name) for name in
              ["layers", "vocab", "hidden", "mlp", "length", "batch", "heads", "kv_heads",
               "head_dim"]}
    fields["compiled"] = not options.eager
    for checkpointing in [True] if options.checkpointing else [False, True]:
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        # Compiling all layers takes minutes, so only the timed runs have a time limit.
        measured = attempt("step", fields | {"checkpointing": checkpointing}, None,
                           lambda: train(options, checkpointing))
        yield measured
        if measured:
            return
