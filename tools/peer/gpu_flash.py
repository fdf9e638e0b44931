"""FlashAttention-4: FlexAttention on its kernels, and its own functions (package flash-attn-4).

Its functions take batch, token, head, number. They get views of the other layout, which the
kernels read in place. On packed rows both get the last key of each row as a tensor, which a mask
function reads, and the blocks of keys that each block of rows reads.

The function of variable lengths supports a mask function and these blocks since version 4.0.0b13. It
applies the mask in its backward pass since 4.0.0b17. Before that its gradients are wrong, which is
the row's error. Up to 4.0.0b36, the last version that was checked, its backward pass supports no blocks: it
computes every pair of a block of rows and a block of keys, about twice as many as needed.
"""

import torch
from torch.nn import functional

from gpu_attention import BLOCK, masked, prefix_mask, variant
from gpu_case import SHARED
from gpu_packed import Sequences, flex_rows, packed_rows, with_triton
from gpu_timing import CUDA


def without_logarithms(found):
    """Returns only the result: some versions also return the log-sum-exp."""
    return found[0] if isinstance(found, tuple) else found


def dense_causal():
    from flash_attn.cute import flash_attn_func

    def call(query, key, value):
        inputs = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        return without_logarithms(flash_attn_func(*inputs, causal=True)).transpose(1, 2)

    return call


def ends_of_equal(count, length, device):
    """Returns where sequences of equal length begin and end."""
    return torch.arange(0, (count + 1) * length, length, dtype=torch.int32, device=device)


def ends_of(lengths):
    return functional.pad(lengths.cumsum(0), (1, 0)).int()


def variable_lengths():
    """Returns the same attention by the function for concatenated sequences of several lengths."""
    from flash_attn.cute import flash_attn_varlen_func

    def call(query, key, value):
        batch, _, length, _ = query.shape
        ends = ends_of_equal(batch, length, query.device)
        inputs = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
        result = without_logarithms(flash_attn_varlen_func(
            *inputs, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=length,
            max_seqlen_k=length, causal=True))
        return result.unflatten(0, (batch, length)).transpose(1, 2)

    return call


def mask_function():
    """Returns a mask: row `row` of problem `batch` reads the keys up to the key that the first tensor names."""
    import cutlass
    from cutlass import cute
    from flash_attn.cute import utils

    @cute.jit
    def visible(batch, head, row, key, lengths, tensors):
        last = tensors[0]
        return key <= utils.scalar_to_ssa(last[batch[0], row[0]], cutlass.Int32)

    return visible


def own_rows():
    """Returns its own function on packed rows."""
    from flash_attn.cute import flash_attn_func
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    visible = mask_function()

    def attend_with(packing, length):
        mask = prefix_mask(packing.last, length)
        last = packing.last[:, 0].contiguous()

        def blocks(counts, indices, full_counts, full_indices):
            return BlockSparseTensorsTorch(
                mask_block_cnt=counts, mask_block_idx=indices, full_block_cnt=full_counts,
                full_block_idx=full_indices, block_size=mask.BLOCK_SIZE)

        of_rows = blocks(mask.kv_num_blocks, mask.kv_indices,
                         mask.full_kv_num_blocks, mask.full_kv_indices)
        of_keys = blocks(mask.q_num_blocks, mask.q_indices,
                         mask.full_q_num_blocks, mask.full_q_indices)

        def call(*inputs):
            found = flash_attn_func(
                *(tensor.transpose(1, 2) for tensor in inputs), mask_mod=visible,
                aux_tensors=[last], block_sparse_tensors=of_rows,
                block_sparse_tensors_bwd=of_keys)
            return without_logarithms(found).transpose(1, 2)

        return call

    return attend_with


def blocks_of_sequences(packing, mask):
    """Returns the blocks of keys of a padded mask, for sequences: the fields of BlockSparseTensorsTorch.

    Blocks of rows that are only padding are omitted, and so are their lists of blocks of keys. Two more
    tensors have the start of each sequence in the remaining blocks and lists.
    """
    counts = (packing.lengths + BLOCK - 1) // BLOCK
    numbers = torch.arange(mask.kv_num_blocks.shape[-1], device=counts.device)
    kept = numbers < counts[:, None]
    begins = ends_of(counts)

    def without_padding(tensor):
        """Removes the padding, for the single head."""
        return tensor[:, 0][kept].view(1, -1)

    return {"mask_block_cnt": without_padding(mask.kv_num_blocks),
            "mask_block_idx": without_padding(mask.kv_indices),
            "full_block_cnt": without_padding(mask.full_kv_num_blocks),
            "full_block_idx": without_padding(mask.full_kv_indices),
            "cu_total_m_blocks": begins,
            "cu_block_idx_offsets": begins * mask.kv_indices.shape[-1],
            "block_size": mask.BLOCK_SIZE}


def own_sequences():
    """Returns its function of variable lengths, on the packed rows of each key/value head as a sequence."""
    from flash_attn.cute import flash_attn_varlen_func
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    visible = mask_function()

    def attend_with(packing, length):
        blocks = BlockSparseTensorsTorch(
            **blocks_of_sequences(packing, prefix_mask(packing.last, length)))
        last = packing.last[:, 0].contiguous()
        ends = ends_of(packing.lengths)
        ends_of_keys = ends_of_equal(len(packing.lengths), length, ends.device)

        def call(rows, key, value):
            keys, values = (tensor.reshape(-1, 1, tensor.shape[-1]) for tensor in (key, value))
            found = flash_attn_varlen_func(
                rows[:, None], keys, values, cu_seqlens_q=ends, cu_seqlens_k=ends_of_keys,
                max_seqlen_q=packing.rows, max_seqlen_k=length, mask_mod=visible,
                aux_tensors=[last], block_sparse_tensors=blocks)
            return without_logarithms(found)[:, 0]

        return call

    return attend_with


def flash(options):
    """Reports the rows of the part `flash`: yields for each whether it was measured.

    Without a GPU its own functions still report their rows, with an error. A kernel that breaks the
    GPU's context ends the rows after it.
    """
    yield from with_triton(options)
    for name, make in [("dense", dense_causal), ("variable lengths", variable_lengths)]:
        def build(make=make):
            call = make()
            return lambda case: (lambda: call(*case.inputs), None)

        yield variant(options, "flash_attn", name, None, build)
    # On a CPU FlexAttention would not run on its kernels.
    if CUDA:
        yield from flex_on_flash(options)
    for active in SHARED:
        yield from packed_rows(options, "flash_attn", active, own_rows, dense_causal)
        yield from packed_rows(options, "flash_attn, variable lengths", active, own_sequences,
                               dense_causal, Sequences)


def flex_on_flash(options):
    for active in [None, *SHARED]:
        yield variant(options, "flex", "flash", active, lambda: masked(options, "flash"))
    for active in SHARED:
        yield from packed_rows(options, "flash", active, lambda: flex_rows(options, "flash"),
                               dense_causal)
