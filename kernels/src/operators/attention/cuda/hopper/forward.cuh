// Forward pass: one block per multiprocessor computes tiles of 128 packed rows, 128 keys at a time.
//
// One warpgroup loads the inputs of the other two warpgroups. It loads the queries of the next tile while the
// last keys of this tile are in use. It loads keys and values in two stages each, latest keys first. Two warpgroups
// compute 64 rows each: one computes its softmax while the other multiplies. Each starts the next scores before it
// uses the current probabilities. Probabilities stay in registers between the two matmuls. A thread has 232 registers
// for the matmuls, 40 for the copies. Head dimension 128 needs 197 KiB of shared memory.
#pragma once

#include "panels.cuh"

namespace hopper_attention {

constexpr int FORWARD_COPY_REGISTERS = 40;
constexpr int FORWARD_MMA_REGISTERS = 232;

// Named barriers, for each MMA warpgroup: it may start its matmuls; all of its threads have arrived.
constexpr uint32_t ORDER_BARRIER = 1;
constexpr uint32_t GROUP_BARRIER = 3;
// All threads of the copying warpgroup have arrived.
constexpr uint32_t COPY_BARRIER = 5;

// A tile of rows, which the copying warpgroup passes to the other warpgroups.
struct ForwardTile {
    uint32_t sequence, kv_head, start;
    // Rows of the segment in the tile; 0 if no tile is left.
    uint32_t rows;
};

// Shared memory of a block.
template <int WIDTH>
struct ForwardMemory {
    static constexpr uint32_t Q_BYTES = tile_bytes(64, WIDTH);
    static constexpr uint32_t KEY_BYTES = tile_bytes(TILE_KEYS, WIDTH);
    static constexpr uint32_t ROW_BYTES = 4 * FORWARD_ROWS * 4;
    static constexpr uint32_t KEYS = 2 * STAGES * Q_BYTES;
    static constexpr uint32_t ROWS = KEYS + 2 * STAGES * KEY_BYTES;
    static constexpr uint32_t TILES = ROWS + STAGES * ROW_BYTES;
    static constexpr uint32_t BARRIERS = TILES + STAGES * sizeof(ForwardTile);
    unsigned char* memory;

    // Queries of a warpgroup for tile `index` of this block.
    __device__ __forceinline__ unsigned char* q(uint32_t index, uint32_t group) const {
        return memory + (index % STAGES * 2 + group) * Q_BYTES;
    }
    __device__ __forceinline__ SharedAddress k(uint32_t index) const {
        return shared_address(memory) + KEYS + index % STAGES * KEY_BYTES;
    }
    __device__ __forceinline__ SharedAddress v(uint32_t index) const {
        return k(index) + STAGES * KEY_BYTES;
    }
    __device__ __forceinline__ RowTile<FORWARD_ROWS> rows(uint32_t index) const {
        return RowTile<FORWARD_ROWS>(memory + ROWS + index % STAGES * ROW_BYTES);
    }
    __device__ __forceinline__ ForwardTile& tile(uint32_t index) const {
        return reinterpret_cast<ForwardTile*>(memory + TILES)[index % STAGES];
    }
    __device__ __forceinline__ Ring<STAGES> ring(uint32_t index) const {
        return {shared_address(memory) + BARRIERS + index * Ring<STAGES>::BYTES};
    }
    __device__ __forceinline__ Ring<STAGES> tile_ring() const { return ring(0); }
    __device__ __forceinline__ Ring<STAGES> k_ring() const { return ring(1); }
    __device__ __forceinline__ Ring<STAGES> v_ring() const { return ring(2); }
};

// The tiles of keys that at least one row of a tile sees. Every row sees all keys of the tiles
// [unmasked, unmasked_end).
struct KeyTiles {
    uint32_t first_key, count, unmasked, unmasked_end;

