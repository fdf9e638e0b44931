// Rotary position embedding of a token's queries and keys, forward and backward, by a block of
// threads. The query-norm router's kernels rotate in the same pass over the queries.
#pragma once

#include "../cuda/operators.cuh"

namespace rope {

struct Parameters {
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
static_assert(sizeof(Parameters) == 56 && offsetof(Parameters, qkv) == 0 &&
              offsetof(Parameters, cos) == 8 && offsetof(Parameters, sin) == 16 &&
              offsetof(Parameters, first_position) == 24 && offsetof(Parameters, length) == 32 &&
              offsetof(Parameters, heads) == 40 && offsetof(Parameters, kv_heads) == 44 &&
              offsetof(Parameters, head_dim) == 48 && offsetof(Parameters, padding) == 52,
              "as in rope/cuda.rs");

// Rotates the token's queries and keys, N pairs of elements at a time.
template <class T, int N>
__device__ void rotate(const Parameters& p, T* row) {
    const uint32_t half = p.head_dim / 2, packs_of_half = half / N;
    const uint64_t angles = (p.first_position + blockIdx.x % p.length) * packs_of_half;
    for (uint32_t i = threadIdx.x; i < (p.heads + p.kv_heads) * packs_of_half; i += THREADS) {
        const uint32_t place = i % packs_of_half;
        Pack<T, N>* lows = packs<N>(row + (i / packs_of_half) * p.head_dim);
        Pack<T, N>* highs = lows + packs_of_half;
        const Pack<float, N> cos = packs<N>(p.cos)[angles + place];
        const Pack<float, N> sin = packs<N>(p.sin)[angles + place];
        Pack<T, N> low = lows[place], high = highs[place];
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float a = to_float(low.at[j]), b = to_float(high.at[j]);
            low.at[j] = from_float<T>(a * cos.at[j] - b * sin.at[j]);
            high.at[j] = from_float<T>(b * cos.at[j] + a * sin.at[j]);
        }
        lows[place] = low;
        highs[place] = high;
    }
}

// Rotates the gradients of the token's queries and keys back, N pairs at a time. If `added` has a
// factor for a head, the factor times the rotated head in `row` is added first: rotation preserves
// norms, so the factor is the same for the rotated and the unrotated query.
template <class T, int N, class Added>
__device__ void rotate_back(const Parameters& p, T* d_row, const T* row, const Added& added) {
    const uint32_t half = p.head_dim / 2, packs_of_half = half / N;
    const uint64_t angles = (p.first_position + blockIdx.x % p.length) * packs_of_half;
    for (uint32_t i = threadIdx.x; i < (p.heads + p.kv_heads) * packs_of_half; i += THREADS) {
        const uint32_t head = i / packs_of_half, place = i % packs_of_half;
        Pack<T, N>* lows = packs<N>(d_row + head * p.head_dim);
        Pack<T, N>* highs = lows + packs_of_half;
        const Pack<float, N> cos = packs<N>(p.cos)[angles + place];
        const Pack<float, N> sin = packs<N>(p.sin)[angles + place];
        Pack<T, N> low = lows[place], high = highs[place], query_low{}, query_high{};
        float factor = 0.0f;
        if (added.has(head)) {
            factor = added.factor(head);
            query_low = packs<N>(row + head * p.head_dim)[place];
            query_high = packs<N>(row + head * p.head_dim)[packs_of_half + place];
        }
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float a = to_float(low.at[j]) + factor * to_float(query_low.at[j]);
            const float b = to_float(high.at[j]) + factor * to_float(query_high.at[j]);
            low.at[j] = from_float<T>(a * cos.at[j] + b * sin.at[j]);
            high.at[j] = from_float<T>(b * cos.at[j] - a * sin.at[j]);
        }
        lows[place] = low;
        highs[place] = high;
    }
}

// Whether the halves of heads and the angles can be read 16 bytes at a time.
template <class T>
__device__ __forceinline__ bool rotates_wide(const Parameters& p) {
    return wide<T>(p.head_dim / 2, p.qkv) && aligned(p.cos) && aligned(p.sin);
}

}  // namespace rope
