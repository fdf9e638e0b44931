// The result of every router: the tables of a routing.
#pragma once

#include "../../device/cuda/operators.cuh"

namespace router {

// The tables of a routing, [tokens, columns]. Column i belongs to head `leading + i`. In the column of a
// shared head every token is marked as selected, with a gate of 0.
struct PARAMETERS Routing {
    float* gates;
    uint8_t* selected;
    // Tokens that selected each column's head.
    uint32_t* counts;
    // The columns of `selected` of local heads, if ranks share the heads.
    uint8_t* local_selected;
    uint64_t tokens;
    // The leading shared heads, which have no column.
    uint32_t leading;
    uint32_t columns;
    uint32_t local_heads;
    uint32_t local_leading;
    // Defines the local heads (ranks.rs, `Heads`).
    uint32_t group_size;
    uint32_t rank;
    uint32_t ranks;
    // Columns of routed heads.
    uint32_t routed;

    // The column of local head `head`.
    __device__ __forceinline__ uint32_t column(uint32_t head) const {
        if (ranks == 1) {
            return head - leading;
        }
        const uint32_t group = head / group_size * ranks + rank;
        return group * group_size + head % group_size - leading;
    }
};

}  // namespace router
