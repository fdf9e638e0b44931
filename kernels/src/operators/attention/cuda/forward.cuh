// Forward pass: one block per tile of 128 packed rows, 4 warps of 32 rows, 64 keys at a time.
//
// Values are copied while scores are computed, and the next keys while the values are used. One
// tile of keys and one of values therefore suffice, and two blocks share a multiprocessor. Probabilities
// stay in registers between the two matmuls.
#pragma once

#include "tile.cuh"

namespace tiled_attention {

// The rows of a warp, as two fragments of 16 rows: sums of P V, and for a lane's four rows the
// largest score and this lane's part of the sum of exponentials.
template <int WIDTH>
struct ForwardState {
    float out[2][WIDTH / 8][4];
    float largest[2][2], sum[2][2];
};

// The largest value of the four lanes that share a row.
static __device__ __forceinline__ float row_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 1));
    return fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 2));
}

static __device__ __forceinline__ float row_sum(float value) {
    value += __shfl_xor_sync(ALL_LANES, value, 1);
    return value + __shfl_xor_sync(ALL_LANES, value, 2);
}

// Replaces scores by exponentials relative to the largest score so far, and rescales the sums, which are
// relative to an earlier maximum.
template <int WIDTH>
static __device__ __forceinline__ void online_softmax(float (&scores)[2][FORWARD_KEYS / 8][4],
                                                      ForwardState<WIDTH>& state,
                                                      float scale_log2) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float largest = state.largest[m][half];
#pragma unroll
            for (int n = 0; n < FORWARD_KEYS / 8; ++n)
                largest = fmaxf(largest, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
            largest = row_max(largest);
            float rescale = exp2_fast((state.largest[m][half] - largest) * scale_log2);
            float offset = largest * scale_log2, sum = state.sum[m][half] * rescale;
            state.largest[m][half] = largest;
#pragma unroll
            for (int n = 0; n < FORWARD_KEYS / 8; ++n)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; ++i) {
                    scores[m][n][i] = exp2_fast(fmaf(scores[m][n][i], scale_log2, -offset));
                    sum += scores[m][n][i];
                }
            state.sum[m][half] = sum;
#pragma unroll
            for (int n = 0; n < WIDTH / 8; ++n) {
                state.out[m][n][2 * half] *= rescale;
                state.out[m][n][2 * half + 1] *= rescale;
            }
        }
}

// Writes the warp's outputs, staged in its own rows of the query tile, and their log_sum_exp.
template <int WIDTH>
static __device__ __forceinline__ void store_outputs(const Parameters& params,
                                                     const RowTile<FORWARD_ROWS>& rows,
                                                     ForwardState<WIDTH>& state,
                                                     unsigned char* tile, uint32_t first_row,
                                                     uint32_t valid) {
    uint32_t lane = threadIdx.x % 32;
    // The other lanes may still read the queries.
    __syncwarp();
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t row = first_row + 16 * m + 8 * half + lane / 4;
            uint64_t pair = rows.pair(params, row);
            float sum = row_sum(state.sum[m][half]);
            float weight = params.weights != nullptr ? params.weights[pair] : 1.0f;
            factor[half] = sum > 0.0f ? weight / sum : 0.0f;
            if (lane % 4 == 0 && row < valid)
                params.log_sum_exp[pair] = state.largest[m][half] * params.scale + logf(sum);
        }
        stage_fragments<WIDTH>(tile, first_row + 16 * m, state.out[m], factor[0], factor[1]);
    }
    __syncwarp();
    bool wide = is_aligned(params.out, params.head_dim);
    auto target = [&](uint32_t row) -> bf16* {
        return row < valid ? params.out + rows.pair(params, row) * params.head_dim : nullptr;
    };
    store_rows<WIDTH, 32>(tile, first_row, params.head_dim, wide, target);
}

template <int WIDTH>
static __device__ __forceinline__ void forward(const Parameters& params) {
    Segment segment = make_segment(params, blockIdx.y, blockIdx.z);
    // Later rows see more keys: the longest tiles start first.
    uint32_t start = (gridDim.x - 1 - blockIdx.x) * FORWARD_ROWS;
    if (start >= segment.count) return;

    DYNAMIC_SHARED(shared);
    unsigned char* q_memory = shared;
    SharedAddress q_tile = shared_address(shared);
    SharedAddress k_tile = q_tile + tile_bytes(FORWARD_ROWS, WIDTH);
    SharedAddress v_tile = k_tile + tile_bytes(FORWARD_KEYS, WIDTH);
    RowTile<FORWARD_ROWS> rows(shared + tile_bytes(FORWARD_ROWS + 2 * FORWARD_KEYS, WIDTH));
    rows.load(params, segment, start);
    __syncthreads();

    bool wide = inputs_are_wide(params);
    load_tile<WIDTH, FORWARD_ROWS, FORWARD_THREADS>(
        q_tile, params.head_dim, wide, [&](uint32_t row, bool& valid) {
            valid = true;
            return params.q + rows.token(row) * params.q_stride + rows.head(row) * params.head_dim;
        });
    uint32_t key = rows.first(0), end = rows.end(FORWARD_ROWS - 1);
    if (key < end)
        load_keys<WIDTH, FORWARD_KEYS, FORWARD_THREADS>(params, segment, params.k, key, k_tile,
                                                        wide);
    cp_async_commit();

    uint32_t first_row = threadIdx.x / 32 * 32;
    LaneTile<WIDTH> q_lane = lane_rows<WIDTH>(q_tile, first_row);
    LaneTile<WIDTH> k_lane = lane_rows<WIDTH>(k_tile), v_lane = lane_rows<WIDTH>(v_tile);
    float scale_log2 = params.scale * LOG2_E;
    ForwardState<WIDTH> state;
    clear(state.out);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        state.largest[i / 2][i % 2] = LOWEST_SCORE;
        state.sum[i / 2][i % 2] = 0.0f;
    }
    for (; key < end; key += FORWARD_KEYS) {
        // The keys have been copied, and no warp reads the earlier values any more.
        cp_async_wait<0>();
        __syncthreads();
        load_keys<WIDTH, FORWARD_KEYS, FORWARD_THREADS>(params, segment, params.v, key, v_tile,
                                                        wide);
        cp_async_commit();
        float scores[2][FORWARD_KEYS / 8][4];
        clear(scores);
        multiply_rows<WIDTH>(scores, k_lane, [&](int m, int k, uint32_t (&a)[4]) {
            ldmatrix_x4(a, q_lane.at(16 * m, 2 * k));
        });
        // The values have been copied, and no warp reads the keys any more.
        cp_async_wait<0>();
        __syncthreads();
        if (key + FORWARD_KEYS < end)
            load_keys<WIDTH, FORWARD_KEYS, FORWARD_THREADS>(params, segment, params.k,
                                                            key + FORWARD_KEYS, k_tile, wide);
        cp_async_commit();
        if (!rows.see_all(key, FORWARD_KEYS)) mask_scores(scores, rows, first_row, key);
        online_softmax(scores, state, scale_log2);
        multiply_columns<WIDTH>(state.out, scores, v_lane);
    }
    cp_async_wait<0>();
    store_outputs(params, rows, state, q_memory, first_row,
                  min(uint32_t(FORWARD_ROWS), segment.count - start));
}

}  // namespace tiled_attention
