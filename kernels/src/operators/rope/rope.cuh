// Rotary position embedding of pairs of elements. The query-norm router's kernels rotate in the same
// pass over the queries.
#pragma once

#include "../../device/cuda/operators.cuh"

namespace rope {

struct PARAMETERS Parameters {
    // Queries, keys and values, or their gradients: rotated in place.
    void* qkv;
    const float* cos;
    const float* sin;
    uint64_t first_position;
    uint64_t length;
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t head_dim;
    uint32_t padding;

    __device__ __forceinline__ uint64_t row_length() const {
        return uint64_t(heads + 2 * kv_heads) * head_dim;
    }
};

// The pair (a, b) rotated; with the negative sine, rotated back. The fused operations are explicit,
// because a compiler that fuses operations as it chooses gives each kernel different bits.
__device__ __forceinline__ float2 rotated(float a, float b, float cos, float sin) {
    return make_float2(fmaf(a, cos, -(b * sin)), fmaf(b, cos, a * sin));
}

// Whether the halves of heads and the angles can be read 16 bytes at a time.
template <class T>
__device__ __forceinline__ bool rotates_wide(const Parameters& p) {
    return wide<T>(p.head_dim / 2, p.qkv) && aligned(p.cos) && aligned(p.sin);
}

}  // namespace rope