    __device__ __forceinline__ explicit KeyTiles(const RowTile<FORWARD_ROWS>& rows) {
        uint32_t end = rows.end(FORWARD_ROWS - 1), all_first = rows.first(FORWARD_ROWS - 1);
        first_key = rows.first(0);
        count = end > first_key ? (end - first_key + TILE_KEYS - 1) / TILE_KEYS : 0;
        unmasked = (all_first - first_key + TILE_KEYS - 1) / TILE_KEYS;
        unmasked_end = rows.end(0) > first_key ? (rows.end(0) - first_key) / TILE_KEYS : 0;
    }

    __device__ __forceinline__ uint32_t key(uint32_t tile) const {
        return first_key + tile * TILE_KEYS;
    }
    __device__ __forceinline__ bool is_unmasked(uint32_t tile) const {
        return tile >= unmasked && tile < unmasked_end;
    }
};

// ---- copies ----

// Claims the next tile that has rows. The order alternates between heads. Within a sequence the
// longest tiles come first: later rows see more keys. The last block that finds no tile resets the
// counter to 0.
static __device__ __forceinline__ ForwardTile claim_tile(const Parameters& params,
                                                         uint32_t* next_tile) {
    uint32_t all_rows = params.query_length * (params.heads / params.kv_heads);
    uint32_t in_sequence = (all_rows + FORWARD_ROWS - 1) / FORWARD_ROWS * params.kv_heads;
    uint32_t count = params.batch * in_sequence;
    while (true) {
        uint32_t item = atomicAdd(next_tile, 1u);
        if (item >= count) {
            if (item == count + gridDim.x - 1) *next_tile = 0;
            return {0, 0, 0, 0};
        }
        uint32_t sequence = item / in_sequence, rank = item % in_sequence / params.kv_heads;
        uint32_t kv_head = item % params.kv_heads;
        Segment segment = make_segment(params, kv_head, sequence);
        uint32_t tiles = (segment.count + FORWARD_ROWS - 1) / FORWARD_ROWS;
        if (rank >= tiles) continue;
        uint32_t start = (tiles - 1 - rank) * FORWARD_ROWS;
        return {sequence, kv_head, start, min(uint32_t(FORWARD_ROWS), segment.count - start)};
    }
}

// Starts the copies of the queries of a tile. All threads of the warpgroup call it.
template <int WIDTH>
static __device__ __forceinline__ void copy_queries(const Parameters& params,
                                                    const RowTile<FORWARD_ROWS>& rows,
                                                    const ForwardMemory<WIDTH>& memory,
                                                    uint32_t index) {
    constexpr int CHUNKS = WIDTH / 8;
    SharedAddress tile = shared_address(memory.q(index, 0));
#pragma unroll 4
    for (int i = 0; i < FORWARD_ROWS * CHUNKS / WARPGROUP; ++i) {
        uint32_t part = i * WARPGROUP + threadIdx.x, row = part / CHUNKS, chunk = part % CHUNKS;
        const bf16* q = params.q + rows.token(row) * params.q_stride + rows.head(row) * WIDTH;
        SharedAddress target = tile + row / 64 * ForwardMemory<WIDTH>::Q_BYTES;
        cp_async_16(target + panel_offset<64>(row % 64, chunk), q + chunk * 8, true);
    }
    cp_async_commit();
}

// Starts the copies of the tiles of keys from the last to the first, the order of their use.
// `index` is the number of earlier copies. One thread calls it.
template <int WIDTH>
static __device__ __forceinline__ void copy_key_tiles(const Maps& maps, const Segment& segment,
                                                      const KeyTiles& tiles,
                                                      const ForwardMemory<WIDTH>& memory,
                                                      uint32_t index) {
    constexpr uint32_t BYTES = ForwardMemory<WIDTH>::KEY_BYTES;
    Ring<STAGES> k_ring = memory.k_ring(), v_ring = memory.v_ring();
#pragma unroll 1
    for (uint32_t left = tiles.count; left > 0; --left, ++index) {
        if (left == tiles.count) {
            k_ring.begin_fill(index, BYTES);
            copy_keys<WIDTH>(memory.k(index), &maps.k, segment, tiles.key(left - 1),
                             k_ring.full(index));
        }
        // The next scores start before these values are used.
        if (left > 1) {
            k_ring.begin_fill(index + 1, BYTES);
            copy_keys<WIDTH>(memory.k(index + 1), &maps.k, segment, tiles.key(left - 2),
                             k_ring.full(index + 1));
        }
        v_ring.begin_fill(index, BYTES);
        copy_keys<WIDTH>(memory.v(index), &maps.v, segment, tiles.key(left - 1),
                         v_ring.full(index));
    }
}

// The copying warpgroup: claims and loads tiles until no tile is left.
template <int WIDTH>
static __device__ __forceinline__ void load_tiles(const Parameters& params, const Maps& maps,
                                                  uint32_t* next_tile,
                                                  const ForwardMemory<WIDTH>& memory) {
    Ring<STAGES> ring = memory.tile_ring();
    uint32_t keys = 0;
#pragma unroll 1
    for (uint32_t index = 0;; ++index) {
        if (threadIdx.x == 0) {
            ring.wait_empty(index);
            memory.tile(index) = claim_tile(params, next_tile);
        }
        __syncwarp();
        named_sync(COPY_BARRIER, WARPGROUP);
        ForwardTile tile = memory.tile(index);
        if (tile.rows != 0) {
            RowTile<FORWARD_ROWS> rows = memory.rows(index);
            Segment segment = make_segment(params, tile.kv_head, tile.sequence);
            rows.load(params, segment, tile.start);
            named_sync(COPY_BARRIER, WARPGROUP);
            copy_queries(params, rows, memory, index);
            cp_async_wait<0>();
            fence_async_proxy();
            barrier_arrive(ring.full(index));
            KeyTiles tiles(rows);
            if (threadIdx.x == 0) copy_key_tiles(maps, segment, tiles, memory, keys);
            keys += tiles.count;
        } else {
            barrier_arrive(ring.full(index));
            return;
        }
    }
}

// ---- matmuls ----

// For a lane's two rows: the largest score, and the lane's part of the sum of exponentials.
struct RowSums {
    float largest[2] = {LOWEST_SCORE, LOWEST_SCORE};
    float sum[2] = {0.0f, 0.0f};
};

// The maximum over the four lanes that share a row.
static __device__ __forceinline__ float quad_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 1));
    return fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 2));
}

