// Head-sparse attention for sm_90a: what the kernels take beside tiled.cuh's Parameters, and their
// launches.
//
// The kernels compute what those of tiled.cuh do, for head dimensions 64 and 128, contiguous
// keys, and rows of all bf16 tensors at multiples of 16 bytes. Anything else stays with sm_80.
//
// Order of launches (X the head dimension):
//   forward:   attention_pack_forward (only with a selection), hopper_forward_dX.
//   backward:  attention_pack_backward (only with a selection), hopper_prepare_dX,
//              hopper_backward_dX, hopper_finish_dX.
//
// The backward pass copies the queries and output gradients of the selected pairs to tiles of
// packed rows first, as wgmma wants them, with what is known of each row. That reads and writes
// each of them once, some 2% of the pass's time by its bytes, where each is read by every tile of
// keys that it sees; gathering them there would need a warpgroup for addresses and copies of 16
// bytes.
#pragma once

#include "../../../cuda/sm90.cuh"
#include "../tile.cuh"

namespace hopper_attention {

using namespace tiled_attention;

// Keys and values as tensors of three dimensions of bf16:
//   dimensions   kv_heads * head_dim, key_length, batch
//   strides      kv_stride * 2, key_length * kv_stride * 2 bytes (of the second and third)
//   box          64, 128, 1; element strides 1
//   128-byte swizzle, no interleaving, zeros out of range.
struct Maps {
    TensorMap k, v;
};
static_assert(sizeof(Maps) == 256 && offsetof(Maps, k) == 0 && offsetof(Maps, v) == 128,
              "as in attention/cuda/hopper.rs");

// Scratch memory, 16-byte aligned. The backward pass needs the first three, whose contents are
// arbitrary before, and key_tiles_at_once; the forward pass needs next_tile.
// S = batch * kv_heads * ceil(query_length * heads / kv_heads / 64) counts the row tiles.
struct Scratch {
    // Row tiles: S * row_tile_bytes(head_dim) bytes.
    unsigned char* row_tiles;
    // Gradients of the row tiles' queries: S * 64 * head_dim.
    float* d_q_sums;
    // How many tiles of keys added to each row tile's gradient: S elements. Null: they add in any
    // order; otherwise in a fixed one, which gives the same bits every time.
    uint32_t* turns;
    // Number of the forward pass's next tile: one number, 0 before the first launch and after each.
    uint32_t* next_tile;
    // Tiles of keys of a head that run at the same time: a group. Even groups visit row tiles in
    // descending order, odd groups in ascending order. 0: all descend, as turns require for speed.
    uint32_t key_tiles_at_once, padding;
};
static_assert(sizeof(Scratch) == 40 && offsetof(Scratch, row_tiles) == 0 &&
              offsetof(Scratch, d_q_sums) == 8 && offsetof(Scratch, turns) == 16 &&
              offsetof(Scratch, next_tile) == 24 && offsetof(Scratch, key_tiles_at_once) == 32 &&
              offsetof(Scratch, padding) == 36,
              "as in attention/cuda/hopper.rs");

// ---- launch geometry ----
//
// kernel              grid                                          block  shared bytes
// hopper_forward_dX   number of multiprocessors                     384    forward_shared(X)
// hopper_prepare_dX   (ceil(T*group / 64) * prepare_blocks(X), kv_heads, batch)
//                                                                   256    0
// hopper_backward_dX  (kv_heads, ceil(key_length / 128), batch)     384    backward_shared(X)
// hopper_finish_dX    (ceil(T*group / 64), kv_heads, batch)         256    tile_bytes(64, X)
//
// Kernels take Parameters, then Scratch, then Maps (forward, backward). More than 48 KiB of dynamic
// shared memory has to be allowed for each kernel before its launch.

constexpr int BLOCK_THREADS = 3 * WARPGROUP;
constexpr int TILE_KEYS = 128;

// A warpgroup computes 64 rows of the forward pass, two of them share keys and values.
constexpr int FORWARD_ROWS = 128;
constexpr int STAGES = 2;
// Queries of the backward pass are needed earlier than its output gradients, and longer.
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

// Two stages of queries, keys and values; token, head, first and end of each row; what is known of
// two tiles; mbarriers.
__host__ __device__ constexpr int forward_shared(int width) {
    return STAGES *
               (tile_bytes(FORWARD_ROWS + 2 * TILE_KEYS, width) + 4 * FORWARD_ROWS * 4 + 4 * 4) +
           6 * STAGES * 8;
}

// Keys, values, three stages of queries and their row statistics, two of output gradients, two of dS, the
// gradient of one row tile; mbarriers and row range.
__host__ __device__ constexpr int backward_shared(int width) {
    return tile_bytes(2 * TILE_KEYS + (QUERY_STAGES + STAGES) * TILE_ROWS, width) +
           STAGES * tile_bytes(TILE_ROWS, TILE_KEYS) + TILE_ROWS * width * 4 +
           QUERY_STAGES * TILE_ROWS * 16 + (2 * (QUERY_STAGES + STAGES) + 1) * 8 + 4 * 4;
}

}  // namespace hopper_attention
