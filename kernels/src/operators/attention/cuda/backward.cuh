// Backward pass in two kernels that write each gradient once, in a fixed order of sums:
//   dq    one block per tile of 128 packed rows, 8 warps of 16 rows, 64 keys at a time;
//   dkdv  one block per tile of 128 keys, 8 warps of 16 keys, 64 or 32 packed rows at a time.
//
// With P the probabilities, w the row's weight, dP = dO V^T and delta = <dO, O>:
//   dS = w P (dP - delta), dQ = dS K scale, dK = dS^T Q scale, dV = (w P)^T dO.
// dkdv computes the transposed scores K Q^T, so that both kernels pass P and dS in registers. The
// next tile is copied while the current tile is in use.
#pragma once

#include "tile.cuh"

namespace tiled_attention {

// ---- gradient of the queries ----

// A warp's 16 rows: fragments of queries and output gradients, and for a lane's two rows
// log_sum_exp in powers of two, delta and weight.
template <int WIDTH>
struct QueryRows {
    uint32_t q[WIDTH / 16][4], d_out[WIDTH / 16][4];
    float log_sum_exp[2], delta[2], weight[2];
};

// Loads queries and output gradients into registers through the two stages of keys and values.
template <int WIDTH>
static __device__ __forceinline__ void load_queries(const Parameters& params,
                                                    const RowTile<DQ_ROWS>& rows,
                                                    SharedAddress q_tile, SharedAddress d_out_tile,
                                                    QueryRows<WIDTH>& queries) {
    bool wide = inputs_are_wide(params);
    load_tile<WIDTH, DQ_ROWS, DQ_THREADS>(
        q_tile, params.head_dim, wide, [&](uint32_t row, bool& valid) {
            valid = true;
            return params.q + rows.token(row) * params.q_stride + rows.head(row) * params.head_dim;
        });
    load_tile<WIDTH, DQ_ROWS, DQ_THREADS>(
        d_out_tile, params.head_dim, wide, [&](uint32_t row, bool& valid) {
            valid = true;
            return params.d_out + rows.pair(params, row) * params.head_dim;
        });
    cp_async_commit();
    uint32_t first_row = threadIdx.x / 32 * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint64_t pair = rows.pair(params, first_row + 8 * half + threadIdx.x % 32 / 4);
        queries.log_sum_exp[half] = params.log_sum_exp[pair] * LOG2_E;
        queries.delta[half] = params.delta[pair];
        queries.weight[half] = params.weights != nullptr ? params.weights[pair] : 1.0f;
    }
    cp_async_wait<0>();
    __syncthreads();
    LaneTile<WIDTH> q_lane = lane_rows<WIDTH>(q_tile, first_row);
    LaneTile<WIDTH> d_out_lane = lane_rows<WIDTH>(d_out_tile, first_row);
#pragma unroll
    for (int k = 0; k < WIDTH / 16; ++k) {
        ldmatrix_x4(queries.q[k], q_lane.at(0, 2 * k));
        ldmatrix_x4(queries.d_out[k], d_out_lane.at(0, 2 * k));
    }
    __syncthreads();
}

