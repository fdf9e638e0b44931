// Attention over the (token, query head) pairs that were selected: parameters and launch geometry.
//
// For each sequence and key/value head the selected pairs are packed into rows in token order, so
// that work is proportional to the number of pairs. A packed row is token * group + head_in_group, with
// `group` query heads per key/value head. A query of token t sees the keys from document_start[t]
// to the last key or, if causal, to its own position query_offset + t.
//
// Order of launches, each with one Parameters (head dimension D, padded to 32, 64, 96, 128):
//   forward:   attention_pack_forward (only with a selection), attention_forward_dX.
//   backward:  attention_pack_backward (only with a selection), attention_backward_delta, then
//              attention_backward_dq_dX and attention_backward_dkdv_dX in any order.
// Together they write every element of out, log_sum_exp, delta, d_q, d_k and d_v.
//
// Pointers to bf16 are 4-byte aligned, head_dim and all strides even; 16-byte copies are used if
// pointers, head_dim and strides are multiples of 16 bytes.
#pragma once

#include "../../../device/cuda/operators.cuh"

namespace tiled_attention {

struct PARAMETERS Parameters {
    // Queries: row r of a token starts at element r * q_stride, and head h at h * head_dim within the row.
    const bf16* q;
    // Keys and values: row r of a token starts at element r * kv_stride, and head g at g * head_dim within
    // the row. Paged keys and values: row r of a head starts at element r * kv_stride.
    const bf16 *k, *v;
    // Keys are paged if this is not null: token p of sequence b is row p % block_length of each of the
    // kv_heads of block block_table[b * ceil(key_length / block_length) + p / block_length].
    // Forward only.
    const uint32_t* block_table;
    // Packed rows [B*G][T*group] in increasing order, and their counts [B*G]; null if every row is
    // selected.
    uint32_t *rows, *row_counts;
    // 1 if a token selected a routed head [B*T, routed]; null if every row is selected. The
    // first heads - routed heads are always selected.
    const uint8_t* selected;
    // First visible key of each token [B*T], never decreasing within a sequence; null: key 0.
    const uint32_t* document_start;
    // Factor of each head's output [B*T, H]; null: 1.
    const float* weights;
    // Output [B*T, H*D], multiplied by the weights.
    bf16* out;
    // Natural logarithm of the sum of exponentials of scaled scores [B*T, H].
    float* log_sum_exp;
    // Gradient of out [B*T, H*D].
    const bf16* d_out;
    // <d_out, O>, where O is the output before its weight [B*T, H]; 0 if the weight is 0.
    float* delta;
    // Gradients, in the layout of q, k and v.
    bf16 *d_q, *d_k, *d_v;
    uint64_t q_stride, kv_stride, d_q_stride, d_kv_stride;
    uint32_t batch, query_length, key_length, heads, kv_heads, head_dim;
    uint32_t routed, block_length, query_offset, causal;
    // 1 / sqrt(head_dim).
    float scale;
    uint32_t padding;
};

// ---- launch geometry ----
//
// kernel                    grid                                         block  shared bytes
// attention_pack...         (ceil(T / 128), kv_heads, batch)             512    0
// attention_forward_dX      (ceil(T*group / 128), kv_heads, batch)       128    forward_shared(X)
// attention_backward_delta  ceil(B*T*heads / 8)                          256    0
// attention_backward_dq_dX  (ceil(T*group / 128), kv_heads, batch)       256    dq_shared(X)
// attention_backward_dkdv_dX (ceil(key_length / 128), kv_heads, batch)   256    dkdv_shared(X, 64)
//
// attention_backward_dkdv_d128_r32 is the same kernel with dkdv_shared(128, 32). It is used if a block cannot
// have the 131 KiB of dkdv_shared(128, 64): on GPUs with 99 KiB per block, such as sm_86, sm_89 and
// sm_120.
//
// More than 48 KiB of dynamic shared memory must be enabled for each kernel before its launch.

constexpr int PACK_THREADS = 512;
constexpr int PACK_TOKENS = 128;
constexpr int PAIR_THREADS = 256;
constexpr int PAIRS_PER_BLOCK = PAIR_THREADS / 32;

constexpr int FORWARD_THREADS = 128;
constexpr int FORWARD_ROWS = 128;
constexpr int FORWARD_KEYS = 64;

constexpr int DQ_THREADS = 256;
constexpr int DQ_ROWS = 128;
constexpr int DQ_KEYS = 64;

constexpr int DKDV_THREADS = 256;
constexpr int DKDV_KEYS = 128;

// Bytes of a tile of `rows` rows.
__host__ __device__ constexpr int tile_bytes(int rows, int width) { return rows * width * 2; }

// Queries, keys, values; token, head, first and end of each row.
__host__ __device__ constexpr int forward_shared(int width) {
    return tile_bytes(FORWARD_ROWS + 2 * FORWARD_KEYS, width) + 4 * FORWARD_ROWS * 4;
}

// Two stages of keys and values, which queries and output gradients pass through first;
// token, head, first and end of each row.
__host__ __device__ constexpr int dq_shared(int width) {
    return tile_bytes(4 * DQ_KEYS, width) + 4 * DQ_ROWS * 4;
}

// Keys, values; two stages of queries, output gradients, first, end, log_sum_exp, delta, weight
// and packed row.
__host__ __device__ constexpr int dkdv_shared(int width, int rows) {
    return tile_bytes(2 * DKDV_KEYS + 4 * rows, width) + 2 * 6 * rows * 4;
}

}  // namespace tiled_attention
