// Attention by plain arithmetic, one warp per row: for f32, for heads that the tensor-core kernels do
// not support, and as the reference of these kernels in tests.
#include "selection.cuh"

namespace plain_attention {

using attention::is_selected;

// Elements of a head per lane: heads have at most 256 elements.
constexpr int SLOTS = 8;

struct PARAMETERS Parameters {
    const void* q;
    const void* k;
    const void* v;
    // Forward: written. Backward: unused.
    void* out;
    float* log_sum_exp;
    // Backward only.
    const void* d_out;
    void* d_qkv;
    float* delta;
    // [tokens, routed], or null if every token computes every head.
    const uint8_t* selected;
    // [tokens, heads], or null.
    const float* weights;
    // [tokens], or null.
    const uint32_t* document_start;
    // [batch, blocks of a sequence], or null if keys are contiguous.
    const uint32_t* block_table;
    uint64_t query_stride;
    uint64_t key_stride;
    uint64_t query_offset;
    uint32_t batch;
    uint32_t query_length;
    uint32_t key_length;
    uint32_t block_length;
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t head_dim;
    uint32_t routed;
    uint32_t causal;
    float scale;
};

// A head's elements, distributed over the warp's lanes.
struct Head {
    float at[SLOTS];
};

template <class T>
__device__ Head read(const T* elements, uint32_t head_dim) {
    Head head;
    for (int j = 0; j < SLOTS; j++) {
        const uint32_t i = j * 32 + threadIdx.x % 32;
        head.at[j] = i < head_dim ? to_float(elements[i]) : 0.0f;
    }
    return head;
}

template <class T>
__device__ void write(T* elements, uint32_t head_dim, const Head& head, float by) {
    for (int j = 0; j < SLOTS; j++) {
        const uint32_t i = j * 32 + threadIdx.x % 32;
        if (i < head_dim) {
            elements[i] = from_float<T>(head.at[j] * by);
        }
    }
}

__device__ __forceinline__ float dot(const Head& a, const Head& b) {
    float sum = 0.0f;
    for (int j = 0; j < SLOTS; j++) {
        sum += a.at[j] * b.at[j];
    }
    return warp_sum(sum);
}

__device__ __forceinline__ void add(Head& sum, float by, const Head& head) {
    for (int j = 0; j < SLOTS; j++) {
        sum.at[j] += by * head.at[j];
    }
}

// The first key that the token sees, and the end of the keys that it sees.
__device__ __forceinline__ uint32_t first_key(const Parameters& p, uint64_t token) {
    return p.document_start ? p.document_start[token] : 0;
}

__device__ __forceinline__ uint32_t end_key(const Parameters& p, uint64_t token) {
    return p.causal ? uint32_t(p.query_offset + token % p.query_length + 1) : p.key_length;
}

// Index of the first element of a sequence's key or value.
__device__ __forceinline__ uint64_t key_start(const Parameters& p, uint32_t sequence,
                                              uint32_t kv_head, uint32_t key) {
    if (p.block_table) {
        const uint32_t blocks = (p.key_length + p.block_length - 1) / p.block_length;
        const uint64_t block = p.block_table[sequence * blocks + key / p.block_length];
        const uint64_t row = (block * p.kv_heads + kv_head) * p.block_length + key % p.block_length;
        return row * p.key_stride;
    }
    return (uint64_t(sequence) * p.key_length + key) * p.key_stride + kv_head * p.head_dim;
}

__device__ __forceinline__ uint64_t global_warp() { return global_thread() / 32; }

// One warp per (token, query head).
template <class T>
__device__ void forward(const Parameters& p) {
    const uint64_t pair = global_warp(), token = pair / p.heads;
    const uint32_t head = pair % p.heads, sequence = token / p.query_length;
    if (token >= uint64_t(p.batch) * p.query_length) {
        return;
    }
    T* out = static_cast<T*>(p.out) + pair * p.head_dim;
    Head sum = {};
    if (!is_selected(p, token, head)) {
        write(out, p.head_dim, sum, 0.0f);
        p.log_sum_exp[pair] = 0.0f;
        return;
    }
    const uint32_t kv_head = head / (p.heads / p.kv_heads);
    const T* q = static_cast<const T*>(p.q) + token * p.query_stride + head * p.head_dim;
    const Head query = read(q, p.head_dim);
    float largest = -INFINITY, total = 0.0f;
    for (uint32_t key = first_key(p, token); key < end_key(p, token); key++) {
        const uint64_t start = key_start(p, sequence, kv_head, key);
        const float score =
            p.scale * dot(query, read(static_cast<const T*>(p.k) + start, p.head_dim));
        const float larger = fmaxf(largest, score), factor = expf(largest - larger);
        const float probability = expf(score - larger);
        total = total * factor + probability;
        for (int j = 0; j < SLOTS; j++) {
            sum.at[j] *= factor;
        }
        add(sum, probability, read(static_cast<const T*>(p.v) + start, p.head_dim));
        largest = larger;
    }
    const float weight = p.weights ? p.weights[pair] : 1.0f;
    write(out, p.head_dim, sum, weight / total);
    p.log_sum_exp[pair] = largest + logf(total);
}

// One warp per (token, query head): computes the query's gradient and delta = sum(P dP).
template <class T>
__device__ void backward_queries(const Parameters& p) {
    const uint64_t pair = global_warp(), token = pair / p.heads;
    const uint32_t head = pair % p.heads, sequence = token / p.query_length;
    if (token >= uint64_t(p.batch) * p.query_length) {
        return;
    }
    T* d_q = static_cast<T*>(p.d_qkv) + token * p.query_stride + head * p.head_dim;
    Head sum = {};
    if (!is_selected(p, token, head)) {
        write(d_q, p.head_dim, sum, 0.0f);
        p.delta[pair] = 0.0f;
        return;
    }
    const uint32_t kv_head = head / (p.heads / p.kv_heads);
    const T* q = static_cast<const T*>(p.q) + token * p.query_stride + head * p.head_dim;
    const Head query = read(q, p.head_dim);
    const Head d_out = read(static_cast<const T*>(p.d_out) + pair * p.head_dim, p.head_dim);
    // dq = sum(P dP k) - delta sum(P k) needs one pass. P sums to 1 except for rounding.
    Head keys = {};
    float total = 0.0f, delta = 0.0f;
    for (uint32_t key = first_key(p, token); key < end_key(p, token); key++) {
        const uint64_t start = key_start(p, sequence, kv_head, key);
        const Head k = read(static_cast<const T*>(p.k) + start, p.head_dim);
        const Head v = read(static_cast<const T*>(p.v) + start, p.head_dim);
        const float probability = expf(p.scale * dot(query, k) - p.log_sum_exp[pair]);
        const float d_p = dot(d_out, v);
        total += probability;
        delta += probability * d_p;
        add(sum, probability * d_p, k);
        add(keys, probability, k);
    }
    delta /= total;
    add(sum, -delta, keys);
    const float weight = p.weights ? p.weights[pair] : 1.0f;
    write(d_q, p.head_dim, sum, weight * p.scale);
    if (threadIdx.x % 32 == 0) {
        p.delta[pair] = delta;
    }
}

// One warp per (sequence, key, key/value head): computes the gradients of the key and the value.
template <class T>
__device__ void backward_keys(const Parameters& p) {
    const uint64_t index = global_warp(), row = index / p.kv_heads;
    const uint32_t kv_head = index % p.kv_heads, group = p.heads / p.kv_heads;
    if (row >= uint64_t(p.batch) * p.key_length) {
        return;
    }
    const uint32_t sequence = row / p.key_length, key = row % p.key_length;
    const uint64_t start = row * p.key_stride + kv_head * p.head_dim;
    const Head k = read(static_cast<const T*>(p.k) + start, p.head_dim);
    const Head v = read(static_cast<const T*>(p.v) + start, p.head_dim);
    Head d_k = {}, d_v = {};
    const uint64_t first = uint64_t(sequence) * p.query_length;
    for (uint64_t token = first; token < first + p.query_length; token++) {
        if (key < first_key(p, token) || key >= end_key(p, token)) {
            continue;
        }
        for (uint32_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
            if (!is_selected(p, token, head)) {
                continue;
            }
            const uint64_t pair = token * p.heads + head;
            const T* q = static_cast<const T*>(p.q) + token * p.query_stride + head * p.head_dim;
            const Head query = read(q, p.head_dim);
            const Head d_out = read(static_cast<const T*>(p.d_out) + pair * p.head_dim, p.head_dim);
            const float weight = p.weights ? p.weights[pair] : 1.0f;
            const float probability = expf(p.scale * dot(query, k) - p.log_sum_exp[pair]) * weight;
            add(d_v, probability, d_out);
            add(d_k, probability * (dot(d_out, v) - p.delta[pair]), query);
        }
    }
    T* d_qkv = static_cast<T*>(p.d_qkv) + row * p.query_stride;
    write(d_qkv + (p.heads + kv_head) * p.head_dim, p.head_dim, d_k, p.scale);
    write(d_qkv + (p.heads + p.kv_heads + kv_head) * p.head_dim, p.head_dim, d_v, 1.0f);
}

}  // namespace plain_attention

EXPORT(plain_attention_forward_f32, plain_attention::forward<float>, plain_attention::Parameters)
EXPORT(plain_attention_forward_bf16, plain_attention::forward<bf16>, plain_attention::Parameters)
EXPORT(plain_attention_backward_queries_f32, plain_attention::backward_queries<float>,
       plain_attention::Parameters)
EXPORT(plain_attention_backward_queries_bf16, plain_attention::backward_queries<bf16>,
       plain_attention::Parameters)
EXPORT(plain_attention_backward_keys_f32, plain_attention::backward_keys<float>,
       plain_attention::Parameters)
EXPORT(plain_attention_backward_keys_bf16, plain_attention::backward_keys<bf16>,
       plain_attention::Parameters)
