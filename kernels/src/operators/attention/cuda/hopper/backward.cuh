// Backward pass: one block per tile of 128 keys and key/value head, 64 packed rows at a time.
//
// With P the probabilities, dP = dO V^T, delta = <dO, O>, and weights folded into dO before:
//   dS = P (dP - delta), dQ = dS K scale, dK = dS^T Q scale, dV = P^T dO.
// Two warpgroups compute 64 keys each. They compute the transposed K Q^T and V dO^T, so that P^T
// and dS^T stay in registers for the matmuls of dV and dK. dV and dK are accumulated in registers and
// written once. dS^T is also written to shared memory: each warpgroup reads the dS^T of all
// 128 keys for half the columns of dQ. Scores and probabilities of the next rows are computed
// during the matmuls of dQ and dK. One warp loads row tiles, in three stages of queries and two stages
// of output gradients. Another warp adds dQ to its sums in global memory. A thread has 240 registers for the
// matmuls, 24 for the copies. Head dimension 128 needs 212 KiB of shared memory.
//
// The L2 cache fits only a part of all rows, so blocks of one head should read the same rows at
// the same time. The blocks of the first group start together, at the last row tile, and descend.
// They end one after the other, with the latest keys first, because fewer rows see later keys. When one of them
// ends, a block of the next group starts at the first row tile that sees its keys, and ascends. This keeps
// the group at the same rows, and the group ends together at the last row tile.
#pragma once

#include "row_tiles.cuh"

namespace hopper_attention {

constexpr int BACKWARD_COPY_REGISTERS = 24;
constexpr int BACKWARD_MMA_REGISTERS = 240;

// Named barriers: the dS^T of both warpgroups is in shared memory; a warpgroup's dQ is in shared memory;
// dQ has been read.
constexpr uint32_t SCORE_BARRIER = 1;
constexpr uint32_t SUM_FULL_BARRIER = 2;
constexpr uint32_t SUM_EMPTY_BARRIER = 4;
constexpr uint32_t SUM_THREADS = WARPGROUP + 32;

// A tile of keys of a head.
struct KeyTile {
    uint32_t kv_head, index;
};

// Shared memory of a block.
template <int WIDTH>
struct BackwardMemory {
    static constexpr uint32_t KEY_BYTES = tile_bytes(TILE_KEYS, WIDTH);
    static constexpr uint32_t ROW_BYTES = tile_bytes(TILE_ROWS, WIDTH);
    static constexpr uint32_t SCORE_BYTES = tile_bytes(TILE_ROWS, TILE_KEYS);
    static constexpr uint32_t SUM_BYTES = TILE_ROWS * WIDTH * 4;
    static constexpr uint32_t STATISTICS_BYTES = TILE_ROWS * 16;
    static constexpr uint32_t SCORES = 2 * KEY_BYTES + (QUERY_STAGES + STAGES) * ROW_BYTES;
    static constexpr uint32_t SUMS = SCORES + STAGES * SCORE_BYTES;
    static constexpr uint32_t STATISTICS = SUMS + SUM_BYTES;
    static constexpr uint32_t BARRIERS = STATISTICS + QUERY_STAGES * STATISTICS_BYTES;
    static constexpr uint32_t D_OUT_BARRIERS = BARRIERS + Ring<QUERY_STAGES>::BYTES;
    static constexpr uint32_t KEY_BARRIER = D_OUT_BARRIERS + Ring<STAGES>::BYTES;
    unsigned char* memory;

