// Tiles of packed rows and of keys in shared memory, and the matmuls of their fragments.
//
// A tile contains rows of WIDTH bf16 (head_dim padded with zeros), in chunks of 16 bytes. Chunk c of
// row r is stored at c ^ swizzle(r), so that the eight rows of a matrix that ldmatrix reads are in
// eight different groups of banks.
#pragma once

#include "../../../device/cuda/mma.cuh"
#include "tiled.cuh"

namespace tiled_attention {

// Less than every score; finite, so that differences of maxima are never NaN.
constexpr float LOWEST_SCORE = -1e30f;
constexpr float LOG2_E = 1.4426950408889634f;

static __device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// ---- layout ----

template <int WIDTH>
static __device__ __forceinline__ uint32_t swizzle(uint32_t row) {
    // Rows of a multiple of 128 bytes start at the same bank. Other rows alternate between two halves.
    return WIDTH % 64 == 0 ? row & 7 : row / 2 & 3;
}

template <int WIDTH>
static __device__ __forceinline__ uint32_t tile_offset(uint32_t row, uint32_t chunk) {
    return row * (WIDTH * 2) + (chunk ^ swizzle<WIDTH>(row)) * 16;
}

// The addresses at which a lane reads matrices of a tile with ldmatrix.
template <int WIDTH>
struct LaneTile {
    SharedAddress row;
    uint32_t chunk_bytes;

    // row_step is a multiple of 8, chunk_step of 2: neither changes the lane's swizzle.
    __device__ __forceinline__ SharedAddress at(int row_step, int chunk_step) const {
        return row + (row_step * (WIDTH * 2) + (chunk_bytes ^ (chunk_step * 16)));
    }
};

template <int WIDTH>
static __device__ __forceinline__ LaneTile<WIDTH> lane_tile(SharedAddress tile, uint32_t row,
                                                            uint32_t chunk) {
    return {tile + row * (WIDTH * 2), (chunk ^ swizzle<WIDTH>(row)) * 16};
}

// For fragments of 16 rows from `first_row` and 16 columns: A, B transposed, and B of a transposed
// matmul. These fragments have one pattern, so that they share addresses.
template <int WIDTH>
static __device__ __forceinline__ LaneTile<WIDTH> lane_rows(SharedAddress tile,
                                                            uint32_t first_row = 0) {
    uint32_t lane = threadIdx.x % 32;
    return lane_tile<WIDTH>(tile, first_row + lane % 16, lane / 16);
}

// ---- copies between global memory and tiles ----

static __device__ __forceinline__ bool is_aligned(const void* pointer, uint64_t stride) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride % 8 == 0;
}

// Whether every row of head_dim inputs consists of whole, aligned chunks.
static __device__ __forceinline__ bool inputs_are_wide(const Parameters& params) {
    return is_aligned(params.q, params.q_stride | params.head_dim) &&
           is_aligned(params.k, params.kv_stride) && is_aligned(params.v, 0) &&
           is_aligned(params.d_out, 0);
}

// Copies a chunk of a row of head_dim elements with inputs that are not wide, with zeros beyond head_dim.
static __device__ __forceinline__ void load_narrow(SharedAddress target, const bf16* row,
                                                   uint32_t column, uint32_t head_dim, bool valid) {
#pragma unroll 1
    for (uint32_t i = 0; i < 8; i += 2) {
        bool inside = column + i < head_dim;
        cp_async_4(target + i * 2, row + (inside ? column + i : 0), valid && inside);
    }
}

static __device__ __forceinline__ void load_wide(SharedAddress target, const bf16* row,
                                                 uint32_t column, uint32_t head_dim, bool valid) {
    bool inside = column < head_dim;
    cp_async_16(target, row + (inside ? column : 0), valid && inside);
}

static __device__ __forceinline__ void store_chunk(bf16* row, const unsigned char* source,
                                                   uint32_t chunk, uint32_t head_dim, bool wide) {
    uint32_t column = chunk * 8;
    if (wide) {
        if (column < head_dim)
            *reinterpret_cast<uint4*>(row + column) = *reinterpret_cast<const uint4*>(source);
        return;
    }
    for (uint32_t i = 0; i < 8 && column + i < head_dim; i += 2)
        *reinterpret_cast<uint32_t*>(row + column + i) =
            *reinterpret_cast<const uint32_t*>(source + i * 2);
}