// d_q += dS K for one tile of keys and values.
template <int WIDTH>
static __device__ __forceinline__ void add_query_gradient(
    float (&d_q)[1][WIDTH / 8][4], const QueryRows<WIDTH>& queries, const RowTile<DQ_ROWS>& rows,
    SharedAddress k_tile, SharedAddress v_tile, uint32_t key, float scale_log2) {
    float p[1][DQ_KEYS / 8][4], d_p[1][DQ_KEYS / 8][4];
    clear(p);
    multiply_rows<WIDTH>(p, lane_rows<WIDTH>(k_tile), [&](int, int k, uint32_t (&a)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = queries.q[k][i];
    });
    if (!rows.see_all(key, DQ_KEYS)) mask_scores(p, rows, threadIdx.x / 32 * 16, key);
#pragma unroll
    for (int n = 0; n < DQ_KEYS / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            p[0][n][i] = exp2_fast(fmaf(p[0][n][i], scale_log2, -queries.log_sum_exp[i / 2])) *
                         queries.weight[i / 2];
    clear(d_p);
    multiply_rows<WIDTH>(d_p, lane_rows<WIDTH>(v_tile), [&](int, int k, uint32_t (&a)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = queries.d_out[k][i];
    });
#pragma unroll
    for (int n = 0; n < DQ_KEYS / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) p[0][n][i] *= d_p[0][n][i] - queries.delta[i / 2];
    multiply_columns<WIDTH>(d_q, p, lane_rows<WIDTH>(k_tile));
}

template <int WIDTH>
static __device__ __forceinline__ void backward_dq(const Parameters& params) {
    Segment segment = make_segment(params, blockIdx.y, blockIdx.z);
    // Later rows see more keys: the longest tiles start first.
    uint32_t start = (gridDim.x - 1 - blockIdx.x) * DQ_ROWS;
    if (start >= segment.count) return;

    DYNAMIC_SHARED(shared);
    constexpr int TILE = tile_bytes(DQ_KEYS, WIDTH);
    SharedAddress stages = shared_address(shared);
    RowTile<DQ_ROWS> rows(shared + 4 * TILE);
    rows.load(params, segment, start);
    __syncthreads();
    QueryRows<WIDTH> queries;
    load_queries<WIDTH>(params, rows, stages, stages + 2 * TILE, queries);

    bool wide = inputs_are_wide(params);
    auto load_stage = [&](uint32_t key, uint32_t stage) {
        SharedAddress tile = stages + stage * (2 * TILE);
        load_keys<WIDTH, DQ_KEYS, DQ_THREADS>(params, segment, params.k, key, tile, wide);
        load_keys<WIDTH, DQ_KEYS, DQ_THREADS>(params, segment, params.v, key, tile + TILE, wide);
    };
    uint32_t key = rows.first(0), end = rows.end(DQ_ROWS - 1), stage = 0;
    if (key < end) load_stage(key, stage);
    cp_async_commit();
    float d_q[1][WIDTH / 8][4];
    clear(d_q);
    for (; key < end; key += DQ_KEYS, stage ^= 1) {
        // This stage has been copied, and no warp reads the other stage any more.
        cp_async_wait<0>();
        __syncthreads();
        if (key + DQ_KEYS < end) load_stage(key + DQ_KEYS, stage ^ 1);
        cp_async_commit();
        SharedAddress k_tile = stages + stage * (2 * TILE);
        add_query_gradient<WIDTH>(d_q, queries, rows, k_tile, k_tile + TILE, key,
                                  params.scale * LOG2_E);
    }
    cp_async_wait<0>();
    __syncthreads();
    uint32_t first_row = threadIdx.x / 32 * 16;
    uint32_t valid = min(uint32_t(DQ_ROWS), segment.count - start);
    stage_fragments<WIDTH>(shared, first_row, d_q[0], params.scale, params.scale);
    __syncwarp();
    bool wide_out = is_aligned(params.d_q, params.d_q_stride | params.head_dim);
    auto target = [&](uint32_t row) -> bf16* {
        if (row >= valid) return nullptr;
        return params.d_q + rows.token(row) * params.d_q_stride + rows.head(row) * params.head_dim;
    };
    store_rows<WIDTH, 16>(shared, first_row, params.head_dim, wide_out, target);
}

// ---- gradients of the keys and values ----

// One of two stages of packed rows: queries, output gradients, and the statistics of each row.
template <int WIDTH, int ROWS>
struct RowStage {
    SharedAddress q, d_out;
    uint32_t *first, *end;
    float *log_sum_exp, *delta, *weight;
    // The packed rows themselves are copied one tile earlier than the rest.
    uint32_t* packed;

    __device__ __forceinline__ RowStage(unsigned char* tiles, unsigned char* statistics,
                                        uint32_t stage) {
        constexpr int TILE = tile_bytes(ROWS, WIDTH);
        q = shared_address(tiles) + stage * (2 * TILE);
        d_out = q + TILE;
        first = reinterpret_cast<uint32_t*>(statistics) + stage * (6 * ROWS);
        end = first + ROWS;
        packed = end + ROWS;
        log_sum_exp = reinterpret_cast<float*>(packed + ROWS);
        delta = log_sum_exp + ROWS;
        weight = delta + ROWS;
    }
};

// The packed rows [begin, end) of a segment that see at least one key of a tile.
struct RowRange {
    uint32_t begin, end;
};

static __device__ __forceinline__ RowRange rows_seeing(const Parameters& params,
                                                       const Segment& segment, uint32_t key) {
    uint32_t first_token = 0, end_token = params.query_length;
    if (params.causal && key > params.query_offset) first_token = key - params.query_offset;
    if (params.document_start != nullptr) {
        // The first token with keys that all start after this tile.
        const uint32_t* first_key = params.document_start + segment.sequence * params.query_length;
        uint32_t low = 0;
        while (low < end_token) {
            uint32_t middle = (low + end_token) / 2;
            if (first_key[middle] < key + DKDV_KEYS)
                low = middle + 1;
            else
                end_token = middle;
        }
    }
    if (first_token >= end_token) return {0, 0};
    return {segment.rows_before(first_token), segment.rows_before(end_token)};
}

// Starts the copy of the packed rows, starting at `row`.
template <int WIDTH, int ROWS>
static __device__ __forceinline__ void load_packed(const Segment& segment, uint32_t row,
                                                   uint32_t end, const RowStage<WIDTH, ROWS>& stage) {
    if (segment.rows == nullptr || threadIdx.x >= ROWS) return;
    bool valid = row + threadIdx.x < end;
    cp_async_4(shared_address(stage.packed + threadIdx.x),
               segment.rows + (valid ? row + threadIdx.x : 0), valid);
}

// Starts the copy of the statistics of each row, by one thread per row. Rows that do not exist are
// filled with zeros: their queries and output gradients are zero too, so they add nothing.
template <int WIDTH, int ROWS>
static __device__ __forceinline__ void load_statistics(const Parameters& params,
                                                       const RowStage<WIDTH, ROWS>& stage,
                                                       uint32_t r, uint32_t in_sequence,
                                                       uint32_t token, uint32_t head, bool valid) {
    uint64_t pair = uint64_t(token) * params.heads + head;
    stage.end[r] = key_end(params, in_sequence);
    cp_async_4(shared_address(stage.log_sum_exp + r), params.log_sum_exp + pair, valid);
    cp_async_4(shared_address(stage.delta + r), params.delta + pair, valid);
    if (params.weights != nullptr)
        cp_async_4(shared_address(stage.weight + r), params.weights + pair, valid);
    else
        stage.weight[r] = 1.0f;
    if (params.document_start != nullptr)
        cp_async_4(shared_address(stage.first + r), params.document_start + token, valid);
    else
        stage.first[r] = 0;
}

// Starts the copy of the rows, starting at `row`; their packed rows have been copied.
template <int WIDTH, int ROWS>
static __device__ __forceinline__ void load_rows(const Parameters& params, const Segment& segment,
                                                 uint32_t row, uint32_t end,
                                                 const RowStage<WIDTH, ROWS>& stage, bool wide) {
    for_each_chunk<WIDTH, ROWS, DKDV_THREADS, 16>([&](uint32_t r, uint32_t chunk) {
        bool valid = row + r < end;
        uint32_t packed = segment.rows != nullptr ? stage.packed[r] : row + r;
        packed = valid ? packed : 0;
        uint32_t in_sequence = packed / segment.group;
        uint32_t token = segment.sequence * params.query_length + in_sequence;
        uint32_t head = segment.kv_head * segment.group + packed - in_sequence * segment.group;
        uint32_t offset = tile_offset<WIDTH>(r, chunk);
        const bf16* q = params.q + token * params.q_stride + head * params.head_dim;
        const bf16* d_out =
            params.d_out + (uint64_t(token) * params.heads + head) * params.head_dim;
        if (wide) {
            load_wide(stage.q + offset, q, chunk * 8, params.head_dim, valid);
            load_wide(stage.d_out + offset, d_out, chunk * 8, params.head_dim, valid);
        } else {
            load_narrow(stage.q + offset, q, chunk * 8, params.head_dim, valid);
            load_narrow(stage.d_out + offset, d_out, chunk * 8, params.head_dim, valid);
        }
        if (chunk == 0) load_statistics(params, stage, r, in_sequence, token, head, valid);
    });
}

// Gradients of a warp's 16 keys and values.
template <int WIDTH>
struct KeyGradients {
    float d_k[1][WIDTH / 8][4], d_v[1][WIDTH / 8][4];
};

// Replaces scores [16 keys][rows] by w P, which is 0 for rows that do not see the key.
template <int WIDTH, int ROWS>
static __device__ __forceinline__ void transposed_probabilities(float (&p)[1][ROWS / 8][4],
                                                                const RowStage<WIDTH, ROWS>& stage,
                                                                uint32_t key, bool masked,
                                                                float scale_log2) {
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < ROWS / 8; ++n) {
        uint32_t row = 8 * n + lane % 4 * 2;
        float2 log_sum_exp = *reinterpret_cast<const float2*>(stage.log_sum_exp + row);
        float2 weight = *reinterpret_cast<const float2*>(stage.weight + row);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float offset = (i % 2 == 0 ? log_sum_exp.x : log_sum_exp.y) * LOG2_E;
            p[0][n][i] = exp2_fast(fmaf(p[0][n][i], scale_log2, -offset)) *
                         (i % 2 == 0 ? weight.x : weight.y);
        }
    }
    if (!masked) return;
