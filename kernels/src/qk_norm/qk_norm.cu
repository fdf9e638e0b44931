// Query and key norms. Forward, one warp per head of a token. Backward in three steps: 1 / rms and the
// correction along x of each head; the gradients, one thread for some columns of a group of tokens,
// which also sums the weights' gradients of its group; the sum over groups, in a fixed order.
#include "../cuda/operators.cuh"

namespace qk_norm {

struct Forward {
    const void* qkv;
    // [2, head_dim]
    const void* weight;
    void* normed;
    uint64_t tokens;
    uint32_t heads;
    uint32_t kv_heads;
    uint64_t head_dim;
    double eps;
};
static_assert(sizeof(Forward) == 56 && offsetof(Forward, qkv) == 0 &&
              offsetof(Forward, weight) == 8 && offsetof(Forward, normed) == 16 &&
              offsetof(Forward, tokens) == 24 && offsetof(Forward, heads) == 32 &&
              offsetof(Forward, kv_heads) == 36 && offsetof(Forward, head_dim) == 40 &&
              offsetof(Forward, eps) == 48,
              "as in qk_norm/cuda.rs");

struct Backward {
    const void* qkv;
    const void* weight;
    // The gradient of `normed`, replaced by the gradient of `qkv`.
    void* d_qkv;
    // 1 / rms and correction, [tokens, heads + kv_heads] each.
    float* inv_rms;
    float* correction;
    // [groups, 2, head_dim]
    float* partial;
    void* d_weight;
    uint64_t tokens;
    uint64_t groups;
    uint32_t heads;
    uint32_t kv_heads;
    uint64_t head_dim;
    double eps;
};
static_assert(sizeof(Backward) == 96 && offsetof(Backward, qkv) == 0 &&
              offsetof(Backward, weight) == 8 && offsetof(Backward, d_qkv) == 16 &&
              offsetof(Backward, inv_rms) == 24 && offsetof(Backward, correction) == 32 &&
              offsetof(Backward, partial) == 40 && offsetof(Backward, d_weight) == 48 &&
              offsetof(Backward, tokens) == 56 && offsetof(Backward, groups) == 64 &&
              offsetof(Backward, heads) == 72 && offsetof(Backward, kv_heads) == 76 &&
              offsetof(Backward, head_dim) == 80 && offsetof(Backward, eps) == 88,
              "as in qk_norm/cuda.rs");

__device__ __forceinline__ float inverse_rms(float squares, uint64_t width, double eps) {
    return float(1.0 / sqrt(double(warp_sum(squares)) / double(width) + eps));
}

// Head `index` of the queries, keys and values of all tokens, by a warp.
template <class T, int N>
__device__ void forward_head(const Forward& p, uint64_t index) {
    const uint32_t head = index % (p.heads + 2 * p.kv_heads), lane = threadIdx.x % 32;
    const Pack<T, N>* x = packs<N>(static_cast<const T*>(p.qkv) + index * p.head_dim);
    Pack<T, N>* y = packs<N>(static_cast<T*>(p.normed) + index * p.head_dim);
    const uint64_t count = p.head_dim / N;
    if (head >= p.heads + p.kv_heads) {
        for (uint64_t i = lane; i < count; i += 32) {
            y[i] = x[i];
        }
        return;
    }
    const T* weights = static_cast<const T*>(p.weight) + (head < p.heads ? 0 : p.head_dim);
    float squares = 0.0f;
    for (uint64_t i = lane; i < count; i += 32) {
        const Pack<T, N> pack = x[i];
#pragma unroll
        for (int j = 0; j < N; j++) {
            squares += to_float(pack.at[j]) * to_float(pack.at[j]);
        }
    }
    const float inv_rms = inverse_rms(squares, p.head_dim, p.eps);
    for (uint64_t i = lane; i < count; i += 32) {
        Pack<T, N> pack = x[i];
        const Pack<T, N> scale = packs<N>(weights)[i];
#pragma unroll
        for (int j = 0; j < N; j++) {
            pack.at[j] = from_float<T>(to_float(pack.at[j]) * inv_rms * to_float(scale.at[j]));
        }
        y[i] = pack;
    }
}

template <class T>
__device__ void forward(const Forward& p) {
    const uint64_t index = global_thread() / 32;
    if (index >= p.tokens * (p.heads + 2 * p.kv_heads)) {
        return;
    }
    if (wide<T>(p.head_dim, p.qkv) && aligned(p.weight) && aligned(p.normed)) {
        forward_head<T, WIDE<T>>(p, index);
    } else {
        forward_head<T, 1>(p, index);
    }
}

template <class T>
__device__ __forceinline__ bool reads_wide(const Backward& p) {
    return wide<T>(p.head_dim, p.qkv) && aligned(p.weight) && aligned(p.d_qkv);
}

// Index of the first element of head `head` of a token.
__device__ __forceinline__ uint64_t start_of(const Backward& p, uint64_t token, uint32_t head) {
    return (token * (p.heads + 2 * p.kv_heads) + head) * p.head_dim;
}

// Head `index` of the queries and keys of all tokens, by a warp.
template <class T, int N>
__device__ void measure_head(const Backward& p, uint64_t index) {
    const uint64_t token = index / (p.heads + p.kv_heads);
    const uint32_t head = index % (p.heads + p.kv_heads), lane = threadIdx.x % 32;
    const uint64_t start = start_of(p, token, head);
    const Pack<T, N>* x = packs<N>(static_cast<const T*>(p.qkv) + start);
    const Pack<T, N>* d_y = packs<N>(static_cast<const T*>(p.d_qkv) + start);
    const T* weights = static_cast<const T*>(p.weight) + (head < p.heads ? 0 : p.head_dim);
    float squares = 0.0f, inner = 0.0f;
    for (uint64_t i = lane; i < p.head_dim / N; i += 32) {
        const Pack<T, N> x_pack = x[i], d_y_pack = d_y[i], weight = packs<N>(weights)[i];
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float value = to_float(x_pack.at[j]);
            squares += value * value;
            inner += value * to_float(weight.at[j]) * to_float(d_y_pack.at[j]);
        }
    }
    const float inv_rms = inverse_rms(squares, p.head_dim, p.eps);
    const float mean = warp_sum(inner) / p.head_dim;
    if (lane == 0) {
        p.inv_rms[index] = inv_rms;
        p.correction[index] = mean * inv_rms * inv_rms * inv_rms;
    }
}