// Calls copy(row, chunk) for this thread's share of the chunks of ROWS rows, UNROLL at a time.
template <int WIDTH, int ROWS, int THREADS, int UNROLL, typename Copy>
static __device__ __forceinline__ void for_each_chunk(Copy copy) {
    constexpr int CHUNKS = WIDTH / 8;
    static_assert(ROWS * CHUNKS % THREADS == 0, "every thread copies the same number of chunks");
#pragma unroll UNROLL
    for (int i = 0; i < ROWS * CHUNKS / THREADS; ++i) {
        uint32_t index = i * THREADS + threadIdx.x;
        copy(index / CHUNKS, index % CHUNKS);
    }
}

// Fills ROWS rows of a tile; `source(row, valid)` returns a row's elements and sets whether the row
// exists. The elements must be readable even if it does not. Chunks that are not wide are rare:
// their loop is not unrolled, to save registers.
template <int WIDTH, int ROWS, int THREADS, int UNROLL = 4, typename Source>
static __device__ __forceinline__ void load_tile(SharedAddress tile, uint32_t head_dim, bool wide,
                                                 Source source) {
    auto load = [&](uint32_t row, uint32_t chunk) {
        bool valid;
        const bf16* elements = source(row, valid);
        SharedAddress target = tile + tile_offset<WIDTH>(row, chunk);
        if (wide)
            load_wide(target, elements, chunk * 8, head_dim, valid);
        else
            load_narrow(target, elements, chunk * 8, head_dim, valid);
    };
    if (wide)
        for_each_chunk<WIDTH, ROWS, THREADS, UNROLL>(load);
    else
        for_each_chunk<WIDTH, ROWS, THREADS, 1>(load);
}

// Writes 16 rows of an accumulator, times a factor for rows g and g + 8, to a tile as bf16.
template <int WIDTH>
static __device__ __forceinline__ void stage_fragments(unsigned char* tile, uint32_t first_row,
                                                       const float (&values)[WIDTH / 8][4],
                                                       float upper, float lower) {
    uint32_t lane = threadIdx.x % 32, row = first_row + lane / 4, byte = lane % 4 * 4;
#pragma unroll
    for (int n = 0; n < WIDTH / 8; ++n) {
        *reinterpret_cast<uint32_t*>(tile + tile_offset<WIDTH>(row, n) + byte) =
            pack_bf16x2(values[n][0] * upper, values[n][1] * upper);
        *reinterpret_cast<uint32_t*>(tile + tile_offset<WIDTH>(row + 8, n) + byte) =
            pack_bf16x2(values[n][2] * lower, values[n][3] * lower);
    }
}

// One warp writes ROWS rows of a tile to global memory, except rows with a null `target(row)`.
template <int WIDTH, int ROWS, typename Target>
static __device__ __forceinline__ void store_rows(const unsigned char* tile, uint32_t first_row,
                                                  uint32_t head_dim, bool wide, Target target) {
    constexpr int CHUNKS = WIDTH / 8;
    for (uint32_t i = threadIdx.x % 32; i < ROWS * CHUNKS; i += 32) {
        uint32_t row = first_row + i / CHUNKS, chunk = i % CHUNKS;
        bf16* elements = target(row);
        if (elements != nullptr)
            store_chunk(elements, tile + tile_offset<WIDTH>(row, chunk), chunk, head_dim, wide);
    }
}

// ---- matmuls ----

// sums += A B^T. B's rows are in a tile of WIDTH columns; load_a(m, k, a) loads the fragment of A's
// rows 16m.. and columns 16k...
template <int WIDTH, int M, int N, typename LoadA>
static __device__ __forceinline__ void multiply_rows(float (&sums)[M][N][4], LaneTile<WIDTH> b,
                                                     LoadA load_a) {
#pragma unroll
    for (int k = 0; k < WIDTH / 16; ++k) {
        uint32_t a[M][4];
#pragma unroll
        for (int m = 0; m < M; ++m) load_a(m, k, a[m]);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t pair[4];
            ldmatrix_x4(pair, b.at(n * 8, k * 2));
            const uint32_t first[2] = {pair[0], pair[2]}, second[2] = {pair[1], pair[3]};
#pragma unroll
            for (int m = 0; m < M; ++m) {
                mma_m16n8k16(sums[m][n], a[m], first);
                mma_m16n8k16(sums[m][n + 1], a[m], second);
            }
        }
    }
}