static __device__ __forceinline__ float quad_sum(float value) {
    value += __shfl_xor_sync(ALL_LANES, value, 1);
    return value + __shfl_xor_sync(ALL_LANES, value, 2);
}

constexpr int SCORES = TILE_KEYS / 2;

// Replaces scores by exponentials relative to the largest score so far. Earlier results must be
// multiplied by `rescale`.
static __device__ __forceinline__ void online_softmax(float (&scores)[SCORES], RowSums& sums,
                                                      float (&rescale)[2], float scale_log2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float largest = sums.largest[half];
#pragma unroll
        for (int n = 0; n < SCORES / 4; ++n)
            largest = fmaxf(largest, fmaxf(scores[4 * n + 2 * half], scores[4 * n + 2 * half + 1]));
        largest = quad_max(largest);
        rescale[half] = exp2_fast((sums.largest[half] - largest) * scale_log2);
        float offset = largest * scale_log2, sum = sums.sum[half] * rescale[half];
        sums.largest[half] = largest;
#pragma unroll
        for (int n = 0; n < SCORES / 4; ++n)
#pragma unroll
            for (int i = 4 * n + 2 * half; i < 4 * n + 2 * half + 2; ++i) {
                scores[i] = exp2_fast(fmaf(scores[i], scale_log2, -offset));
                sum += scores[i];
            }
        sums.sum[half] = sum;
    }
}

