"""PyTorch's own attention: scaled_dot_product_attention by each backend, and FlexAttention.

FlexAttention gets MoH as a mask of all rows. If the token selected the head, a row reads the keys up to its own
token. Otherwise it reads no key.
"""

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from gpu_case import SHARED, Case, measure
from gpu_timing import CUDA, attempt

BLOCK = 128
# What FlexAttention runs on by default.
USUAL = "triton" if CUDA else "uncompiled"
# The slow backend is last: it writes every score, and may leave no memory for others.
BACKENDS = ["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]


def prefix_mask(last, length, visible=None):
    """Returns a BlockMask in which row r of problem b and head h reads the keys 0 to last[b, h, r].

    The rows that a block covers see a common prefix in full and a longer prefix in part. So its two counts
    follow from the smallest and the largest of `last`, without a check of every pair of row and
    key as in `create_block_mask`. A row with -1 reads no key. `visible` defines the same mask without
    `last`.
    """
    def within_prefix(batch, head, row, key):
        return key <= last[batch, head, row]

    batch, heads, rows = last.shape
    # Rows beyond the end read no key, and must not make a block look full.
    padded = functional.pad(last, (0, -rows % BLOCK), value=-1)
    blocks = padded.view(batch, heads, -1, BLOCK)
    full = ((blocks.amin(-1) + 1) // BLOCK).int()
    touched = ((blocks.amax(-1) + BLOCK) // BLOCK).int()
    keys = torch.arange(-(-length // BLOCK), dtype=torch.int32, device=last.device)
    # The partial blocks follow the full blocks. Entries beyond the count are not read.
    partial = (keys + full[..., None]).clamp(max=len(keys) - 1)
    return BlockMask.from_kv_blocks(
        touched - full, partial, full, keys.expand(partial.shape).contiguous(), BLOCK_SIZE=BLOCK,
        mask_mod=visible or within_prefix,
        seq_lengths=(rows, length))


def compiled_flex(options, backend):
    """Returns FlexAttention on the requested kernel. On a CPU it runs uncompiled, forward only."""
    if not CUDA:
        return flex_attention
    mode = "max-autotune-no-cudagraphs" if options.autotune else None
    compiled = torch.compile(flex_attention, dynamic=False, mode=mode)
    kernel = {"BACKEND": "FLASH"} if backend == "flash" else {}

    # Not ROWS_GUARANTEED_SAFE: partial blocks come first, and a block may hide all of its keys from a row.
    return lambda *inputs, **arguments: compiled(*inputs, kernel_options=kernel, **arguments)


def causal(_batch, _head, row, key):
    return row >= key


def row_mask(case):
    """Returns the mask of all rows: causal, and empty for rows of unselected heads."""
    token = torch.arange(case.length, dtype=torch.int32, device=case.query.device)
    if case.selected is None:
        # A mask for all heads, which reads no tensor.
        return prefix_mask(token[None, None], case.length, causal)
    return prefix_mask(torch.where(case.selected, token, -1), case.length)


def masked(options, backend):
    """Returns FlexAttention over every row, with the mask of the selected heads."""
    flex = compiled_flex(options, backend)

    def build(case):
        mask = row_mask(case)
        return (lambda: flex(*case.inputs, block_mask=mask, enable_gqa=True),
                case.active and (lambda: row_mask(case)))

    return build


def scaled_dot_product(*backends):
    """Returns dense causal attention by the first backend that supports the shape."""
    backends = [getattr(SDPBackend, name) for name in backends]

    def call(query, key, value):
        with sdpa_kernel(backends, set_priority=True):
            return functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True)

    return call


def variant(options, kind, backend, active, make, backward=True):
    """Reports a row, and returns whether it was measured. `make` returns the variant's `build`, and may fail.

    `backward` is false for a variant without a backward pass on this device.
    """
    name = f"{kind} {backend} {active or 1.0:g}"
    if options.only and not any(word in name for word in options.only.split(",")):
        return False

    def steps():
        case = Case(options, active=active, backward=backward)
        yield case.fields()
        yield from measure(case, make(), options)

    return attempt(kind, {"backend": backend, "active": active or 1.0}, options.seconds, steps)


def attention(options):
    """Reports the rows of the part `attention`: yields for each whether it was measured."""
    for backend in BACKENDS:
        call = scaled_dot_product(backend)
        yield variant(options, "sdpa", backend.lower(), None,
                      lambda call=call: lambda case: (lambda: call(*case.inputs), None))
    for active in [None, *SHARED]:
        # FlexAttention has no backward pass on a CPU.
        yield variant(options, "flex", USUAL, active,
                      lambda: masked(options, USUAL), backward=CUDA)