// sums += A B, where A is the sums of an earlier matmul rounded to bf16: accumulators and fragments
// of A have the same layout. B has 8K rows in a tile of WIDTH columns.
template <int WIDTH, int M, int K>
static __device__ __forceinline__ void multiply_columns(float (&sums)[M][WIDTH / 8][4],
                                                        const float (&left)[M][K][4],
                                                        LaneTile<WIDTH> b) {
#pragma unroll
    for (int k = 0; k < K; k += 2) {
        uint32_t a[M][4];
#pragma unroll
        for (int m = 0; m < M; ++m) {
            a[m][0] = pack_bf16x2(left[m][k][0], left[m][k][1]);
            a[m][1] = pack_bf16x2(left[m][k][2], left[m][k][3]);
            a[m][2] = pack_bf16x2(left[m][k + 1][0], left[m][k + 1][1]);
            a[m][3] = pack_bf16x2(left[m][k + 1][2], left[m][k + 1][3]);
        }
#pragma unroll
        for (int n = 0; n < WIDTH / 8; n += 2) {
            uint32_t pair[4];
            ldmatrix_x4_trans(pair, b.at(k * 8, n));
            const uint32_t first[2] = {pair[0], pair[1]}, second[2] = {pair[2], pair[3]};
#pragma unroll
            for (int m = 0; m < M; ++m) {
                mma_m16n8k16(sums[m][n], a[m], first);
                mma_m16n8k16(sums[m][n + 1], a[m], second);
            }
        }
    }
}

template <int M, int N>
static __device__ __forceinline__ void clear(float (&sums)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.0f;
}

// ---- packed rows ----

// The packed rows of one key/value head in one sequence.
struct Segment {
    uint32_t sequence, kv_head, group, count;
    const uint32_t* rows;

    __device__ __forceinline__ uint32_t row(uint32_t index) const {
        return rows != nullptr ? rows[index] : index;
    }

    // The number of rows before the first row of `token`.
    __device__ __forceinline__ uint32_t rows_before(uint32_t token) const {
        if (rows == nullptr) return min(token * group, count);
        uint32_t low = 0, high = count;
        while (low < high) {
            uint32_t middle = (low + high) / 2;
            if (rows[middle] < token * group)
                low = middle + 1;
            else
                high = middle;
        }
        return low;
    }
};

static __device__ __forceinline__ Segment make_segment(const Parameters& params, uint32_t kv_head,
                                                       uint32_t sequence) {
    uint32_t group = params.heads / params.kv_heads;
    uint32_t all = params.query_length * group, index = sequence * params.kv_heads + kv_head;
    if (params.rows == nullptr) return {sequence, kv_head, group, all, nullptr};
    return {sequence, kv_head, group, params.row_counts[index],
            params.rows + uint64_t(index) * all};
}

// End of the keys that a token of a sequence sees.
static __device__ __forceinline__ uint32_t key_end(const Parameters& params, uint32_t token) {
    if (!params.causal) return params.key_length;
    return min(params.key_length, params.query_offset + token + 1);
}

// The token, head and visible keys of each of a tile's ROWS packed rows, in shared memory. Rows
// beyond the segment's end repeat the last row; their results are never stored.
template <int ROWS>
struct RowTile {
    uint32_t* words;

    __device__ __forceinline__ explicit RowTile(unsigned char* memory)
        : words(reinterpret_cast<uint32_t*>(memory)) {}