    __device__ __forceinline__ SharedAddress at(uint32_t offset) const {
        return shared_address(memory) + offset;
    }
    __device__ __forceinline__ SharedAddress k() const { return at(0); }
    __device__ __forceinline__ SharedAddress v() const { return at(KEY_BYTES); }
    __device__ __forceinline__ SharedAddress q(uint32_t index) const {
        return at(2 * KEY_BYTES + index % QUERY_STAGES * ROW_BYTES);
    }
    __device__ __forceinline__ SharedAddress d_out(uint32_t index) const {
        return at(2 * KEY_BYTES + (QUERY_STAGES + index % STAGES) * ROW_BYTES);
    }
    // dS^T: a panel of 64 rows for each key.
    __device__ __forceinline__ SharedAddress scores(uint32_t index) const {
        return at(SCORES + index % STAGES * SCORE_BYTES);
    }
    // A warpgroup's half of dQ, in the order of row_tiles.cuh.
    __device__ __forceinline__ SharedAddress sums(uint32_t group) const {
        return at(SUMS + group * (SUM_BYTES / 2));
    }
    // log_sum_exp, delta and bounds of the rows.
    __device__ __forceinline__ unsigned char* statistics(uint32_t index) const {
        return memory + STATISTICS + index % QUERY_STAGES * STATISTICS_BYTES;
    }
    __device__ __forceinline__ Ring<QUERY_STAGES> q_ring() const { return {at(BARRIERS)}; }
    __device__ __forceinline__ Ring<STAGES> d_out_ring() const { return {at(D_OUT_BARRIERS)}; }
    __device__ __forceinline__ SharedAddress keys_full() const { return at(KEY_BARRIER); }
    __device__ __forceinline__ uint32_t* limits() const {
        return reinterpret_cast<uint32_t*>(memory + KEY_BARRIER + 8);
    }
    // The block's tile, in shared memory because the matmuls leave no registers for it.
    __device__ __forceinline__ KeyTile& tile() const {
        return reinterpret_cast<KeyTile*>(memory + KEY_BARRIER + 8 + 4 * 4)[0];
    }
};

// ---- the order of the blocks ----

// A sequence's tiles of keys by length. A tile's length is the number of its head's rows, times the number of
// tiles from it on, because later rows see more keys. Rows are in units of 1/32 of the largest head's rows.
// All lanes of a warp call the methods.
struct Lengths {
    // The number of rows of each head; null if all heads have the same number.
    const uint32_t* counts;
    uint32_t heads, tiles, largest;
    // Units of the head with this lane's number.
    uint32_t own_units;

    __device__ __forceinline__ Lengths(const Parameters& params, uint32_t sequence, uint32_t tiles)
        : counts(params.rows != nullptr ? params.row_counts + sequence * params.kv_heads : nullptr),
          heads(params.kv_heads),
          tiles(tiles),
          largest(1),
          own_units(0) {
        if (counts == nullptr) return;
        uint32_t lane = threadIdx.x % 32;
        for (uint32_t head = lane; head < heads; head += 32) largest = max(largest, counts[head]);
        largest = warp_max(largest);
        own_units = units_of(lane);
    }

    // The rows of a head in units, at least 1; 0 if the head does not exist. A count is less than
    // 2^26, because offsets within a sequence fit 32 bits.
    __device__ __forceinline__ uint32_t units_of(uint32_t head) const {
        return head < heads ? max(1u, counts[head] * 32 / largest) : 0;
    }

    // The units of head `first` + lane.
    __device__ __forceinline__ uint32_t units(uint32_t first) const {
        return first == 0 ? own_units : units_of(first + threadIdx.x % 32);
    }

    // The number of tiles with at least this length, which is not 0.
    __device__ __forceinline__ uint32_t count(uint32_t length) const {
        uint32_t sum = 0;
        for (uint32_t first = 0; first < heads; first += 32) {
            uint32_t unit = units(first), left = unit != 0 ? (length + unit - 1) / unit : tiles + 1;
            sum += left <= tiles ? tiles + 1 - left : 0;
        }
        return warp_sum(sum);
    }