// The state of an MMA warpgroup while it visits the tiles of keys.
template <int WIDTH>
struct ForwardGroup {
    uint32_t group;
    // Keys [first, end) that the lane's two rows see, minus the lane's first column.
    int first[2], end[2];
    float scale_log2;
    ForwardMemory<WIDTH> memory;
    Ring<STAGES> k_ring, v_ring;
    // The numbers of row tiles and key tiles used before.
    uint32_t row_tiles, key_tiles;
    RowOperand<64> q;
    float out[WIDTH / 2];
    uint32_t p[SCORES / 8][4];
    RowSums sums;

    __device__ __forceinline__ ForwardGroup(const Parameters& params,
                                            const ForwardMemory<WIDTH>& memory, uint32_t group,
                                            uint32_t row_tiles, uint32_t key_tiles)
        : group(group),
          scale_log2(params.scale * LOG2_E),
          memory(memory),
          k_ring(memory.k_ring()),
          v_ring(memory.v_ring()),
          row_tiles(row_tiles),
          key_tiles(key_tiles),
          q(shared_address(memory.q(row_tiles, group))) {
        clear_sums(out);
        RowTile<FORWARD_ROWS> rows = memory.rows(row_tiles);
        uint32_t thread = threadIdx.x % WARPGROUP, row = group * 64 + thread / 32 * 16;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t own = row + 8 * half + thread % 32 / 4;
            first[half] = int(rows.first(own) - thread % 4 * 2);
            end[half] = int(rows.end(own) - thread % 4 * 2);
        }
    }

    __device__ __forceinline__ void start_scores(float (&scores)[SCORES], uint32_t index) const {
        k_ring.wait_full(index);
        start_rows<WIDTH>(scores, q, RowOperand<TILE_KEYS>(memory.k(index)));
    }

    __device__ __forceinline__ void start_values(uint32_t index) {
        start_columns(out, p, ColumnOperand<TILE_KEYS>(memory.v(index)));
    }

    __device__ __forceinline__ void mask(float (&scores)[SCORES], uint32_t key) const {
#pragma unroll
        for (int i = 0; i < SCORES; ++i) {
            int column = int(key) + i / 4 * 8 + i % 2, half = i / 2 % 2;
            if (column < first[half] || column >= end[half]) scores[i] = minus_infinity();
        }
    }

    // Computes the scores of the first visited tile.
    __device__ __forceinline__ void begin(uint32_t key) {
        float scores[SCORES], rescale[2];
        start_scores(scores, key_tiles);
        wgmma_wait<0>();
        fence_operand(scores);
        k_ring.release(key_tiles);
        mask(scores, key);
        online_softmax(scores, sums, rescale, scale_log2);
        to_fragments(scores, p);
        v_ring.wait_full(key_tiles);
    }

    // Uses the values of tile `index`, and computes the scores of the next tile, which starts at `key`.
    // Afterwards the other warpgroup may start its matmuls, except after the last step of group 1.
    template <bool MASKED>
    __device__ __forceinline__ void step(uint32_t index, uint32_t key, bool is_last) {
        float scores[SCORES], rescale[2];
        named_sync(ORDER_BARRIER + group, MMA_THREADS);
        start_scores(scores, index + 1);
        start_values(index);
        if (group == 0 || !is_last) named_arrive(ORDER_BARRIER + (group ^ 1), MMA_THREADS);
        wgmma_wait<1>();
        fence_operand(scores);
        k_ring.release(index + 1);
        if (MASKED) mask(scores, key);
        online_softmax(scores, sums, rescale, scale_log2);
        // Exponentials must be computed while the values are multiplied: the assembler does not
        // move them past the following wait.
        fence_operand(scores);
        v_ring.wait_full(index + 1);
        wgmma_wait<0>();
        fence_operand(out);
        v_ring.release(index);
#pragma unroll
        for (int i = 0; i < WIDTH / 2; ++i) out[i] *= rescale[i / 2 % 2];
        to_fragments(scores, p);
    }

    __device__ __forceinline__ void finish(uint32_t index) {
        start_values(index);
        wgmma_wait<0>();
        fence_operand(out);
        v_ring.release(index);
    }

    // Visits the tiles from the last to the first.
    __device__ __forceinline__ void visit(const KeyTiles& tiles) {
        // The first warpgroup may start.
        if (group == 1 && tiles.count > 1) named_arrive(ORDER_BARRIER, MMA_THREADS);
        begin(tiles.key(tiles.count - 1));
        uint32_t index = key_tiles, left = tiles.count - 1;
        while (left > 0) {
#pragma unroll 1
            for (; left > 0 && !tiles.is_unmasked(left - 1); --left, ++index)
                step<true>(index, tiles.key(left - 1), left == 1);
#pragma unroll 1
            for (; left > 0 && tiles.is_unmasked(left - 1); --left, ++index)
                step<false>(index, tiles.key(left - 1), left == 1);
        }
        finish(index);
    }

    // Writes outputs, staged in the warp's own rows of the queries, and log_sum_exp.
    __device__ __forceinline__ void store(const Parameters& params, uint32_t valid) {
        RowTile<FORWARD_ROWS> rows = memory.rows(row_tiles);
        unsigned char* matrix = memory.q(row_tiles, group);
        uint32_t lane = threadIdx.x % 32, warp_row = threadIdx.x % WARPGROUP / 32 * 16;
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t row = group * 64 + warp_row + 8 * half + lane / 4;
            uint64_t pair = rows.pair(params, row);
            float sum = quad_sum(sums.sum[half]);
            float weight = params.weights != nullptr ? params.weights[pair] : 1.0f;
            factor[half] = sum > 0.0f ? weight / sum : 0.0f;
            if (lane % 4 == 0 && row < valid)
                params.log_sum_exp[pair] = sums.largest[half] * params.scale + logf(sum);
        }
        // No warp reads these queries any more.
        named_sync(GROUP_BARRIER + group, WARPGROUP);
        stage_sums<64>(matrix, warp_row, out, factor[0], factor[1]);
        __syncwarp();
        auto target = [&](uint32_t row) -> bf16* {
            uint32_t tile_row = group * 64 + row;
            return tile_row < valid ? params.out + rows.pair(params, tile_row) * WIDTH : nullptr;
        };
        store_panel_rows<WIDTH, 64, 32>(matrix, warp_row, 16, lane, target);
    }
};