    // Token among all sequences, head among all heads, and the keys [first, end) that the row sees.
    __device__ __forceinline__ uint32_t token(uint32_t row) const { return words[row]; }
    __device__ __forceinline__ uint32_t head(uint32_t row) const { return words[ROWS + row]; }
    __device__ __forceinline__ uint32_t first(uint32_t row) const {
        return words[2 * ROWS + row];
    }
    __device__ __forceinline__ uint32_t end(uint32_t row) const { return words[3 * ROWS + row]; }

    __device__ __forceinline__ void load(const Parameters& params, const Segment& segment,
                                         uint32_t start) const {
        for (uint32_t r = threadIdx.x; r < ROWS; r += blockDim.x) {
            uint32_t packed = segment.row(min(start + r, segment.count - 1));
            uint32_t in_sequence = packed / segment.group;
            uint32_t token = segment.sequence * params.query_length + in_sequence;
            words[r] = token;
            words[ROWS + r] = segment.kv_head * segment.group + packed % segment.group;
            words[2 * ROWS + r] =
                params.document_start != nullptr ? params.document_start[token] : 0;
            words[3 * ROWS + r] = key_end(params, in_sequence);
        }
    }

    // Index of the row's (token, head) pair.
    __device__ __forceinline__ uint64_t pair(const Parameters& params, uint32_t row) const {
        return uint64_t(token(row)) * params.heads + head(row);
    }

    // Whether all rows see all of the keys [key, key + length); bounds never decrease from one row
    // to the next.
    __device__ __forceinline__ bool see_all(uint32_t key, uint32_t length) const {
        return first(ROWS - 1) <= key && key + length <= end(0);
    }
};

// Sets the scores of keys that a row does not see to -infinity, for 16M rows from first_row and 8N keys.
template <int M, int N, int ROWS>
static __device__ __forceinline__ void mask_scores(float (&scores)[M][N][4],
                                                   const RowTile<ROWS>& rows, uint32_t first_row,
                                                   uint32_t key) {
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t row = first_row + 16 * m + i / 2 * 8 + lane / 4;
            // Bounds relative to the lane's first key, so that the columns are constants.
            int first = int(rows.first(row) - key - lane % 4 * 2);
            int end = int(rows.end(row) - key - lane % 4 * 2);
#pragma unroll
            for (int n = 0; n < N; ++n)
                if (8 * n + i % 2 < first || 8 * n + i % 2 >= end)
                    scores[m][n][i] = minus_infinity();
        }
}

// Copies of paged keys in flight: few, because their addresses use registers.
constexpr int PAGED_UNROLL = 1;

// The row of a head's paged key in the key and value buffers.
static __device__ __forceinline__ uint64_t paged_row(const Parameters& params,
                                                     const Segment& segment, uint32_t key) {
    uint32_t blocks = (params.key_length + params.block_length - 1) / params.block_length;
    uint32_t block = params.block_table[segment.sequence * blocks + key / params.block_length];
    uint32_t of_head = block * params.kv_heads + segment.kv_head;
    return uint64_t(of_head) * params.block_length + key % params.block_length;
}

// Fills a tile with the keys, or values, starting at `key`. Rows beyond the last key are zeros.
template <int WIDTH, int KEYS, int THREADS>
static __device__ __forceinline__ void load_keys(const Parameters& params, const Segment& segment,
                                                 const bf16* elements, uint32_t key,
                                                 SharedAddress tile, bool wide) {
    if (params.block_table != nullptr) {
        auto source = [&](uint32_t row, bool& valid) {
            valid = key + row < params.key_length;
            uint64_t index = paged_row(params, segment, valid ? key + row : key);
            return elements + index * params.kv_stride;
        };
        load_tile<WIDTH, KEYS, THREADS, PAGED_UNROLL>(tile, params.head_dim, wide, source);
        return;
    }
    elements += uint64_t(segment.sequence) * params.key_length * params.kv_stride +
                segment.kv_head * params.head_dim;
    uint32_t stride = uint32_t(params.kv_stride);
    auto source = [&](uint32_t row, bool& valid) {
        valid = key + row < params.key_length;
        // An index into one sequence fits 32 bits.
        return elements + (valid ? key + row : key) * stride;
    };
    load_tile<WIDTH, KEYS, THREADS>(tile, params.head_dim, wide, source);
}

}  // namespace tiled_attention