    // The tile with `rank` tiles before it in the order from the longest to the shortest. Tiles of the same
    // length are in the order of their heads.
    __device__ __forceinline__ KeyTile at(uint32_t rank) const {
        if (counts == nullptr) return {rank % heads, rank / heads};
        uint32_t length = 1, too_long = 32 * tiles + 1, before = 0;
        while (too_long - length > 1) {
            uint32_t middle = (length + too_long) / 2, longer = count(middle);
            if (longer > rank) {
                length = middle;
            } else {
                too_long = middle;
                before = longer;
            }
        }
        uint32_t lower_lanes = (1u << threadIdx.x % 32) - 1;
        for (uint32_t first = 0; first < heads; first += 32) {
            uint32_t unit = units(first), left = unit != 0 ? length / unit : 0;
            bool has = left != 0 && left * unit == length && left <= tiles;
            uint32_t having = __ballot_sync(ALL_LANES, has);
            bool is_it = has && before + __popc(having & lower_lanes) == rank;
            uint32_t found = __ballot_sync(ALL_LANES, is_it);
            if (found != 0) {
                uint32_t lane = __ffs(found) - 1;
                return {first + lane, tiles - __shfl_sync(ALL_LANES, left, lane)};
            }
            before += __popc(having);
        }
        return {0, 0};  // Not reached: `rank` is less than the number of tiles.
    }
};

// ---- the rows that see a tile of keys ----

// The number of leading items, among `count`, for which `before` is true. All lanes of a warp call
// this function. Every step tests 32 of the remaining items.
template <typename Before>
static __device__ __forceinline__ uint32_t count_leading(uint32_t count, Before before) {
    uint32_t low = 0, high = count;
    while (low < high) {
        uint32_t step = (high - low + 31) / 32, probe = low + threadIdx.x % 32 * step;
        bool is_before = probe < high && before(probe);
        uint32_t leading = __popc(__ballot_sync(ALL_LANES, is_before));
        if (leading == 0) return low;
        high = min(high, low + leading * step);
        low += (leading - 1) * step + 1;
    }
    return low;
}

// The number of rows of tokens before `token`. All lanes of a warp call this function.
static __device__ __forceinline__ uint32_t count_rows(const Segment& segment, uint32_t token) {
    if (segment.rows == nullptr) return min(token * segment.group, segment.count);
    return count_leading(segment.count,
                         [&](uint32_t i) { return segment.rows[i] < token * segment.group; });
}

// The number of rows that see no key from `key` on.
static __device__ __forceinline__ uint32_t rows_ending_by(const Parameters& params,
                                                          const Segment& segment, uint32_t key) {
    if (key >= params.key_length) return segment.count;
    if (!params.causal || key <= params.query_offset) return 0;
    return count_rows(segment, min(key - params.query_offset, params.query_length));
}

// The number of rows with a first key before `key`.
static __device__ __forceinline__ uint32_t rows_starting_before(const Parameters& params,
                                                                const Segment& segment,
                                                                uint32_t key) {
    if (params.document_start == nullptr) return key > 0 ? segment.count : 0;
    const uint32_t* first_key = params.document_start + segment.sequence * params.query_length;
    uint32_t tokens =
        count_leading(params.query_length, [&](uint32_t t) { return first_key[t] < key; });
    return count_rows(segment, tokens);
}

// The row tiles [begin, end) with rows that may see a tile of keys, visited in ascending or
// descending order. All rows of the row tiles [unmasked, unmasked_end) see all keys of the tile.
struct RowTiles {
    uint32_t begin, end, unmasked, unmasked_end;
    bool is_ascending;

    __device__ __forceinline__ uint32_t count() const { return end - begin; }
    // The row tile of visit i.
    __device__ __forceinline__ uint32_t at(uint32_t i) const {
        return is_ascending ? begin + i : end - 1 - i;
    }

