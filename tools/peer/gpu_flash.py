"""FlashAttention-4: FlexAttention on its kernels, and its own functions (package flash-attn-4).

Its functions take batch, token, head, number. They are given views of the other layout, which the
kernels read in place.
"""

from gpu_attention import masked, variant
from gpu_case import SHARED
from gpu_packed import flex_rows, packed_rows, with_triton
from gpu_timing import CUDA


def without_logarithms(found):
    """The result alone: some versions also return the log-sum-exp."""
    return found[0] if isinstance(found, tuple) else found


def dense_causal():
    from flash_attn.cute import flash_attn_func

    def call(query, key, value):
        inputs = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        return without_logarithms(flash_attn_func(*inputs, causal=True)).transpose(1, 2)

    return call


def variable_lengths():
    """The same by the function for concatenated sequences of several lengths."""
    import torch
    from flash_attn.cute import flash_attn_varlen_func

    def call(query, key, value):
        batch, _, length, _ = query.shape
        ends = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32,
                            device=query.device)
        inputs = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
        result = without_logarithms(flash_attn_varlen_func(
            *inputs, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=length,
            max_seqlen_k=length, causal=True))
        return result.unflatten(0, (batch, length)).transpose(1, 2)

    return call


def own_rows():
    """Its own function on packed rows: the mask function reads the last key of each row."""
    import cutlass
    from cutlass import cute
    from flash_attn.cute import flash_attn_func, utils
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    from gpu_attention import prefix_mask

    @cute.jit
    def visible(batch, head, row, key, lengths, tensors):
        last = tensors[0]
        return key <= utils.scalar_to_ssa(last[batch[0], row[0]], cutlass.Int32)

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


def flash(options):
    """The rows of the part `flash`; a kernel that breaks the GPU's context ends those after it."""
    with_triton(options)
    if not CUDA:
        return
    for name, make in [("dense", dense_causal), ("variable lengths", variable_lengths)]:
        def build(make=make):
            call = make()
            return lambda case: (lambda: call(*case.inputs), None)

        variant(options, "flash_attn", name, None, build)
    for active in [None, *SHARED]:
        variant(options, "flex", "flash", active, lambda: masked(options, "flash"))
    for active in SHARED:
        packed_rows(options, "flash", active, lambda: flex_rows(options, "flash"), dense_causal)
        packed_rows(options, "flash_attn", active, own_rows, dense_causal)
