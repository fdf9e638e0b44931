"""MoH on packed rows: assembled from PyTorch's operators so that skipped heads need no time.

The selected (token, head) rows of a key/value head are gathered in the order of their tokens. All
read the keys of that head up to their own token. A causal mask of stock kernels aligns the
last query with the last key, and each row reads one more key. Packed rows differ: several rows are of one
token, and tokens without a selected head are missing. Packing each query head separately does not
help, since its queries are still a subset of the tokens while its keys are all. So the last key of
each row is a tensor that the mask reads. Blocks that are entirely before their rows' tokens need no
mask. These are nearly all blocks.

Key/value heads are the problems of a batch, one head each, padded to the longest with rows that
read only key 0. So no row is without keys, and the gradient of the padding's result is zero. For
functions of variable lengths they are sequences without padding.
"""

import torch
from torch.nn import functional

from gpu_attention import BLOCK, USUAL, compiled_flex, prefix_mask, scaled_dot_product, variant
from gpu_case import SHARED
from gpu_timing import CUDA


class Packing:
    """The packed positions of the rows of `selected`, by batch, query head and token."""

    def __init__(self, selected, kv_heads):
        batch, heads, length = selected.shape
        group = heads // kv_heads
        by_problem = (batch * kv_heads, length * group)

        def packed_order(tensor):
            return tensor.view(batch, kv_heads, group, length).transpose(2, 3).reshape(by_problem)

        chosen = packed_order(selected)
        rank = chosen.cumsum(-1) - 1
        self.rows = -(-int(rank[:, -1].max() + 1) // BLOCK) * BLOCK
        device = selected.device
        all_rows = torch.arange(selected.numel(), device=device).view(selected.shape)
        slot = torch.where(chosen, rank, self.rows)
        # The packed rows' indices among all rows, and -1 for padding. The last column is dropped.
        source = torch.full((by_problem[0], self.rows + 1), -1, device=device)
        source.scatter_(1, slot, packed_order(all_rows))
        self.source = source[:, :-1].reshape(-1)
        # All rows' indices among the packed rows, and -1 for unselected rows.
        first = torch.arange(by_problem[0], device=device)[:, None] * self.rows
        target = torch.where(chosen, first + rank, -1)
        self.target = target.view(batch, kv_heads, length, group).transpose(2, 3).reshape(-1)
        # The token of each packed row, which is its last key. Padding reads key 0.
        last = torch.where(self.source >= 0, self.source % length, 0).int()
        self.last = last.view(by_problem[0], 1, self.rows)
        self.shape = self.last.shape


class Sequences(Packing):
    """The same rows without padding: a sequence for each problem, one after another.

    `last` keeps its padding, since a mask gets a row's position in its own sequence.
    """

    def __init__(self, selected, kv_heads):
        super().__init__(selected, kv_heads)
        real = self.source >= 0
        self.lengths = real.view(-1, self.rows).sum(-1)
        position = real.cumsum(0) - 1
        self.target = torch.where(self.target >= 0, position[self.target.clamp(min=0)], -1)
        self.source = self.source[real]
        self.shape = self.source.shape


def read_rows(rows, index):
    """Returns the rows at `index`, zero where it is -1."""
    return torch.where(index[:, None] >= 0, rows[index.clamp(min=0)], 0)


class Take(torch.autograd.Function):
    """`read_rows` at `index`, with a backward pass that reads at `inverse`: no row is written twice.

    Autograd's own backward pass of an indexing would add with atomics.
    """

    @staticmethod
    def forward(context, rows, index, inverse, read):
        context.save_for_backward(inverse)
        context.read = read
        return read(rows, index)

    @staticmethod
    def backward(context, gradient):
        (inverse,) = context.saved_tensors
        return context.read(gradient.contiguous(), inverse), None, None, None


def packed(attend_with, dense=None, layout=Packing):
    """Returns attention over packed rows, with a gather before it and a scatter after it.

    `attend_with(packing, length)` returns the attention of packed queries, one head, with the keys
    of their problem. `packing` is a `layout`. With `dense`, key/value heads that have only shared query heads
    are passed to `dense` unpacked, and only the other heads are packed.
    """
    read = torch.compile(read_rows, dynamic=False) if CUDA else read_rows

    def build(case):
        group = case.heads // case.kv_heads
        whole = case.shared_heads // group if dense else 0
        if dense and whole == 0:
            raise ValueError("no key/value head has shared heads only")
        routed = (case.batch * (case.kv_heads - whole), 1)
        selected = case.selected[:, whole * group:].contiguous()

        def prepare():
            packing = layout(selected, case.kv_heads - whole)
            return packing, attend_with(packing, case.length)

        packing, attend = prepare()

        def sparse(query, key, value):
            shape = query.shape
            rows = Take.apply(query.reshape(-1, case.head_dim), packing.source, packing.target,
                              read)
            result = attend(rows.view(*packing.shape, case.head_dim),
                            key.reshape(*routed, case.length, case.head_dim),
                            value.reshape(*routed, case.length, case.head_dim))
            return Take.apply(result.reshape(-1, case.head_dim), packing.target, packing.source,
                              read).view(shape)

        def both():
            sizes = [[whole * heads, (case.kv_heads - whole) * heads] for heads in [group, 1, 1]]
            parts = [tensor.split(size, 1) for tensor, size in zip(case.inputs, sizes)]
            return torch.cat([dense(*(part[0] for part in parts)),
                              sparse(*(part[1] for part in parts))], 1)

        return both if dense else lambda: sparse(*case.inputs), prepare

    return build


def flex_rows(options, backend):
    flex = compiled_flex(options, backend)

    def attend_with(packing, length):
        mask = prefix_mask(packing.last, length)
        return lambda *inputs: flex(*inputs, block_mask=mask)

    return attend_with


def written_out_rows(packing, length):
    """Returns attention with the full mask, for a CPU, where FlexAttention has no backward pass."""
    visible = torch.arange(length, device=packing.last.device) <= packing.last[..., None]
    return lambda *inputs: functional.scaled_dot_product_attention(*inputs, attn_mask=visible)


def written_out_sequences(packing, length):
    """Returns the same attention for each sequence separately."""
    lengths = packing.lengths.tolist()
    visible = torch.arange(length, device=packing.last.device) <= packing.last[..., None]

    def attend(rows, key, value):
        parts = [functional.scaled_dot_product_attention(
                     part[None], key[problem], value[problem],
                     attn_mask=visible[problem, :, :len(part)])
                 for problem, part in enumerate(rows.split(lengths))]
        return torch.cat(parts, 1)

    return attend


def packed_rows(options, backend, active, attend_with, dense, layout=Packing):
    """Reports the rows of a way to attend: all heads packed, or the shared heads passed to `dense`.

    Yields for each whether it was measured.
    """
    backward = CUDA or USUAL not in backend
    yield variant(options, "packed", backend, active,
                  lambda: packed(attend_with(), layout=layout), backward)
    yield variant(options, "packed", f"{backend}, shared heads dense", active,
                  lambda: packed(attend_with(), dense(), layout), backward)


def with_triton(options):
    def dense():
        return scaled_dot_product("CUDNN_ATTENTION", "FLASH_ATTENTION", "MATH")

    for active in SHARED:
        if not CUDA:
            yield from packed_rows(
                options, "written out", active, lambda: written_out_rows, dense)
            yield from packed_rows(
                options, "written out, variable lengths", active, lambda: written_out_sequences,
                dense, Sequences)
        yield from packed_rows(options, USUAL, active, lambda: flex_rows(options, USUAL), dense)
