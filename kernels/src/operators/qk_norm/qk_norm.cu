// Query and key norms. A team of threads reads a head once, 16 bytes each. Backward, a block processes a
// group of tokens, and its threads accumulate the gradients of their columns' weights in registers;
// then another kernel sums over groups, in a fixed order.
//
// Heads that are not aligned, or have more than 32 parts of 16 bytes, are read more than once. Forward, a warp
// computes each head. Backward has two steps: first 1 / rms and the correction along x of each head, then
// the gradients, with one thread for some columns of a group of tokens.
#include "../../device/cuda/operators.cuh"

namespace qk_norm {

// Heads of a block's part in the forward pass, as in qk_norm/cuda.rs.
constexpr uint32_t HEADS = 64;
// Heads that a team processes at the same time.
constexpr int AT_ONCE = 2;

struct PARAMETERS Forward {
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

struct PARAMETERS Backward {
    const void* qkv;
    const void* weight;
    // The gradient of `normed`, replaced by the gradient of `qkv`.
    void* d_qkv;
    // 1 / rms, and the correction; each [tokens, heads + kv_heads].
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

// Teams of a block's threads: a team works on one head at a time, 16 bytes in each thread.
template <class T>
struct Teams {
    // Threads of a team, a power of two; this thread's number in the team; whether it has a part of a head.
    uint32_t size, thread;
    bool active;
    // This thread's team, and all teams of the block.
    uint32_t team, count;

    __device__ __forceinline__ explicit Teams(uint32_t head_dim) {
        const uint32_t parts = head_dim / WIDE<T>;
        size = 1;
        while (size < parts) {
            size *= 2;
        }
        thread = threadIdx.x % size;
        active = thread < parts;
        team = threadIdx.x / size;
        count = THREADS / size;
    }

    // Whether a warp's threads suffice for a head.
    static __device__ __forceinline__ bool suffice(uint64_t head_dim) {
        return head_dim / WIDE<T> <= 32;
    }