    __device__ __forceinline__ bool is_unmasked(uint32_t tile) const {
        return tile >= unmasked && tile < unmasked_end;
    }
};

// The first four warps compute one limit each; synchronises the block.
static __device__ __forceinline__ RowTiles find_row_tiles(const Parameters& params,
                                                          const KeyTile& tile,
                                                          bool is_ascending, uint32_t* limits) {
    Segment segment = make_segment(params, tile.kv_head, blockIdx.z);
    uint32_t key = tile.index * TILE_KEYS, warp = threadIdx.x / 32, limit = 0;
    if (warp == 0) limit = rows_ending_by(params, segment, key);
    if (warp == 1) limit = rows_starting_before(params, segment, key + TILE_KEYS);
    if (warp == 2) limit = rows_ending_by(params, segment, key + TILE_KEYS - 1);
    if (warp == 3) limit = rows_starting_before(params, segment, key + 1);
    if (warp < 4 && threadIdx.x % 32 == 0) limits[warp] = limit;
    __syncthreads();
    RowTiles tiles;
    tiles.is_ascending = is_ascending;
    tiles.begin = limits[0] / TILE_ROWS;
    // If no row sees these keys, no row tile is visited, not even a partial last tile: every visit
    // counts in the row tile's semaphore.
    tiles.end = limits[0] < segment.count ? (limits[1] + TILE_ROWS - 1) / TILE_ROWS : tiles.begin;
    tiles.unmasked = (limits[2] + TILE_ROWS - 1) / TILE_ROWS;
    // Rows beyond the segment's end need no mask.
    tiles.unmasked_end = limits[3] == segment.count ? tiles.end : limits[3] / TILE_ROWS;
    return tiles;
}

// ---- copies ----

// Copies the keys and values, then the row tiles.
template <int WIDTH>
static __device__ __forceinline__ void copy_row_tiles(const Maps& maps, const Segment& segment,
                                                      uint32_t key, const RowTiles& tiles,
                                                      const unsigned char* row_tiles,
                                                      const BackwardMemory<WIDTH>& memory) {
    using Memory = BackwardMemory<WIDTH>;
    using Layout = RowTileLayout<WIDTH>;
    barrier_expect(memory.keys_full(), 2 * Memory::KEY_BYTES);
    copy_keys<WIDTH>(memory.k(), &maps.k, segment, key, memory.keys_full());
    copy_keys<WIDTH>(memory.v(), &maps.v, segment, key, memory.keys_full());
    Ring<QUERY_STAGES> q_ring = memory.q_ring();
    Ring<STAGES> d_out_ring = memory.d_out_ring();
#pragma unroll 1
    for (uint32_t i = 0; i < tiles.count(); ++i) {
        const unsigned char* tile = row_tiles + uint64_t(tiles.at(i)) * Layout::BYTES;
        q_ring.begin_fill(i, Memory::ROW_BYTES + Memory::STATISTICS_BYTES);
        copy_bulk(memory.q(i), tile, Memory::ROW_BYTES, q_ring.full(i));
        copy_bulk(shared_address(memory.statistics(i)), tile + Layout::LOG_SUM_EXP,
                  Memory::STATISTICS_BYTES, q_ring.full(i));
        d_out_ring.begin_fill(i, Memory::ROW_BYTES);
        copy_bulk(memory.d_out(i), tile + Layout::D_OUT, Memory::ROW_BYTES, d_out_ring.full(i));
    }
}

// The value of a row tile's semaphore when this tile of keys may add to its d_q: the number of
// tiles with earlier keys that the row tile's first row sees.
template <int WIDTH>
static __device__ __forceinline__ uint32_t semaphore_value(const Parameters& params,
                                                           const unsigned char* row_tile,
                                                           uint32_t key) {
    const uint2* bounds = reinterpret_cast<const uint2*>(row_tile + RowTileLayout<WIDTH>::BOUNDS);
    uint32_t first = params.document_start != nullptr ? bounds[0].x : 0;
    return key / TILE_KEYS - first / TILE_KEYS;
}

// One warp adds the halves of dQ to their sums; the warpgroups write the halves to shared memory.
template <int WIDTH>
static __device__ __forceinline__ void add_query_gradients(const Parameters& params,
                                                           const Scratch& scratch,
                                                           const Segment& segment, uint32_t key,
                                                           const RowTiles& tiles,
                                                           const BackwardMemory<WIDTH>& memory) {
    constexpr uint32_t HALF_BYTES = BackwardMemory<WIDTH>::SUM_BYTES / 2;
    uint64_t first_tile = first_row_tile(params, segment);
    bool first_lane = threadIdx.x % 32 == 0;
    for (uint32_t group = 0; group < 2; ++group)
        named_arrive(SUM_EMPTY_BARRIER + group, SUM_THREADS);
#pragma unroll 1
    for (uint32_t i = 0; i < tiles.count(); ++i) {
        uint64_t index = first_tile + tiles.at(i);
        if (first_lane && scratch.semaphores != nullptr)
            semaphore_wait(
                scratch.semaphores + index,
                semaphore_value<WIDTH>(
                    params, scratch.row_tiles + index * row_tile_bytes(WIDTH), key));
        __syncwarp();
        float* sums = scratch.d_q_sums + index * (TILE_ROWS * WIDTH);
        for (uint32_t group = 0; group < 2; ++group) {
            named_sync(SUM_FULL_BARRIER + group, SUM_THREADS);
            if (first_lane) {
                reduce_bulk(sums + group * (HALF_BYTES / 4), memory.sums(group), HALF_BYTES);
                reduce_commit();
            }
            __syncwarp();
        }
        bool is_last = i + 1 == tiles.count();
        if (first_lane) reduce_wait_read<1>();
        __syncwarp();
        if (!is_last) named_arrive(SUM_EMPTY_BARRIER, SUM_THREADS);
        if (first_lane) reduce_wait_read<0>();
        __syncwarp();
        if (!is_last) named_arrive(SUM_EMPTY_BARRIER + 1, SUM_THREADS);
        // Releases the previous row tile. Its sums have had time to be written: the wait is short.
        if (first_lane && scratch.semaphores != nullptr && i > 0)
            semaphore_release<2>(scratch.semaphores + first_tile + tiles.at(i - 1));
        __syncwarp();
    }
    if (first_lane && scratch.semaphores != nullptr)
        semaphore_release<0>(scratch.semaphores + first_tile + tiles.at(tiles.count() - 1));
    else if (first_lane)
        reduce_wait();
}

// ---- matmuls ----

// Elements of K Q^T per lane, for 64 keys and 64 rows.
constexpr int TRANSPOSED = TILE_ROWS / 2;

// The state of an MMA warpgroup, which computes the gradients of 64 keys.
template <int WIDTH>
struct BackwardGroup {
    uint32_t group, first_row;
    // The lane's keys are `key` and `key + 8`.
    uint32_t key;
    float scale_log2;
    BackwardMemory<WIDTH> memory;
    Ring<QUERY_STAGES> q_ring;
    Ring<STAGES> d_out_ring;
    float d_k[WIDTH / 2], d_v[WIDTH / 2];

