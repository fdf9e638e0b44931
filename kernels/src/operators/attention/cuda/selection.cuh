// The heads that tokens select, in the form of attention's kernel parameters.
#pragma once

#include "../../../device/cuda/operators.cuh"

namespace attention {

// Whether a token computes a query head. `p.selected` is `[tokens, routed]`, or null if every token computes
// every head. `p.heads` is the number of heads, `p.routed` the number of routed heads, which are the last heads.
template <class Parameters>
__device__ __forceinline__ bool is_selected(const Parameters& p, uint64_t token, uint32_t head) {
    const uint32_t shared = p.heads - p.routed;
    return !p.selected || head < shared || p.selected[token * p.routed + head - shared];
}

}  // namespace attention
