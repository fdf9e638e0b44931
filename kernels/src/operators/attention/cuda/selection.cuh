// The heads that tokens select, as the parameters of attention's kernels have them.
#pragma once

#include "../../../device/cuda/operators.cuh"

namespace attention {

// Whether a token computes a query head. `p` has `selected`, `[tokens, routed]` or null if every token computes every head,
// and the numbers of `heads` and of `routed` ones, which are the last.
template <class Parameters>
__device__ __forceinline__ bool is_selected(const Parameters& p, uint64_t token, uint32_t head) {
    const uint32_t shared = p.heads - p.routed;
    return !p.selected || head < shared || p.selected[token * p.routed + head - shared];
}

}  // namespace attention
