// Packing of selected (token, query head) pairs, and the kernels with one warp per pair.
#pragma once

#include "selection.cuh"
#include "tile.cuh"

namespace tiled_attention {

using attention::is_selected;

// Returns the sum of the counts of the threads before this thread; sets `total` to the sum of all counts.
static __device__ __forceinline__ uint32_t count_before(uint32_t count, uint32_t& total) {
    __shared__ uint32_t warp_counts[PACK_THREADS / 32];
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t sum = count;
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) {
        const uint32_t other = __shfl_up_sync(ALL_LANES, sum, delta);
        if (lane >= uint32_t(delta)) sum += other;
    }
    __syncthreads();  // The counts of the previous call have been read.
    if (lane == 31) warp_counts[warp] = sum;
    __syncthreads();
    uint32_t before = sum - count;
    total = 0;
    for (uint32_t i = 0; i < PACK_THREADS / 32; ++i) {
        if (i < warp) before += warp_counts[i];
        total += warp_counts[i];
    }
    return before;
}

// Whether all query heads of a key/value head are shared: every token selects them.
static __device__ __forceinline__ bool is_shared(const Parameters& params, uint32_t kv_head) {
    return (kv_head + 1) * (params.heads / params.kv_heads) <= params.heads - params.routed;
}

// The number of a key/value head's query heads that a token selected.
static __device__ __forceinline__ uint32_t count_selected(const Parameters& params, uint32_t token,
                                                          uint32_t kv_head) {
    const uint32_t group = params.heads / params.kv_heads, shared = params.heads - params.routed;
    if (group == 4 && kv_head * group >= shared && params.routed % 4 == 0 &&
        reinterpret_cast<uint64_t>(params.selected) % 4 == 0) {
        // Four bytes, each 0 or 1, in one access.
        const uint64_t first = uint64_t(token) * params.routed + kv_head * group - shared;
        return __popc(*reinterpret_cast<const uint32_t*>(params.selected + first));
    }
    uint32_t count = 0;
    for (uint32_t h = 0; h < group; ++h) count += is_selected(params, token, kv_head * group + h);
    return count;
}

// The outputs that are zero for pairs that were not selected.
enum class Clear { OUTPUT, QUERY_GRADIENT };

// Threads that clear a row.
constexpr uint32_t LANES = 16;

// Clears a row by LANES threads; `lane` is the index of this thread.
static __device__ __forceinline__ void clear_row(bf16* row, uint32_t head_dim, uint32_t lane) {
    if (is_aligned(row, head_dim)) {
        for (uint32_t column = lane * 8; column < head_dim; column += LANES * 8)
            *reinterpret_cast<uint4*>(row + column) = make_uint4(0, 0, 0, 0);
    } else {
        for (uint32_t column = lane * 2; column < head_dim; column += LANES * 2)
            *reinterpret_cast<uint32_t*>(row + column) = 0;
    }
}

// Clears the pairs of a block's tokens and a key/value head's query heads that were not selected.
template <Clear WHAT>
static __device__ __forceinline__ void clear_pairs(const Parameters& params, uint32_t kv_head,
                                                   uint32_t first_token, uint32_t tokens) {
    if (is_shared(params, kv_head)) return;
    const uint32_t group = params.heads / params.kv_heads, lane = threadIdx.x % LANES;
#pragma unroll 8
    for (uint32_t i = threadIdx.x / LANES; i < tokens * group; i += PACK_THREADS / LANES) {
        const uint32_t token = first_token + i / group, head = kv_head * group + i % group;
        if (is_selected(params, token, head)) continue;
        const uint64_t pair = uint64_t(token) * params.heads + head;
        if (WHAT == Clear::OUTPUT) {
            clear_row(params.out + pair * params.head_dim, params.head_dim, lane);
            if (lane == 0) params.log_sum_exp[pair] = 0.0f;
        } else {
            bf16* d_q = params.d_q + token * params.d_q_stride + head * params.head_dim;
            clear_row(d_q, params.head_dim, lane);
            if (lane == 0) params.delta[pair] = 0.0f;
        }
    }
}