#pragma unroll
    for (int n = 0; n < ROWS / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t row = 8 * n + lane % 4 * 2 + i % 2, column = key + lane / 4 + i / 2 * 8;
            if (column < stage.first[row] || column >= stage.end[row]) p[0][n][i] = 0.0f;
        }
}

// Adds the contributions of a stage's `count` rows to the gradients of 16 keys, starting at `key`. The
// keys and values are at k_lane and v_lane.
template <int WIDTH, int ROWS>
static __device__ __forceinline__ void add_key_gradients(KeyGradients<WIDTH>& gradients,
                                                         const RowStage<WIDTH, ROWS>& stage,
                                                         uint32_t count, LaneTile<WIDTH> k_lane,
                                                         LaneTile<WIDTH> v_lane, uint32_t key,
                                                         float scale_log2) {
    // Bounds never decrease from one row to the next.
    if (key >= stage.end[count - 1] || key + 16 <= stage.first[0]) return;
    bool masked = key < stage.first[count - 1] || key + 16 > stage.end[0];
    float p[1][ROWS / 8][4], d_p[1][ROWS / 8][4];
    clear(p);
    multiply_rows<WIDTH>(p, lane_rows<WIDTH>(stage.q), [&](int, int k, uint32_t (&a)[4]) {
        ldmatrix_x4(a, k_lane.at(0, 2 * k));
    });
    transposed_probabilities(p, stage, key, masked, scale_log2);
    multiply_columns<WIDTH>(gradients.d_v, p, lane_rows<WIDTH>(stage.d_out));
    clear(d_p);
    multiply_rows<WIDTH>(d_p, lane_rows<WIDTH>(stage.d_out), [&](int, int k, uint32_t (&a)[4]) {
        ldmatrix_x4(a, v_lane.at(0, 2 * k));
    });
#pragma unroll
    for (int n = 0; n < ROWS / 8; ++n) {
        uint32_t row = 8 * n + threadIdx.x % 4 * 2;
        float2 delta = *reinterpret_cast<const float2*>(stage.delta + row);
#pragma unroll
        for (int i = 0; i < 4; ++i) p[0][n][i] *= d_p[0][n][i] - (i % 2 == 0 ? delta.x : delta.y);
    }
    multiply_columns<WIDTH>(gradients.d_k, p, lane_rows<WIDTH>(stage.q));
}