    __device__ __forceinline__ BackwardGroup(const Parameters& params,
                                             const BackwardMemory<WIDTH>& memory,
                                             uint32_t first_key, uint32_t group)
        : group(group),
          first_row(group * 64 + threadIdx.x % WARPGROUP / 32 * 16),
          key(first_key + first_row + threadIdx.x % 32 / 4),
          scale_log2(params.scale * LOG2_E),
          memory(memory),
          q_ring(memory.q_ring()),
          d_out_ring(memory.d_out_ring()) {
        clear_sums(d_k);
        clear_sums(d_v);
    }

    // Probabilities from scores.
    template <bool MASKED>
    __device__ __forceinline__ void probabilities(const float (&scores)[TRANSPOSED],
                                                  float (&p)[TRANSPOSED], uint32_t index) const {
        const float* log_sum_exp = reinterpret_cast<const float*>(memory.statistics(index));
        const uint2* bounds = reinterpret_cast<const uint2*>(log_sum_exp + 2 * TILE_ROWS);
#pragma unroll
        for (int n = 0; n < TRANSPOSED / 4; ++n) {
            uint32_t row = 8 * n + threadIdx.x % 4 * 2;
            float2 offset = *reinterpret_cast<const float2*>(log_sum_exp + row);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                p[4 * n + i] = exp2_fast(
                    fmaf(scores[4 * n + i], scale_log2, -(i % 2 == 0 ? offset.x : offset.y)));
            if (!MASKED) continue;
            // (first, end) of two rows.
            uint4 seen = *reinterpret_cast<const uint4*>(bounds + row);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint32_t column = key + i / 2 * 8;
                bool sees = i % 2 == 0 ? column >= seen.x && column < seen.y
                                       : column >= seen.z && column < seen.w;
                if (!sees) p[4 * n + i] = 0.0f;
            }
        }
    }

    // dS^T = P^T (dP^T - delta).
    __device__ __forceinline__ void score_gradients(const float (&d_p)[TRANSPOSED],
                                                    const float (&p)[TRANSPOSED],
                                                    float (&d_s)[TRANSPOSED],
                                                    uint32_t index) const {
        const float* delta = reinterpret_cast<const float*>(memory.statistics(index)) + TILE_ROWS;
#pragma unroll
        for (int n = 0; n < TRANSPOSED / 4; ++n) {
            uint32_t row = 8 * n + threadIdx.x % 4 * 2;
            float2 both = *reinterpret_cast<const float2*>(delta + row);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                d_s[4 * n + i] = p[4 * n + i] * (d_p[4 * n + i] - (i % 2 == 0 ? both.x : both.y));
        }
    }

