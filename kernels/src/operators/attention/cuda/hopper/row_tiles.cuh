// The kernels before and after the backward pass: packing of row tiles, and scattering of d_q.
//
// A row tile contains 64 packed rows of one (sequence, key/value head): matrices of panels of the
// queries and of the output gradients times their weight, then the statistics of each row. If a
// row's output has the weight w, the gradient of its unweighted output is w dO, so that
//   P = softmax, dP = (w dO) V^T, delta w = <w dO, O>, dS = P (dP - delta w), dV = P^T (w dO)
// need no weight. Rows after the last row of a segment are zeros that see no key, with a
// log_sum_exp of infinity: their probabilities are 0. Tiles without rows are not written.
//
// The sums of d_q have the order in which the backward pass adds them: first the half of the columns
// of warpgroup w, with the four elements of (n, thread) of a wgmma accumulator at
// n * 512 + thread * 4.
#pragma once

#include "../pack.cuh"
#include "panels.cuh"

namespace hopper_attention {

// ---- addresses ----

// Row tiles of one (sequence, key/value head).
static __device__ __forceinline__ uint32_t tiles_per_segment(const Parameters& params) {
    uint32_t group = params.heads / params.kv_heads;
    return (params.query_length * group + TILE_ROWS - 1) / TILE_ROWS;
}

// The index of a segment's first row tile.
static __device__ __forceinline__ uint64_t first_row_tile(const Parameters& params,
                                                          const Segment& segment) {
    uint64_t index = uint64_t(segment.sequence) * params.kv_heads + segment.kv_head;
    return index * tiles_per_segment(params);
}

// The offsets of a row tile's parts in global memory.
template <int WIDTH>
struct RowTileLayout {
    static constexpr uint32_t MATRIX = tile_bytes(TILE_ROWS, WIDTH);
    static constexpr uint32_t D_OUT = MATRIX;
    // log_sum_exp / ln 2 and delta * weight of each row, and the keys [first, end) that it sees.
    static constexpr uint32_t LOG_SUM_EXP = 2 * MATRIX;
    static constexpr uint32_t DELTA = LOG_SUM_EXP + TILE_ROWS * 4;
    static constexpr uint32_t BOUNDS = DELTA + TILE_ROWS * 4;
    static constexpr uint32_t BYTES = BOUNDS + TILE_ROWS * 8;
    static_assert(BYTES == row_tile_bytes(WIDTH));
};

// ---- before the backward pass ----

// Eight elements of a row.
struct Chunk {
    uint32_t pairs[4];
};

static __device__ __forceinline__ Chunk load_chunk(const bf16* elements) {
    uint4 pairs = *reinterpret_cast<const uint4*>(elements);
    return {{pairs.x, pairs.y, pairs.z, pairs.w}};
}

static __device__ __forceinline__ void store_chunk(unsigned char* target, const Chunk& chunk) {
    *reinterpret_cast<uint4*>(target) =
        make_uint4(chunk.pairs[0], chunk.pairs[1], chunk.pairs[2], chunk.pairs[3]);
}

static __device__ __forceinline__ float dot(const Chunk& a, const Chunk& b) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float2 x = unpack_bf16x2(a.pairs[i]), y = unpack_bf16x2(b.pairs[i]);
        sum += x.x * y.x + x.y * y.y;
    }
    return sum;
}

static __device__ __forceinline__ Chunk scaled(const Chunk& chunk, float factor) {
    Chunk result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float2 pair = unpack_bf16x2(chunk.pairs[i]);
        result.pairs[i] = pack_bf16x2(pair.x * factor, pair.y * factor);
    }
    return result;
}

// Sum over the LANES lanes of a row.
template <int LANES>
static __device__ __forceinline__ float lanes_sum(float value) {
#pragma unroll
    for (int bits = LANES / 2; bits > 0; bits /= 2)
        value += __shfl_xor_sync(ALL_LANES, value, bits);
    return value;
}

// Per-row values of the backward pass.
struct RowStatistics {
    float log_sum_exp = -minus_infinity(), delta = 0.0f;
    uint32_t first = 0, end = 0;
};

template <int WIDTH>
static __device__ __forceinline__ void store_row_statistics(unsigned char* tile, uint32_t row,
                                                            const RowStatistics& statistics) {
    using Layout = RowTileLayout<WIDTH>;
    reinterpret_cast<float*>(tile + Layout::LOG_SUM_EXP)[row] = statistics.log_sum_exp;
    reinterpret_cast<float*>(tile + Layout::DELTA)[row] = statistics.delta;
    reinterpret_cast<uint2*>(tile + Layout::BOUNDS)[row] =
        make_uint2(statistics.first, statistics.end);
}

