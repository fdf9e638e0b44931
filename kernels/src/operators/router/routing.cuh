// The result of every router: the tables of a routing.
#pragma once

#include "../../device/cuda/operators.cuh"

namespace router {

// The tables of a routing, [tokens, routed].
struct Routing {
    float* gates;
    uint8_t* selected;
    // Tokens that selected each routed head.
    uint32_t* counts;
    // The columns of `selected` of local heads, if ranks share the heads.
    uint8_t* local_selected;
    uint64_t tokens;
    uint32_t shared_heads;
    uint32_t routed;
    uint32_t local_heads;
    uint32_t local_shared;
    // Which heads are local (ranks.rs, `Heads`).
    uint32_t group_size;
    uint32_t rank;
    uint32_t ranks;
    uint32_t padding;

    // The index among the routed heads of local head `head`.
    __device__ __forceinline__ uint32_t index(uint32_t head) const {
        if (ranks == 1) {
            return head - shared_heads;
        }
        const uint32_t group = head / group_size * ranks + rank;
        return group * group_size + head % group_size - shared_heads;
    }
};
static_assert(sizeof(Routing) == 72 && offsetof(Routing, gates) == 0 &&
              offsetof(Routing, selected) == 8 && offsetof(Routing, counts) == 16 &&
              offsetof(Routing, local_selected) == 24 && offsetof(Routing, tokens) == 32 &&
              offsetof(Routing, shared_heads) == 40 && offsetof(Routing, routed) == 44 &&
              offsetof(Routing, local_heads) == 48 && offsetof(Routing, local_shared) == 52 &&
              offsetof(Routing, group_size) == 56 && offsetof(Routing, rank) == 60 &&
              offsetof(Routing, ranks) == 64 && offsetof(Routing, padding) == 68,
              "as in router/cuda.rs");

}  // namespace router