// Writes `rows` and `row_counts`: one block per PACK_TOKENS tokens of each key/value head and
// sequence. A block counts the rows of all earlier tokens itself, so that no block waits for
// another block. All threads of a block clear the pairs without a row.
template <Clear WHAT>
static __device__ __forceinline__ void pack(const Parameters& params) {
    const uint32_t kv_head = blockIdx.y, group = params.heads / params.kv_heads;
    const uint32_t index = blockIdx.z * params.kv_heads + kv_head;
    const uint32_t first = blockIdx.z * params.query_length, start = blockIdx.x * PACK_TOKENS;
    const uint32_t token = start + threadIdx.x;
    uint32_t earlier_total = start * group, total;
    if (!is_shared(params, kv_head)) {
        uint32_t earlier = 0;
#pragma unroll 8
        for (uint32_t before = threadIdx.x; before < start; before += PACK_THREADS)
            earlier += count_selected(params, first + before, kv_head);
        count_before(earlier, earlier_total);
    }
    const bool exists = threadIdx.x < PACK_TOKENS && token < params.query_length;
    uint32_t count = exists ? count_selected(params, first + token, kv_head) : 0;
    uint32_t* slot = params.rows + uint64_t(index) * params.query_length * group + earlier_total +
                     count_before(count, total);
    if (exists)
        for (uint32_t h = 0; h < group; ++h)
            if (is_selected(params, first + token, kv_head * group + h))
                *slot++ = token * group + h;
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0)
        params.row_counts[index] = earlier_total + total;
    const uint32_t tokens = min(uint32_t(PACK_TOKENS), params.query_length - start);
    clear_pairs<WHAT>(params, kv_head, first + start, tokens);
}

// Packs the rows; sets output and log_sum_exp of the pairs that were not selected to zero.
extern "C" __global__ void __launch_bounds__(PACK_THREADS) attention_pack_forward(
    Parameters params) {
    pack<Clear::OUTPUT>(params);
}

// Packs the rows; sets delta and the query gradient of the pairs that were not selected to zero.
extern "C" __global__ void __launch_bounds__(PACK_THREADS) attention_pack_backward(
    Parameters params) {
    pack<Clear::QUERY_GRADIENT>(params);
}

// A (token, query head) pair; pair i is head i % heads of token i / heads.
struct Pair {
    uint32_t token, head;
    bool exists;
};

static __device__ __forceinline__ Pair warp_pair(const Parameters& params) {
    uint64_t index = uint64_t(blockIdx.x) * PAIRS_PER_BLOCK + threadIdx.x / 32;
    uint64_t token = index / params.heads;
    bool exists = token < uint64_t(params.batch) * params.query_length;
    return {uint32_t(token), uint32_t(index - token * params.heads), exists};
}

// Computes delta of every selected pair: one warp per pair.
extern "C" __global__ void __launch_bounds__(PAIR_THREADS)
    attention_backward_delta(Parameters params) {
    Pair pair = warp_pair(params);
    if (!pair.exists || !is_selected(params, pair.token, pair.head)) return;
    uint64_t index = uint64_t(pair.token) * params.heads + pair.head;
    const bf16* out = params.out + index * params.head_dim;
    const bf16* d_out = params.d_out + index * params.head_dim;
    float sum = 0.0f;
    for (uint32_t i = threadIdx.x % 32 * 2; i < params.head_dim; i += 64) {
        float2 o = unpack_bf16x2(*reinterpret_cast<const uint32_t*>(out + i));
        float2 d_o = unpack_bf16x2(*reinterpret_cast<const uint32_t*>(d_out + i));
        sum += o.x * d_o.x + o.y * d_o.y;
    }
    sum = warp_sum(sum);
    float weight = params.weights != nullptr ? params.weights[index] : 1.0f;
    // The output of a head with weight 0 is 0, so delta cannot be recovered from the output.
    if (threadIdx.x % 32 == 0) params.delta[index] = weight != 0.0f ? sum / weight : 0.0f;
}

}  // namespace tiled_attention