// Fills the row tiles, writes delta of the selected pairs, and sets the sums of d_q and the
// semaphores to 0. Each row has WIDTH / 8 threads.
template <int WIDTH>
static __device__ __forceinline__ void prepare(const Parameters& params, const Scratch& scratch) {
    constexpr int LANES = WIDTH / 8;
    Segment segment = make_segment(params, blockIdx.y, blockIdx.z);
    uint32_t index = blockIdx.x * (PREPARE_THREADS / LANES) + threadIdx.x / LANES;
    uint32_t chunk = threadIdx.x % LANES, row = index % TILE_ROWS;
    // The condition is the same for all rows of a block: the rows belong to one tile.
    if (index / TILE_ROWS * TILE_ROWS >= segment.count) return;
    bool exists = index < segment.count;

    Chunk q{}, d_out{}, out{};
    RowStatistics statistics;
    uint64_t pair = 0;
    float weight = 1.0f;
    if (exists) {
        uint32_t packed = segment.row(index), in_sequence = packed / segment.group;
        uint32_t token = segment.sequence * params.query_length + in_sequence;
        uint32_t head = segment.kv_head * segment.group + packed % segment.group;
        pair = uint64_t(token) * params.heads + head;
        q = load_chunk(params.q + token * params.q_stride + head * WIDTH + chunk * 8);
        d_out = load_chunk(params.d_out + pair * WIDTH + chunk * 8);
        out = load_chunk(params.out + pair * WIDTH + chunk * 8);
        statistics.log_sum_exp = params.log_sum_exp[pair] * LOG2_E;
        statistics.first = params.document_start != nullptr ? params.document_start[token] : 0;
        statistics.end = key_end(params, in_sequence);
        if (params.weights != nullptr) weight = params.weights[pair];
    }
    // The output is already multiplied by its weight.
    float weighted_delta = lanes_sum<LANES>(dot(out, d_out));
    statistics.delta = weighted_delta;
    if (params.weights != nullptr) {
        d_out = scaled(d_out, weight);
        // dP is computed from the rounded w dO, so the delta subtracted from it is too.
        float sum = lanes_sum<LANES>(dot(out, d_out));
        statistics.delta = weight != 0.0f ? sum / weight : 0.0f;
    }

    uint64_t tile_index = first_row_tile(params, segment) + index / TILE_ROWS;
    unsigned char* tile = scratch.row_tiles + tile_index * row_tile_bytes(WIDTH);
    uint32_t offset = panel_offset<TILE_ROWS>(row, chunk);
    store_chunk(tile + offset, q);
    store_chunk(tile + RowTileLayout<WIDTH>::D_OUT + offset, d_out);
    float4* d_q =
        reinterpret_cast<float4*>(scratch.d_q_sums + (tile_index * TILE_ROWS + row) * WIDTH);
    d_q[chunk] = d_q[LANES + chunk] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (chunk != 0) return;
    store_row_statistics<WIDTH>(tile, row, statistics);
    if (row == 0 && scratch.semaphores != nullptr) scratch.semaphores[tile_index] = 0;
    // The output of a head with weight 0 is 0, so delta cannot be recovered from the output.
    if (exists) params.delta[pair] = weight != 0.0f ? weighted_delta / weight : 0.0f;
}

// ---- after the backward pass ----

// Writes the query gradients of one row tile.
template <int WIDTH>
static __device__ __forceinline__ void finish(const Parameters& params, const Scratch& scratch) {
    Segment segment = make_segment(params, blockIdx.y, blockIdx.z);
    uint32_t start = blockIdx.x * TILE_ROWS;
    if (start >= segment.count) return;
    uint64_t tile_index = first_row_tile(params, segment) + blockIdx.x;
    constexpr int HALF = WIDTH / 2;
    uint32_t half = threadIdx.x / WARPGROUP, thread = threadIdx.x % WARPGROUP;
    const float4* source = reinterpret_cast<const float4*>(
        scratch.d_q_sums + tile_index * TILE_ROWS * WIDTH + half * TILE_ROWS * HALF);
    float sums[HALF / 2];
#pragma unroll
    for (int n = 0; n < HALF / 8; ++n) {
        float4 four = source[n * WARPGROUP + thread];
        sums[4 * n] = four.x;
        sums[4 * n + 1] = four.y;
        sums[4 * n + 2] = four.z;
        sums[4 * n + 3] = four.w;
    }
    DYNAMIC_SHARED(shared);
    stage_sums<TILE_ROWS>(shared, thread / 32 * 16, sums, params.scale, params.scale,
                          half * (HALF / 8));
    __syncthreads();
    auto target = [&](uint32_t row) -> bf16* {
        if (start + row >= segment.count) return nullptr;
        uint32_t packed = segment.row(start + row), in_sequence = packed / segment.group;
        uint32_t token = segment.sequence * params.query_length + in_sequence;
        uint32_t head = segment.kv_head * segment.group + packed % segment.group;
        return params.d_q + token * params.d_q_stride + head * WIDTH;
    };
    store_panel_rows<WIDTH, TILE_ROWS, FINISH_THREADS>(shared, 0, TILE_ROWS, threadIdx.x, target);
}

}  // namespace hopper_attention