    // Writes dS^T to shared memory, for the matmuls of both warpgroups.
    __device__ __forceinline__ void store_score_gradients(const uint32_t (&d_s)[TILE_ROWS / 16][4],
                                                          uint32_t index) const {
        // Matrix i of a fragment: keys 8 (i % 2).., rows 8 (i / 2)...
        uint32_t lane = threadIdx.x % 32, row = first_row + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
        for (int k = 0; k < TILE_ROWS / 16; ++k)
            stmatrix_x4(memory.scores(index) + panel_offset<TILE_KEYS>(row, 2 * k + lane / 16),
                        d_s[k]);
        fence_async_proxy();
    }

    // Writes the warpgroup's half of dQ to shared memory, for the warp that adds it to the sums.
    __device__ __forceinline__ void stage_d_q(const float (&d_q)[WIDTH / 4]) const {
        named_sync(SUM_EMPTY_BARRIER + group, SUM_THREADS);
        SharedAddress target = memory.sums(group) + threadIdx.x % WARPGROUP * 16;
#pragma unroll
        for (int n = 0; n < WIDTH / 16; ++n)
            store_4(target + n * (WARPGROUP * 16), d_q[4 * n], d_q[4 * n + 1], d_q[4 * n + 2],
                    d_q[4 * n + 3]);
        fence_async_proxy();
        named_arrive(SUM_FULL_BARRIER + group, SUM_THREADS);
    }

    __device__ __forceinline__ void start_scores(float (&scores)[TRANSPOSED],
                                                 uint32_t index) const {
        q_ring.wait_full(index);
        start_rows<WIDTH>(scores, RowOperand<TILE_KEYS>(memory.k(), group * 64),
                          RowOperand<TILE_ROWS>(memory.q(index)));
    }

    // Adds the gradients of visit `index` with probabilities `p`, and replaces `p` by the
    // probabilities of the next visit. All accesses to shared memory, and all exponentials, overlap
    // with matmuls.
    template <bool NEXT_IS_MASKED>
    __device__ __forceinline__ void step(float (&p)[TRANSPOSED], uint32_t index, bool is_last) {
        float d_p[TRANSPOSED], d_s[TRANSPOSED], scores[TRANSPOSED], d_q[WIDTH / 4];
        uint32_t p_fragments[TILE_ROWS / 16][4], d_s_fragments[TILE_ROWS / 16][4];
        d_out_ring.wait_full(index);
        start_rows<WIDTH>(d_p, RowOperand<TILE_KEYS>(memory.v(), group * 64),
                          RowOperand<TILE_ROWS>(memory.d_out(index)));
        to_fragments(p, p_fragments);
        start_columns(d_v, p_fragments, ColumnOperand<TILE_ROWS>(memory.d_out(index)));
        wgmma_wait<1>();
        fence_operand(d_p);
        score_gradients(d_p, p, d_s, index);
        to_fragments(d_s, d_s_fragments);
        // The last visit computes its own scores again, and does not use them.
        uint32_t next = is_last ? index : index + 1;
        start_scores(scores, next);
        store_score_gradients(d_s_fragments, index);
        // Both warpgroups have also finished the matmuls that read the stage before the previous stage.
        named_sync(SCORE_BARRIER, MMA_THREADS);
        // The scores are still in flight. The registers of P^T are reused for dQ.
        wgmma_wait<1>();
        fence_operand(d_v);
        d_out_ring.release(index);
        start_transposed<TILE_KEYS / 16>(d_q, ColumnOperand<TILE_KEYS>(memory.scores(index)),
                                         ColumnOperand<TILE_KEYS>(memory.k(), group * (WIDTH / 2)));
        // dS^T is read from shared memory: in registers, too few registers would be left for the
        // probabilities.
        start_columns<TILE_ROWS / 16>(d_k, RowOperand<TILE_KEYS>(memory.scores(index), group * 64),
                                      ColumnOperand<TILE_ROWS>(memory.q(index)));
        wgmma_wait<2>();
        fence_operand(scores);
        probabilities<NEXT_IS_MASKED>(scores, p, next);
        fence_operand(p);
        wgmma_wait<1>();
        fence_operand(d_q);
        stage_d_q(d_q);
        wgmma_wait<0>();
        fence_operand(d_k);
        q_ring.release(index);
    }

