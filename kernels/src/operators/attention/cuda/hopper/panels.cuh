// Panels of bf16 in shared memory (sm90.cuh) and their matmuls.
#pragma once

#include "hopper.cuh"

namespace hopper_attention {

constexpr int PANEL_COLUMNS = 64;
constexpr int PANEL_ROW_BYTES = 128;
// Bytes of 8 rows of a panel, the period of the swizzle.
constexpr int EIGHT_ROWS = 8 * PANEL_ROW_BYTES;

// The offset in bytes of a row's 16-byte chunk in a matrix of panels of ROWS rows.
template <int ROWS>
static __device__ __forceinline__ uint32_t panel_offset(uint32_t row, uint32_t chunk) {
    return chunk / 8 * (ROWS * PANEL_ROW_BYTES) + row * PANEL_ROW_BYTES + ((chunk ^ row) & 7) * 16;
}

// Returns `value`, which is the same in all lanes. The shuffle shows this to the compiler.
static __device__ __forceinline__ uint32_t uniform(uint32_t value) {
    return __shfl_sync(ALL_LANES, value, 0);
}

// A matrix of panels of ROWS rows as an operand; its columns are the terms of the matmul
// (K-major).
template <int ROWS>
struct RowOperand {
    // The distance of panels, which wgmma ignores here and assumes to be one chunk.
    static constexpr uint32_t UNUSED = 16;
    uint64_t descriptor;

    // Starts at row `first_row`, a multiple of 8.
    __device__ __forceinline__ explicit RowOperand(SharedAddress matrix, uint32_t first_row = 0)
        : descriptor(matrix_descriptor(descriptor_address(matrix) + first_row * PANEL_ROW_BYTES,
                                       UNUSED, EIGHT_ROWS)) {}

    // Columns 16k...
    __device__ __forceinline__ uint64_t at(int k) const {
        return advance(descriptor, k / 4 * (ROWS * PANEL_ROW_BYTES) + k % 4 * 32);
    }
};

// A matrix of panels of ROWS rows as an operand; its rows are the terms of the matmul (MN-major).
template <int ROWS>
struct ColumnOperand {
    uint64_t descriptor;

    // Starts at column `first_column`, a multiple of 8. If it is not a panel's first column, the matmul
    // must end within the panel.
    __device__ __forceinline__ explicit ColumnOperand(SharedAddress matrix,
                                                      uint32_t first_column = 0)
        : descriptor(matrix_descriptor(descriptor_address(matrix) +
                                           first_column / PANEL_COLUMNS * (ROWS * PANEL_ROW_BYTES) +
                                           first_column % PANEL_COLUMNS * 2,
                                       ROWS * PANEL_ROW_BYTES, EIGHT_ROWS)) {}

    // Rows 16k...
    __device__ __forceinline__ uint64_t at(int k) const {
        return advance(descriptor, k * 2 * EIGHT_ROWS);
    }
};

// Each of the following functions issues one group of asynchronous matmuls.

// sums = A B^T; A and B have WIDTH columns.
template <int WIDTH, int COUNT, int A_ROWS, int B_ROWS>
static __device__ __forceinline__ void start_rows(float (&sums)[COUNT], RowOperand<A_ROWS> a,
                                                  RowOperand<B_ROWS> b) {
    wgmma_fence();
    wgmma_first<0, 0>(sums, a.at(0), b.at(0));
#pragma unroll
    for (int k = 1; k < WIDTH / 16; ++k) wgmma<0, 0>(sums, a.at(k), b.at(k));
    wgmma_commit();
    fence_operand(sums);
}

// sums += A B with A in registers, 16K columns deep.
template <int K, int COUNT, int B_ROWS>
static __device__ __forceinline__ void start_columns(float (&sums)[COUNT],
                                                     uint32_t (&a)[K][4],
                                                     ColumnOperand<B_ROWS> b) {
    fence_operand(sums);
    fence_operand(a);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < K; ++k) wgmma<1>(sums, a[k], b.at(k));
    wgmma_commit();
    fence_operand(sums);
}

// sums += A B with A from shared memory, 16K columns deep.
template <int K, int COUNT, int A_ROWS, int B_ROWS>
static __device__ __forceinline__ void start_columns(float (&sums)[COUNT], RowOperand<A_ROWS> a,
                                                     ColumnOperand<B_ROWS> b) {
    fence_operand(sums);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < K; ++k) wgmma<0, 1>(sums, a.at(k), b.at(k));
    wgmma_commit();
    fence_operand(sums);
}

// sums = A^T B; A and B have 16K rows.
template <int K, int COUNT, int A_ROWS, int B_ROWS>
static __device__ __forceinline__ void start_transposed(float (&sums)[COUNT],
                                                        ColumnOperand<A_ROWS> a,
                                                        ColumnOperand<B_ROWS> b) {
    wgmma_fence();
    wgmma_first<1, 1>(sums, a.at(0), b.at(0));
#pragma unroll
    for (int k = 1; k < K; ++k) wgmma<1, 1>(sums, a.at(k), b.at(k));
    wgmma_commit();
    fence_operand(sums);
}

