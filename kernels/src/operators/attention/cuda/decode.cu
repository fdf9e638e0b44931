// Attention of generated tokens, one token of each sequence. The query heads of a key/value head are computed
// together, so that each key is read once. Long sequences are divided among blocks, and the results are merged by
// the logarithms of their sums. Keys are not read if no head is selected for them.
//
// A division has a fixed number of keys: the bits of a sequence do not depend on the other sequences.
#include "selection.cuh"

namespace decode_attention {

using attention::is_selected;

constexpr int WARPS = THREADS / 32;
// Query heads that are computed together.
constexpr int HEADS = 4;

struct PARAMETERS Parameters {
    const void* q;
    const void* k;
    const void* v;
    void* out;
    float* log_sum_exp;
    // [count, heads, splits, head_dim + 2]: the maximum, the sum of exponentials, and the sum of values, of
    // divided sequences.
    float* partial;
    // [count, 3]: the row of a token, its position, and the first entry of its blocks.
    const uint32_t* tokens;
    // [rows, routed], or null if every token computes every head.
    const uint8_t* selected;
    // [rows, heads], or null.
    const float* weights;
    const uint32_t* block_table;
    uint64_t query_stride;
    uint32_t count;
    uint32_t block_length;
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t head_dim;
    uint32_t routed;
    // Keys of a division, and divisions of the longest sequence.
    uint32_t split;
    uint32_t splits;
    float scale;
    uint32_t padding;
};

// A generated token.
struct Token {
    uint64_t row;
    uint32_t keys;
    uint32_t first_block;
    uint32_t splits;
};

__device__ __forceinline__ Token token_at(const Parameters& p, uint32_t n) {
    const uint32_t keys = p.tokens[3 * n + 1] + 1;
    return {p.tokens[3 * n], keys, p.tokens[3 * n + 2], (keys + p.split - 1) / p.split};
}

// A head's elements, distributed over the warp's lanes.
template <int SLOTS>
struct Head {
    float at[SLOTS];
};

template <int SLOTS, class T>
__device__ __forceinline__ Head<SLOTS> read(const T* elements, uint32_t head_dim) {
    Head<SLOTS> head;
#pragma unroll
    for (int j = 0; j < SLOTS; j++) {
        const uint32_t i = j * 32 + threadIdx.x % 32;
        head.at[j] = i < head_dim ? to_float(elements[i]) : 0.0f;
    }
    return head;
}

// The sums of some keys, relative to `largest`.
template <int SLOTS>
struct Sums {
    float largest = -INFINITY;
    float total = 0.0f;
    Head<SLOTS> values = {};

    __device__ __forceinline__ void add(float score, const Head<SLOTS>& value) {
        const float larger = fmaxf(largest, score);
        const float factor = expf(largest - larger), probability = expf(score - larger);
        total = total * factor + probability;
#pragma unroll
        for (int j = 0; j < SLOTS; j++) {
            values.at[j] = values.at[j] * factor + probability * value.at[j];
        }
        largest = larger;
    }