    __device__ __forceinline__ void visit(const RowTiles& tiles) {
        float p[TRANSPOSED];
        barrier_wait(memory.keys_full(), 0);
        {
            float scores[TRANSPOSED];
            start_scores(scores, 0);
            wgmma_wait<0>();
            fence_operand(scores);
            probabilities<true>(scores, p, 0);
        }
        uint32_t index = 0, count = tiles.count();
        auto next_is_masked = [&] {
            return index + 1 < count && !tiles.is_unmasked(tiles.at(index + 1));
        };
        while (index < count) {
#pragma unroll 1
            for (; index < count && next_is_masked(); ++index)
                step<true>(p, index, index + 1 == count);
#pragma unroll 1
            for (; index < count && !next_is_masked(); ++index)
                step<false>(p, index, index + 1 == count);
        }
    }

    // Writes gradients, staged in the warp's own rows of a matrix of panels of the block's keys.
    __device__ __forceinline__ void store(const Parameters& params, const KeyTile& tile,
                                          unsigned char* matrix, const float (&sums)[WIDTH / 2],
                                          float factor, bf16* gradient) const {
        stage_sums<TILE_KEYS>(matrix, first_row, sums, factor, factor);
        __syncwarp();
        auto target = [&](uint32_t row) -> bf16* {
            uint32_t key = tile.index * TILE_KEYS + row;
            if (key >= params.key_length) return nullptr;
            uint64_t index = uint64_t(blockIdx.z) * params.key_length + key;
            return gradient + index * params.d_kv_stride + tile.kv_head * WIDTH;
        };
        store_panel_rows<WIDTH, TILE_KEYS, 32>(matrix, first_row, 16, threadIdx.x % 32, target);
    }
};

template <int WIDTH>
static __device__ __forceinline__ void backward(const Parameters& params, const Scratch& scratch,
                                                const Maps& maps) {
    // Blocks start in the order of x: the longest tiles of a sequence start first, so that all
    // multiprocessors end at about the same time. With semaphores, a tile waits only for tiles that
    // started before it: a head's tiles are longer if their keys are earlier.
    DYNAMIC_SHARED(shared);
    BackwardMemory<WIDTH> memory{shared};
    if (threadIdx.x < 32) {
        KeyTile tile = Lengths(params, blockIdx.z, gridDim.x / params.kv_heads).at(blockIdx.x);
        if (threadIdx.x == 0) {
            memory.tile() = tile;
            memory.q_ring().init();
            memory.d_out_ring().init();
            barrier_init(memory.keys_full(), 1);
            barrier_init_fence();
        }
    }
    __syncthreads();
    bool is_ascending =
        scratch.blocks_at_once != 0 && blockIdx.x / scratch.blocks_at_once % 2 == 1;
    RowTiles tiles = find_row_tiles(params, memory.tile(), is_ascending, memory.limits());

    uint32_t warpgroup = uniform(threadIdx.x / WARPGROUP);
    if (warpgroup == 0) {
        deallocate_registers<BACKWARD_COPY_REGISTERS>();
        if (tiles.begin >= tiles.end) return;
        Segment segment = make_segment(params, memory.tile().kv_head, blockIdx.z);
        uint32_t first_key = memory.tile().index * TILE_KEYS;
        if (threadIdx.x == 0)
            copy_row_tiles(
                maps, segment, first_key, tiles,
                scratch.row_tiles + first_row_tile(params, segment) * row_tile_bytes(WIDTH),
                memory);
        if (threadIdx.x / 32 == 1)
            add_query_gradients(params, scratch, segment, first_key, tiles, memory);
    } else {
        allocate_registers<BACKWARD_MMA_REGISTERS>();
        BackwardGroup<WIDTH> state(params, memory, memory.tile().index * TILE_KEYS,
                                   warpgroup - 1);
        if (tiles.begin < tiles.end) state.visit(tiles);
        // Neither warpgroup reads the keys and values any more.
        named_sync(SCORE_BARRIER, MMA_THREADS);
        KeyTile tile = memory.tile();
        state.store(params, tile, shared, state.d_k, params.scale, params.d_k);
        state.store(params, tile, shared + BackwardMemory<WIDTH>::KEY_BYTES, state.d_v, 1.0f,
                    params.d_v);
    }
}

}  // namespace hopper_attention