// One of the two MMA warpgroups.
template <int WIDTH>
static __device__ __forceinline__ void compute_tiles(const Parameters& params,
                                                     const ForwardMemory<WIDTH>& memory,
                                                     uint32_t group) {
    Ring<STAGES> ring = memory.tile_ring();
    uint32_t key_tiles = 0;
#pragma unroll 1
    for (uint32_t index = 0;; ++index) {
        ring.wait_full(index);
        uint32_t valid = memory.tile(index).rows;
        if (valid == 0) return;
        KeyTiles tiles(memory.rows(index));
        ForwardGroup<WIDTH> state(params, memory, group, index, key_tiles);
        if (tiles.count > 0) state.visit(tiles);
        state.store(params, valid);
        __syncwarp();
        ring.release(index);
        key_tiles += tiles.count;
    }
}

template <int WIDTH>
static __device__ __forceinline__ void forward(const Parameters& params, const Scratch& scratch,
                                               const Maps& maps) {
    DYNAMIC_SHARED(shared);
    ForwardMemory<WIDTH> memory{shared};
    if (threadIdx.x == 0) {
        prefetch_tensor_map(&maps.k);
        prefetch_tensor_map(&maps.v);
        memory.tile_ring().init(WARPGROUP);
        memory.k_ring().init();
        memory.v_ring().init();
        barrier_init_fence();
    }
    __syncthreads();
    uint32_t warpgroup = uniform(threadIdx.x / WARPGROUP);
    if (warpgroup == 0) {
        deallocate_registers<FORWARD_COPY_REGISTERS>();
        load_tiles(params, maps, scratch.next_tile, memory);
    } else {
        allocate_registers<FORWARD_MMA_REGISTERS>();
        compute_tiles(params, memory, warpgroup - 1);
    }
}

}  // namespace hopper_attention