// Fragments of A from the sums of an earlier matmul, rounded to bf16: both have the same layout.
template <int COUNT>
static __device__ __forceinline__ void to_fragments(const float (&sums)[COUNT],
                                                    uint32_t (&a)[COUNT / 8][4]) {
#pragma unroll
    for (int k = 0; k < COUNT / 8; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            a[k][i] = pack_bf16x2(sums[8 * k + 2 * i], sums[8 * k + 2 * i + 1]);
}

// Writes this warp's 16 rows of sums, times a factor for rows g and g + 8, to a matrix of panels.
template <int ROWS, int COUNT>
static __device__ __forceinline__ void stage_sums(unsigned char* matrix, uint32_t first_row,
                                                  const float (&sums)[COUNT], float upper,
                                                  float lower, uint32_t first_chunk = 0) {
    uint32_t lane = threadIdx.x % 32, row = first_row + lane / 4, byte = lane % 4 * 4;
#pragma unroll
    for (int n = 0; n < COUNT / 4; ++n) {
        uint32_t chunk = first_chunk + n;
        *reinterpret_cast<uint32_t*>(matrix + panel_offset<ROWS>(row, chunk) + byte) =
            pack_bf16x2(sums[4 * n] * upper, sums[4 * n + 1] * upper);
        *reinterpret_cast<uint32_t*>(matrix + panel_offset<ROWS>(row + 8, chunk) + byte) =
            pack_bf16x2(sums[4 * n + 2] * lower, sums[4 * n + 3] * lower);
    }
}

// `THREADS` threads write `count` rows of a matrix of panels to global memory, except rows with a null
// `target(row)`; `thread` is the index of this thread.
template <int WIDTH, int ROWS, int THREADS, typename Target>
static __device__ __forceinline__ void store_panel_rows(const unsigned char* matrix,
                                                        uint32_t first_row, uint32_t count,
                                                        uint32_t thread, Target target) {
    constexpr int CHUNKS = WIDTH / 8;
#pragma unroll 4
    for (uint32_t i = thread; i < count * CHUNKS; i += THREADS) {
        uint32_t row = first_row + i / CHUNKS, chunk = i % CHUNKS;
        bf16* elements = target(row);
        if (elements != nullptr)
            *reinterpret_cast<uint4*>(elements + chunk * 8) =
                *reinterpret_cast<const uint4*>(matrix + panel_offset<ROWS>(row, chunk));
    }
}

template <int COUNT>
static __device__ __forceinline__ void clear_sums(float (&sums)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) sums[i] = 0.0f;
}

// Starts the copies of a tile of keys or values, a matrix of panels of TILE_KEYS rows.
template <int WIDTH>
static __device__ __forceinline__ void copy_keys(SharedAddress matrix, const TensorMap* map,
                                                 const Segment& segment, uint32_t key,
                                                 SharedAddress barrier) {
#pragma unroll
    for (int panel = 0; panel < WIDTH / PANEL_COLUMNS; ++panel)
        copy_tensor(matrix + panel * (TILE_KEYS * PANEL_ROW_BYTES), map,
                    int(segment.kv_head * WIDTH + panel * PANEL_COLUMNS), int(key),
                    int(segment.sequence), barrier);
}

// ---- roles of warpgroups ----

// One warpgroup copies tiles and releases most of its registers to the two warpgroups that compute matmuls.
constexpr int MMA_THREADS = 2 * WARPGROUP;
constexpr int MMA_WARPS = MMA_THREADS / 32;

// Barriers of a ring of stages: full after a stage has been copied, empty after every warp has used
// the stage.
template <uint32_t COUNT>
struct Ring {
    static constexpr uint32_t BYTES = 2 * COUNT * 8;
    SharedAddress barriers;

    __device__ __forceinline__ SharedAddress full(uint32_t index) const {
        return barriers + index % COUNT * 8;
    }
    __device__ __forceinline__ SharedAddress empty(uint32_t index) const {
        return full(index) + COUNT * 8;
    }
    // `fillers` is the number of threads that arrive at a full barrier.
    __device__ __forceinline__ void init(uint32_t fillers = 1) const {
        for (uint32_t i = 0; i < COUNT; ++i) {
            barrier_init(full(i), fillers);
            barrier_init(empty(i), MMA_WARPS);
        }
    }
    __device__ __forceinline__ void wait_empty(uint32_t index) const {
        barrier_wait(empty(index), index / COUNT % 2 ^ 1);
    }
    // Waits until stage `index` is empty, and sets the number of bytes that its full barrier
    // expects.
    __device__ __forceinline__ void begin_fill(uint32_t index, uint32_t bytes) const {
        wait_empty(index);
        barrier_expect(full(index), bytes);
    }
    __device__ __forceinline__ void wait_full(uint32_t index) const {
        barrier_wait(full(index), index / COUNT % 2);
    }
    // Each warp calls it after its matmuls that read the stage.
    __device__ __forceinline__ void release(uint32_t index) const {
        if (threadIdx.x % 32 == 0) barrier_arrive(empty(index));
    }
};

}  // namespace hopper_attention