template <class T>
__device__ void measure(const Backward& p) {
    const uint64_t index = global_thread() / 32;
    if (index >= p.tokens * (p.heads + p.kv_heads)) {
        return;
    }
    if (reads_wide<T>(p)) {
        measure_head<T, WIDE<T>>(p, index);
    } else {
        measure_head<T, 1>(p, index);
    }
}

// N columns, from `column` on, of the heads from `first` to `end` of a group of tokens.
template <class T, int N>
__device__ void columns_backward(const Backward& p, uint64_t group, uint64_t column, uint32_t first,
                                 uint32_t end) {
    const uint64_t weight_start = (first == 0 ? 0 : p.head_dim) + column;
    const Pack<T, N> weight = *packs<N>(static_cast<const T*>(p.weight) + weight_start);
    const uint64_t rows = (p.tokens + p.groups - 1) / p.groups;
    const uint64_t last = group * rows + rows < p.tokens ? group * rows + rows : p.tokens;
    float sums[N] = {};
    for (uint64_t token = group * rows; token < last; token++) {
#pragma unroll 4
        for (uint32_t head = first; head < end; head++) {
            const uint64_t start = start_of(p, token, head) + column;
            const uint64_t index = token * (p.heads + p.kv_heads) + head;
            const float inv_rms = p.inv_rms[index], correction = p.correction[index];
            const Pack<T, N> x = *packs<N>(static_cast<const T*>(p.qkv) + start);
            Pack<T, N>* slot = packs<N>(static_cast<T*>(p.d_qkv) + start);
            Pack<T, N> d = *slot;
#pragma unroll
            for (int j = 0; j < N; j++) {
                const float value = to_float(x.at[j]), d_y = to_float(d.at[j]);
                sums[j] += d_y * value * inv_rms;
                d.at[j] = from_float<T>(inv_rms * to_float(weight.at[j]) * d_y -
                                        correction * value);
            }
            *slot = d;
        }
    }
    float* partial = p.partial + group * 2 * p.head_dim + weight_start;
#pragma unroll
    for (int j = 0; j < N; j++) {
        partial[j] = sums[j];
    }
}

template <class T, int N>
__device__ void group_backward(const Backward& p) {
    const uint64_t packs_of_head = p.head_dim / N;
    const uint64_t group = global_thread() / packs_of_head;
    const uint64_t column = global_thread() % packs_of_head * N;
    if (group >= p.groups) {
        return;
    }
    columns_backward<T, N>(p, group, column, 0, p.heads);
    columns_backward<T, N>(p, group, column, p.heads, p.heads + p.kv_heads);
}

// With wide reads, the first blocks cover all columns.
template <class T>
__device__ void backward(const Backward& p) {
    if (reads_wide<T>(p)) {
        group_backward<T, WIDE<T>>(p);
    } else {
        group_backward<T, 1>(p);
    }
}

// One block per column of the two weights.
template <class G>
__device__ void backward_weight(const Backward& p) {
    float sum = 0.0f;
    for (uint64_t group = threadIdx.x; group < p.groups; group += THREADS) {
        sum += p.partial[group * 2 * p.head_dim + blockIdx.x];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        G& slot = static_cast<G*>(p.d_weight)[blockIdx.x];
        slot = from_float<G>(to_float(slot) + sum);
    }
}

}  // namespace qk_norm

EXPORT(qk_norm_forward_f32, qk_norm::forward<float>, qk_norm::Forward)
EXPORT(qk_norm_forward_bf16, qk_norm::forward<bf16>, qk_norm::Forward)
EXPORT(qk_norm_measure_f32, qk_norm::measure<float>, qk_norm::Backward)
EXPORT(qk_norm_measure_bf16, qk_norm::measure<bf16>, qk_norm::Backward)
EXPORT(qk_norm_backward_f32, qk_norm::backward<float>, qk_norm::Backward)
EXPORT(qk_norm_backward_bf16, qk_norm::backward<bf16>, qk_norm::Backward)
EXPORT(qk_norm_backward_weight_f32, qk_norm::backward_weight<float>, qk_norm::Backward)
EXPORT(qk_norm_backward_weight_bf16, qk_norm::backward_weight<bf16>, qk_norm::Backward)