    // Sums each of the values over the team's threads, in a fixed order.
    template <int M>
    __device__ __forceinline__ void sum(float (&values)[M]) const {
        for (uint32_t bits = 1; bits < size; bits *= 2) {
#pragma unroll
            for (int i = 0; i < M; i++) {
                values[i] += __shfl_xor_sync(ALL_LANES, values[i], bits);
            }
        }
    }
};

// Computes a block's part of the heads of all tokens' queries, keys and values.
template <class T>
__device__ void forward_heads(const Forward& p) {
    constexpr int N = WIDE<T>;
    const Teams<T> teams(p.head_dim);
    const uint32_t row = p.heads + 2 * p.kv_heads, normed = p.heads + p.kv_heads;
    const uint64_t first = uint64_t(blockIdx.x) * HEADS, all = p.tokens * row;
    const uint32_t first_head = first % row, count = all - first < HEADS ? all - first : HEADS;
    const Pack<T, N>* heads = packs<N>(static_cast<const T*>(p.qkv) + first * p.head_dim);
    Pack<T, N>* out = packs<N>(static_cast<T*>(p.normed) + first * p.head_dim);
    const uint32_t parts = p.head_dim / N;
    const float mean = 1.0f / p.head_dim, eps = p.eps;
    Pack<T, N> weights[2] = {};
    if (teams.active) {
        weights[0] = static_cast<const Pack<T, N>*>(p.weight)[teams.thread];
        weights[1] = static_cast<const Pack<T, N>*>(p.weight)[parts + teams.thread];
    }
    // All threads of a warp take part in its sums.
    for (uint32_t start = 0; start < count; start += AT_ONCE * teams.count) {
        Pack<T, N> x[AT_ONCE] = {};
        float squares[AT_ONCE] = {};
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const uint32_t i = start + k * teams.count + teams.team;
            if (teams.active && i < count) {
                x[k] = heads[i * parts + teams.thread];
            }
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
#pragma unroll
            for (int j = 0; j < N; j++) {
                squares[k] += to_float(x[k].at[j]) * to_float(x[k].at[j]);
            }
        }
        teams.sum(squares);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const uint32_t i = start + k * teams.count + teams.team;
            const uint32_t head = (first_head + i) % row;
            if (head < normed) {
                const float inv_rms = rsqrtf(squares[k] * mean + eps);
                const Pack<T, N> weight = head < p.heads ? weights[0] : weights[1];
#pragma unroll
                for (int j = 0; j < N; j++) {
                    const float value = to_float(x[k].at[j]) * inv_rms;
                    x[k].at[j] = from_float<T>(value * to_float(weight.at[j]));
                }
            }
            if (teams.active && i < count) {
                out[i * parts + teams.thread] = x[k];
            }
        }
    }
}

__device__ __forceinline__ float inverse_rms(float squares, uint64_t width, double eps) {
    return float(1.0 / sqrt(double(warp_sum(squares)) / double(width) + eps));
}

// Computes head `index` of the queries, keys and values of all tokens, by a warp.
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

template <class T, int N>
__device__ void forward_by_warps(const Forward& p) {
    const uint64_t all = p.tokens * (p.heads + 2 * p.kv_heads);
    for (uint32_t i = threadIdx.x / 32; i < HEADS; i += THREADS / 32) {
        const uint64_t index = uint64_t(blockIdx.x) * HEADS + i;
        if (index < all) {
            forward_head<T, N>(p, index);
        }
    }
}

template <class T>
__device__ void forward(const Forward& p) {
    if (!(wide<T>(p.head_dim, p.qkv) && aligned(p.weight) && aligned(p.normed))) {
        forward_by_warps<T, 1>(p);
    } else if (Teams<T>::suffice(p.head_dim)) {
        forward_heads<T>(p);
    } else {
        forward_by_warps<T, WIDE<T>>(p);
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

// Adds the gradients of the columns' weights to `sums`, and replaces the heads' gradients. Processes
// `count` heads from `first` on, of the tokens from `token` to `end`.
template <class T>
__device__ void heads_backward(const Backward& p, const Teams<T>& teams, uint64_t token,
                               uint64_t end, uint32_t first, uint32_t count,
                               float (&sums)[WIDE<T>]) {
    constexpr int N = WIDE<T>;
    const uint32_t heads = token < end ? (end - token) * count : 0;
    const uint32_t row = p.heads + 2 * p.kv_heads, parts = p.head_dim / N;
    const uint64_t start_of_token = start_of(p, token, 0);
    const Pack<T, N>* tokens = packs<N>(static_cast<const T*>(p.qkv) + start_of_token);
    Pack<T, N>* d_tokens = packs<N>(static_cast<T*>(p.d_qkv) + start_of_token);
    const float mean = 1.0f / p.head_dim, eps = p.eps;
    Pack<T, N> weight = {};
    if (teams.active) {
        weight = packs<N>(static_cast<const T*>(p.weight) +
                          (first == 0 ? 0 : p.head_dim))[teams.thread];
    }
    for (uint32_t start = 0; start < heads; start += AT_ONCE * teams.count) {
        Pack<T, N> x[AT_ONCE] = {}, d[AT_ONCE] = {};
        // Index of this thread's part of a head, starting at the first token.
        uint32_t at[AT_ONCE];
        // For each head, the sum of the squares and <x weight, d_y>.
        float head_sums[2 * AT_ONCE] = {};
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const uint32_t i = start + k * teams.count + teams.team;
            at[k] = (i / count * row + first + i % count) * parts + teams.thread;
            if (teams.active && i < heads) {
                x[k] = tokens[at[k]];
                d[k] = d_tokens[at[k]];
            }
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
#pragma unroll
            for (int j = 0; j < N; j++) {
                const float value = to_float(x[k].at[j]);
                head_sums[2 * k] += value * value;
                head_sums[2 * k + 1] += value * to_float(weight.at[j]) * to_float(d[k].at[j]);
            }
        }
        teams.sum(head_sums);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const float inv_rms = rsqrtf(head_sums[2 * k] * mean + eps);
            const float correction = head_sums[2 * k + 1] * mean * inv_rms * inv_rms * inv_rms;
#pragma unroll
            for (int j = 0; j < N; j++) {
                const float value = to_float(x[k].at[j]), d_y = to_float(d[k].at[j]) * inv_rms;
                sums[j] += d_y * value;
                d[k].at[j] = from_float<T>(to_float(weight.at[j]) * d_y - correction * value);
            }
            if (teams.active && start + k * teams.count + teams.team < heads) {
                d_tokens[at[k]] = d[k];
            }
        }
    }
}

// Block i computes the queries and keys of group i of the tokens.
template <class T>
__device__ void backward_heads(const Backward& p) {
    constexpr int N = WIDE<T>;
    __shared__ Pack<float, N> of_threads[THREADS];
    const Teams<T> teams(p.head_dim);
    const uint64_t rows = (p.tokens + p.groups - 1) / p.groups, token = blockIdx.x * rows;
    const uint64_t end = token + rows < p.tokens ? token + rows : p.tokens;
#pragma unroll 1
    for (uint32_t of = 0; of < 2; of++) {
        float sums[N] = {};
        heads_backward<T>(p, teams, token, end, of == 0 ? 0 : p.heads,
                          of == 0 ? p.heads : p.kv_heads, sums);
#pragma unroll
        for (int j = 0; j < N; j++) {
            of_threads[threadIdx.x].at[j] = sums[j];
        }
        __syncthreads();
        for (uint32_t column = threadIdx.x; column < p.head_dim; column += THREADS) {
            float sum = 0.0f;
            for (uint32_t team = 0; team < teams.count; team++) {
                sum += of_threads[team * teams.size + column / N].at[column % N];
            }
            p.partial[(blockIdx.x * 2 + of) * p.head_dim + column] = sum;
        }
        __syncthreads();  // The sums have been read.
    }
}

// Measures head `index` of the queries and keys of all tokens, by a warp.
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

// Computes N columns, starting at `column`, of the heads from `first` to `end` of a group of tokens.
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
EXPORT_BLOCKS(THREADS, 3, qk_norm_backward_heads_f32, qk_norm::backward_heads<float>,
              qk_norm::Backward)
EXPORT_BLOCKS(THREADS, 3, qk_norm_backward_heads_bf16, qk_norm::backward_heads<bf16>,
              qk_norm::Backward)
EXPORT(qk_norm_measure_f32, qk_norm::measure<float>, qk_norm::Backward)
EXPORT(qk_norm_measure_bf16, qk_norm::measure<bf16>, qk_norm::Backward)
EXPORT(qk_norm_backward_f32, qk_norm::backward<float>, qk_norm::Backward)
EXPORT(qk_norm_backward_bf16, qk_norm::backward<bf16>, qk_norm::Backward)
EXPORT(qk_norm_backward_weight_f32, qk_norm::backward_weight<float>, qk_norm::Backward)
EXPORT(qk_norm_backward_weight_bf16, qk_norm::backward_weight<bf16>, qk_norm::Backward)
