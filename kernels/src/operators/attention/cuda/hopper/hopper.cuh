// Head-sparse attention for sm_90a: the kernels' arguments in addition to tiled.cuh's Parameters, and their
// launches.
//
// The kernels compute the same results as the kernels of tiled.cuh, for head dimensions 64 and 128,
// contiguous keys, and rows of all bf16 tensors that start at multiples of 16 bytes. Other problems use
// the kernels of tiled.cuh.
//
// Order of launches (X the head dimension):
//   forward:   attention_pack_forward (only with a selection), hopper_forward_dX.
//   backward:  attention_pack_backward (only with a selection), hopper_prepare_dX,
//              hopper_backward_dX, hopper_finish_dX.
//
// The backward pass first copies the queries and output gradients of the selected pairs to tiles of
// packed rows, with the statistics of each row. The tiles have the layout that wgmma requires. The copy reads
// and writes each row once, about 2% of the pass's time by its bytes. Afterwards every tile of keys
// that a row sees reads the row once. If the backward kernel gathered the rows itself, a warpgroup would
// have to compute addresses and issue copies of 16 bytes.
#pragma once

#include "../../../../device/cuda/sm90.cuh"
#include "../tile.cuh"

namespace hopper_attention {

using namespace tiled_attention;

// Keys and values as tensors of three dimensions of bf16:
//   dimensions   kv_heads * head_dim, key_length, batch
//   strides      kv_stride * 2, key_length * kv_stride * 2 bytes (of the second and third)
//   box          64, 128, 1; element strides 1
//   128-byte swizzle, no interleaving, zeros out of range.
struct PARAMETERS Maps {
    TensorMap k, v;
};

// Scratch memory, 16-byte aligned. The backward pass requires the first three buffers, uninitialised,
// and blocks_at_once. The forward pass requires next_tile.
// S = batch * kv_heads * ceil(query_length * heads / kv_heads / 64) is the number of row tiles.
struct PARAMETERS Scratch {
    // Row tiles: S * row_tile_bytes(head_dim) bytes.
    uint8_t* row_tiles;
    // Gradients of the row tiles' queries: S * 64 * head_dim.
    float* d_q_sums;
    // The number of tiles of keys that have added to each row tile's gradient: S elements. The tiles add
    // in a fixed order, which gives the same bits every time. If this is null, they add in any order.
    uint32_t* semaphores;
    // Index of the forward pass's next tile: one element, 0 before and after each launch.
    uint32_t* next_tile;
    // Blocks of the backward pass that run at the same time: a group. Even groups visit row tiles in
    // descending order, odd groups in ascending order. 0: all groups descend, which is faster with
    // semaphores.
    uint32_t blocks_at_once, padding;
};

// ---- launch geometry ----
//
// kernel              grid                                          block  shared bytes
// hopper_forward_dX   number of multiprocessors                     384    forward_shared(X)
// hopper_prepare_dX   (ceil(T*group / 64) * prepare_blocks(X), kv_heads, batch)
//                                                                   256    0
// hopper_backward_dX  (ceil(key_length / 128) * kv_heads, 1, batch)  384    backward_shared(X)
// hopper_finish_dX    (ceil(T*group / 64), kv_heads, batch)         256    tile_bytes(64, X)
//
// The arguments are Parameters, then Scratch, then Maps (forward, backward). More than 48 KiB of
// dynamic shared memory must be enabled for each kernel before its launch.

constexpr int BLOCK_THREADS = 3 * WARPGROUP;
constexpr int TILE_KEYS = 128;

// In the forward pass, two warpgroups compute 64 rows each and share keys and values.
constexpr int FORWARD_ROWS = 128;
constexpr int STAGES = 2;
// The backward pass uses queries earlier and longer than output gradients.
constexpr int QUERY_STAGES = 3;

// Rows of a row tile of the backward pass.
constexpr int TILE_ROWS = 64;

constexpr int PREPARE_THREADS = 256;
constexpr int FINISH_THREADS = 256;

// Queries, output gradients; log_sum_exp and delta of each row; first and end of each row.
__host__ __device__ constexpr int row_tile_bytes(int width) {
    return tile_bytes(2 * TILE_ROWS, width) + TILE_ROWS * 16;
}

// Blocks of hopper_prepare for each row tile: one thread for every 8 elements of a row.
__host__ __device__ constexpr int prepare_blocks(int width) {
    return TILE_ROWS * width / 8 / PREPARE_THREADS;
}

// Two stages of queries, keys and values; token, head, first and end of each row; two ForwardTiles;
// mbarriers.
__host__ __device__ constexpr int forward_shared(int width) {
    return STAGES *
               (tile_bytes(FORWARD_ROWS + 2 * TILE_KEYS, width) + 4 * FORWARD_ROWS * 4 + 4 * 4) +
           6 * STAGES * 8;
}

// Keys, values, three stages of queries and their row statistics, two stages of output gradients, two stages
// of dS, the gradient of one row tile; mbarriers, row range and tile of keys.
__host__ __device__ constexpr int backward_shared(int width) {
    return tile_bytes(2 * TILE_KEYS + (QUERY_STAGES + STAGES) * TILE_ROWS, width) +
           STAGES * tile_bytes(TILE_ROWS, TILE_KEYS) + TILE_ROWS * width * 4 +
           QUERY_STAGES * TILE_ROWS * 16 + (2 * (QUERY_STAGES + STAGES) + 1) * 8 + 6 * 4;
}

}  // namespace hopper_attention