    // `other_values` belongs to this lane.
    __device__ __forceinline__ void merge(float other_largest, float other_total,
                                          const float* other_values, int stride) {
        const float larger = fmaxf(largest, other_largest);
        const float own = expf(largest - larger), other = expf(other_largest - larger);
        total = total * own + other_total * other;
#pragma unroll
        for (int j = 0; j < SLOTS; j++) {
            values.at[j] = values.at[j] * own + other_values[j * stride] * other;
        }
        largest = larger;
    }
};

// Writes the result of a token's head.
template <int SLOTS, class T>
__device__ __forceinline__ void finish(const Parameters& p, uint64_t pair, const Sums<SLOTS>& sums) {
    const float by = (p.weights ? p.weights[pair] : 1.0f) / sums.total;
    T* out = static_cast<T*>(p.out) + pair * p.head_dim;
#pragma unroll
    for (int j = 0; j < SLOTS; j++) {
        const uint32_t i = j * 32 + threadIdx.x % 32;
        if (i < p.head_dim) {
            out[i] = from_float<T>(sums.values.at[j] * by);
        }
    }
    if (threadIdx.x % 32 == 0) {
        p.log_sum_exp[pair] = sums.largest + logf(sums.total);
    }
}

// Clears the result of a head that a token did not select.
template <class T>
__device__ __forceinline__ void clear(const Parameters& p, uint64_t pair) {
    for (uint32_t i = threadIdx.x; i < p.head_dim; i += THREADS) {
        static_cast<T*>(p.out)[pair * p.head_dim + i] = from_float<T>(0.0f);
    }
    if (threadIdx.x == 0) {
        p.log_sum_exp[pair] = 0.0f;
    }
}

template <int SLOTS>
struct Shared {
    float largest[HEADS][WARPS];
    float total[HEADS][WARPS];
    float values[HEADS][WARPS][SLOTS * 32];
};

// Computes the sums of up to HEADS selected heads over the keys of a division. A warp computes every WARPS-th key.
template <int SLOTS, class T>
__device__ void heads_of_division(const Parameters& p, uint32_t n, const Token& token,
                                  const uint32_t* heads, int count) {
    __shared__ Shared<SLOTS> shared;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t kv_head = heads[0] / (p.heads / p.kv_heads);
    const T* queries = static_cast<const T*>(p.q) + token.row * p.query_stride;
    Head<SLOTS> query[HEADS];
    Sums<SLOTS> sums[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        query[h] = read<SLOTS>(queries + heads[h < count ? h : 0] * p.head_dim, p.head_dim);
    }
    const uint32_t begin = blockIdx.y * p.split, end = min(begin + p.split, token.keys);
    for (uint32_t key = begin + warp; key < end; key += WARPS) {
        const uint64_t block = p.block_table[token.first_block + key / p.block_length];
        const uint64_t row = (block * p.kv_heads + kv_head) * p.block_length + key % p.block_length;
        const uint64_t start = row * p.head_dim;
        const Head<SLOTS> k = read<SLOTS>(static_cast<const T*>(p.k) + start, p.head_dim);
        const Head<SLOTS> v = read<SLOTS>(static_cast<const T*>(p.v) + start, p.head_dim);
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            if (h < count) {
                float score = 0.0f;
#pragma unroll
                for (int j = 0; j < SLOTS; j++) {
                    score += query[h].at[j] * k.at[j];
                }
                sums[h].add(p.scale * warp_sum(score), v);
            }
        }
    }
    __syncthreads();  // The sums of the previous heads have been read.
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        if (lane == 0) {
            shared.largest[h][warp] = sums[h].largest;
            shared.total[h][warp] = sums[h].total;
        }
#pragma unroll
        for (int j = 0; j < SLOTS; j++) {
            shared.values[h][warp][j * 32 + lane] = sums[h].values.at[j];
        }
    }
    __syncthreads();
    if (warp >= uint32_t(count)) {
        return;
    }
    // The first warp always has a key.
    Sums<SLOTS> all = {};
    for (int other = 0; other < WARPS && begin + other < end; other++) {
        all.merge(shared.largest[warp][other], shared.total[warp][other],
                  shared.values[warp][other] + lane, 32);
    }
    const uint32_t head = heads[warp];
    if (token.splits == 1) {
        finish<SLOTS, T>(p, token.row * p.heads + head, all);
        return;
    }
    float* partial = p.partial + ((uint64_t(n) * p.heads + head) * p.splits + blockIdx.y) * (p.head_dim + 2);
    if (lane == 0) {
        partial[0] = all.largest;
        partial[1] = all.total;
    }
#pragma unroll
    for (int j = 0; j < SLOTS; j++) {
        const uint32_t i = j * 32 + lane;
        if (i < p.head_dim) {
            partial[2 + i] = all.values.at[j];
        }
    }
}

// One block for each (token, key/value head) and division.
template <int SLOTS, class T>
__device__ void forward(const Parameters& p) {
    const uint32_t n = blockIdx.x / p.kv_heads, group = p.heads / p.kv_heads;
    const uint32_t first = blockIdx.x % p.kv_heads * group;
    const Token token = token_at(p, n);
    if (blockIdx.y >= token.splits) {
        return;
    }
    uint32_t heads[HEADS];
    int count = 0;
    for (uint32_t head = first; head < first + group; head++) {
        if (is_selected(p, token.row, head)) {
            heads[count++] = head;
        } else if (blockIdx.y == 0) {
            clear<T>(p, token.row * p.heads + head);
        }
        if (count == HEADS || (count > 0 && head + 1 == first + group)) {
            heads_of_division<SLOTS, T>(p, n, token, heads, count);
            count = 0;
        }
    }
}

// Merges the divisions, one warp for each (token, query head).
template <int SLOTS, class T>
__device__ void merge(const Parameters& p) {
    const uint64_t index = global_thread() / 32;
    const uint32_t n = index / p.heads, head = index % p.heads;
    if (n >= p.count) {
        return;
    }
    const Token token = token_at(p, n);
    if (token.splits == 1 || !is_selected(p, token.row, head)) {
        return;
    }
    Sums<SLOTS> all = {};
    for (uint32_t split = 0; split < token.splits; split++) {
        const float* partial = p.partial + (index * p.splits + split) * (p.head_dim + 2);
        const Head<SLOTS> values = read<SLOTS>(partial + 2, p.head_dim);
        all.merge(partial[0], partial[1], values.at, 1);
    }
    finish<SLOTS, T>(p, token.row * p.heads + head, all);
}

}  // namespace decode_attention

#define EXPORT_DECODE(width, slots)                                                      \
    EXPORT(decode_attention_##width##_f32, (decode_attention::forward<slots, float>),    \
           decode_attention::Parameters)                                                 \
    EXPORT(decode_attention_##width##_bf16, (decode_attention::forward<slots, bf16>),    \
           decode_attention::Parameters)                                                 \
    EXPORT(decode_attention_merge_##width##_f32, (decode_attention::merge<slots, float>), \
           decode_attention::Parameters)                                                 \
    EXPORT(decode_attention_merge_##width##_bf16, (decode_attention::merge<slots, bf16>), \
           decode_attention::Parameters)

EXPORT_DECODE(64, 2)
EXPORT_DECODE(128, 4)
EXPORT_DECODE(256, 8)