// Writes the gradients of a warp's 16 keys through its own rows of the tile.
template <int WIDTH>
static __device__ __forceinline__ void store_key_gradient(
    const Parameters& params, const Segment& segment, unsigned char* tile,
    const float (&values)[1][WIDTH / 8][4], float factor, uint32_t first_key, bf16* gradient) {
    uint32_t first_row = threadIdx.x / 32 * 16;
    stage_fragments<WIDTH>(tile, first_row, values[0], factor, factor);
    __syncwarp();
    bool wide = is_aligned(gradient, params.d_kv_stride | params.head_dim);
    auto target = [&](uint32_t row) -> bf16* {
        uint32_t key = first_key + row;
        if (key >= params.key_length) return nullptr;
        uint64_t index = uint64_t(segment.sequence) * params.key_length + key;
        return gradient + index * params.d_kv_stride + segment.kv_head * params.head_dim;
    };
    store_rows<WIDTH, 16>(tile, first_row, params.head_dim, wide, target);
}

template <int WIDTH, int ROWS>
static __device__ __forceinline__ void backward_dkdv(const Parameters& params) {
    Segment segment = make_segment(params, blockIdx.y, blockIdx.z);
    // More rows see earlier keys: the longest tiles start first.
    uint32_t first_key = blockIdx.x * DKDV_KEYS;
    RowRange range = rows_seeing(params, segment, first_key);

    DYNAMIC_SHARED(shared);
    unsigned char* v_memory = shared + tile_bytes(DKDV_KEYS, WIDTH);
    unsigned char* stages = shared + tile_bytes(2 * DKDV_KEYS, WIDTH);
    unsigned char* statistics = stages + tile_bytes(4 * ROWS, WIDTH);
    auto stage = [&](uint32_t index) {
        return RowStage<WIDTH, ROWS>(stages, statistics, index % 2);
    };
    bool wide = inputs_are_wide(params);
    load_keys<WIDTH, DKDV_KEYS, DKDV_THREADS>(params, segment, params.k, first_key,
                                              shared_address(shared), wide);
    load_keys<WIDTH, DKDV_KEYS, DKDV_THREADS>(params, segment, params.v, first_key,
                                              shared_address(v_memory), wide);
    load_packed(segment, range.begin, range.end, stage(0));
    load_packed(segment, range.begin + ROWS, range.end, stage(1));
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    if (range.begin < range.end) load_rows(params, segment, range.begin, range.end, stage(0), wide);
    cp_async_commit();

    uint32_t warp_row = threadIdx.x / 32 * 16;
    LaneTile<WIDTH> k_lane = lane_rows<WIDTH>(shared_address(shared), warp_row);
    LaneTile<WIDTH> v_lane = lane_rows<WIDTH>(shared_address(v_memory), warp_row);
    KeyGradients<WIDTH> gradients;
    clear(gradients.d_k);
    clear(gradients.d_v);
    uint32_t tile = 0;
    for (uint32_t row = range.begin; row < range.end; row += ROWS, ++tile) {
        // This stage and the next packed rows have been copied, and no warp reads the other stage
        // any more.
        cp_async_wait<0>();
        __syncthreads();
        if (row + ROWS < range.end)
            load_rows(params, segment, row + ROWS, range.end, stage(tile + 1), wide);
        load_packed(segment, row + 2 * ROWS, range.end, stage(tile));
        cp_async_commit();
        add_key_gradients(gradients, stage(tile), min(uint32_t(ROWS), range.end - row), k_lane,
                          v_lane, first_key + warp_row, params.scale * LOG2_E);
    }
    cp_async_wait<0>();
    __syncwarp();
    store_key_gradient<WIDTH>(params, segment, shared, gradients.d_k, params.scale, first_key,
                              params.d_k);
    store_key_gradient<WIDTH>(params, segment, v_memory, gradients.d_v, 1.0f, first_key,
                              params.d_v);
}

}  // namespace tiled_attention
