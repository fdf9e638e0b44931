// RMSNorm. Forward, one block per token. Backward, one block per group of consecutive tokens, which
// reads x and d_y once: each thread keeps the gradients of its columns' weights in registers over
// the group. Rows that are not aligned, or wider than a block's threads, are read once for d_x and
// once for the group's gradient of the weight. A separate kernel sums over groups. All sums
// have a fixed order, the same on every GPU.
#include "../../device/cuda/operators.cuh"

namespace rms_norm {

// Columns of a block of the sum over groups: 32 bytes, the unit of memory. As in rms_norm/cuda.rs.
constexpr uint32_t SUM_COLUMNS = 8;

struct PARAMETERS Forward {
    const void* x;
    const void* weight;
    void* y;
    float* inv_rms;
    uint64_t width;
    double eps;
};

struct PARAMETERS Backward {
    const void* x;
    const void* weight;
    const float* inv_rms;
    const void* d_y;
    void* d_x;
    // [groups, width]
    float* partial;
    void* d_weight;
    uint64_t tokens;
    uint64_t width;
    uint64_t groups;
};

template <class T, int N>
__device__ void forward_row(const Forward& p) {
    using P = Pack<T, N>;
    const uint64_t start = blockIdx.x * p.width;
    const P* x = reinterpret_cast<const P*>(static_cast<const T*>(p.x) + start);
    const P* weight = static_cast<const P*>(p.weight);
    P* y = reinterpret_cast<P*>(static_cast<T*>(p.y) + start);
    float squares = 0.0f;
    for (uint64_t i = threadIdx.x; i < p.width / N; i += THREADS) {
        const P pack = x[i];
        for (int j = 0; j < N; j++) {
            squares += to_float(pack.at[j]) * to_float(pack.at[j]);
        }
    }
    const double mean = double(block_sum(squares)) / double(p.width);
    const float inv_rms = float(1.0 / sqrt(mean + p.eps));
    if (threadIdx.x == 0) {
        p.inv_rms[blockIdx.x] = inv_rms;
    }
    for (uint64_t i = threadIdx.x; i < p.width / N; i += THREADS) {
        P pack = x[i];
        const P scale = weight[i];
        for (int j = 0; j < N; j++) {
            pack.at[j] = from_float<T>(to_float(pack.at[j]) * inv_rms * to_float(scale.at[j]));
        }
        y[i] = pack;
    }
}

template <class T>
__device__ void forward(const Forward& p) {
    if (wide<T>(p.width, p.x) && wide<T>(p.width, p.weight) && wide<T>(p.width, p.y)) {
        forward_row<T, WIDE<T>>(p);
    } else {
        forward_row<T, 1>(p);
    }
}

// The tokens of group `group`.
struct Group {
    uint64_t first, end;

    __device__ __forceinline__ Group(const Backward& p, uint64_t group) {
        const uint64_t rows = (p.tokens + p.groups - 1) / p.groups;
        first = group * rows;
        end = first + rows < p.tokens ? first + rows : p.tokens;
    }
};

// A thread's part of a token.
template <class T>
struct Columns {
    Pack<T, WIDE<T>> x, d_y, d_x;
    float inv_rms;

    __device__ __forceinline__ void read(const Backward& p, uint64_t token, bool inside) {
        if (inside) {
            const uint64_t i = token * (p.width / WIDE<T>) + threadIdx.x;
            x = packs<WIDE<T>>(static_cast<const T*>(p.x))[i];
            d_y = packs<WIDE<T>>(static_cast<const T*>(p.d_y))[i];
            d_x = packs<WIDE<T>>(static_cast<const T*>(p.d_x))[i];
        }
        inv_rms = p.inv_rms[token];
    }
};

// The sum of `value` over the block's warps, in a fixed order, for all threads. Two consecutive calls must not
// have the same `partial`: other threads may still be reading the first sums.
__device__ __forceinline__ float sum_over_warps(float value, float (&partial)[32]) {
    value = warp_sum(value);
    if (threadIdx.x % 32 == 0) {
        partial[threadIdx.x / 32] = value;
    }
    __syncthreads();
    return warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? partial[threadIdx.x % 32] : 0.0f);
}

// Block i computes all columns of group i, 16 bytes per thread. The next token is read before this
// token's sum, so that reads do not wait for the barrier.
template <class T>
__device__ void backward_rows(const Backward& p) {
    constexpr int N = WIDE<T>;
    __shared__ float partial[2][32];
    const Group group(p, blockIdx.x);
    const bool inside = threadIdx.x < p.width / N;
    Pack<T, N> weight{};
    Columns<T> next{};
    if (inside) {
        weight = static_cast<const Pack<T, N>*>(p.weight)[threadIdx.x];
    }
    if (group.first < group.end) {
        next.read(p, group.first, inside);
    }
    const float mean = 1.0f / p.width;
    float sums[N] = {};
    for (uint64_t token = group.first; token < group.end; token++) {
        Columns<T> row = next;
        if (token + 1 < group.end) {
            next.read(p, token + 1, inside);
        }
        float inner = 0.0f;
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float product = to_float(row.x.at[j]) * to_float(row.d_y.at[j]);
            inner += product * to_float(weight.at[j]);
            sums[j] += product * row.inv_rms;
        }
        const float inv_rms = row.inv_rms;
        const float correction =
            sum_over_warps(inner, partial[token % 2]) * mean * inv_rms * inv_rms * inv_rms;
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float gradient = inv_rms * to_float(weight.at[j]) * to_float(row.d_y.at[j]) -
                                   correction * to_float(row.x.at[j]);
            row.d_x.at[j] = from_float<T>(to_float(row.d_x.at[j]) + gradient);
        }
        if (inside) {
            const uint64_t i = token * (p.width / N) + threadIdx.x;
            packs<N>(static_cast<T*>(p.d_x))[i] = row.d_x;
        }
    }
    if (inside) {
        Pack<float, N> group_sums;
#pragma unroll
        for (int j = 0; j < N; j++) {
            group_sums.at[j] = sums[j];
        }
        packs<N>(p.partial + blockIdx.x * p.width)[threadIdx.x] = group_sums;
    }
}

template <class T, int N>
__device__ void backward_row(const Backward& p) {
    using P = Pack<T, N>;
    const uint64_t start = blockIdx.x * p.width;
    const P* x = packs<N>(static_cast<const T*>(p.x) + start);
    const P* d_y = packs<N>(static_cast<const T*>(p.d_y) + start);
    const P* weight = static_cast<const P*>(p.weight);
    P* d_x = packs<N>(static_cast<T*>(p.d_x) + start);
    const float inv_rms = p.inv_rms[blockIdx.x];
    float inner = 0.0f;
    for (uint64_t i = threadIdx.x; i < p.width / N; i += THREADS) {
        const P x_pack = x[i], weight_pack = weight[i], d_y_pack = d_y[i];
#pragma unroll
        for (int j = 0; j < N; j++) {
            inner +=
                to_float(x_pack.at[j]) * to_float(weight_pack.at[j]) * to_float(d_y_pack.at[j]);
        }
    }
    const float correction = block_sum(inner) / p.width * inv_rms * inv_rms * inv_rms;
    for (uint64_t i = threadIdx.x; i < p.width / N; i += THREADS) {
        const P x_pack = x[i], weight_pack = weight[i], d_y_pack = d_y[i];
        P sum = d_x[i];
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float gradient =
                inv_rms * to_float(weight_pack.at[j]) * to_float(d_y_pack.at[j]) -
                correction * to_float(x_pack.at[j]);
            sum.at[j] = from_float<T>(to_float(sum.at[j]) + gradient);
        }
        d_x[i] = sum;
    }
}

template <class T>
__device__ __forceinline__ bool reads_wide(const Backward& p) {
    return wide<T>(p.width, p.x) && aligned(p.weight) && aligned(p.d_y) && aligned(p.d_x);
}

template <class T>
__device__ void backward_input(const Backward& p) {
    if (reads_wide<T>(p)) {
        backward_row<T, WIDE<T>>(p);
    } else {
        backward_row<T, 1>(p);
    }
}

// Sums d_y x inv_rms over a group of tokens, for N columns per thread.
template <class T, int N>
__device__ void add_columns(const Backward& p, uint64_t group) {
    const Group tokens(p, group);
    const uint64_t packs_of_row = p.width / N;
    if (global_thread() >= packs_of_row) {
        return;
    }
    float sums[N] = {};
#pragma unroll 4
    for (uint64_t token = tokens.first; token < tokens.end; token++) {
        const uint64_t i = token * packs_of_row + global_thread();
        const Pack<T, N> x = packs<N>(static_cast<const T*>(p.x))[i];
        const Pack<T, N> d_y = packs<N>(static_cast<const T*>(p.d_y))[i];
        const float inv_rms = p.inv_rms[token];
#pragma unroll
        for (int j = 0; j < N; j++) {
            sums[j] += to_float(d_y.at[j]) * to_float(x.at[j]) * inv_rms;
        }
    }
    float* partial = p.partial + group * p.width + global_thread() * N;
#pragma unroll
    for (int j = 0; j < N; j++) {
        partial[j] = sums[j];
    }
}

// Block (columns, group). With wide reads, the first blocks cover all columns.
template <class T>
__device__ void backward_partial(const Backward& p) {
    if (reads_wide<T>(p)) {
        add_columns<T, WIDE<T>>(p, blockIdx.y);
    } else {
        add_columns<T, 1>(p, blockIdx.y);
    }
}

// Adds the sum over groups to the weight's gradient. Each block has few columns, so that many blocks
// share the groups' rows. The threads with the same place share the groups of a column.
template <class G>
__device__ void backward_weight(const Backward& p) {
    constexpr uint32_t PARTS = THREADS / SUM_COLUMNS;
    __shared__ float partial[PARTS][SUM_COLUMNS];
    const uint32_t place = threadIdx.x % SUM_COLUMNS, part = threadIdx.x / SUM_COLUMNS;
    const uint64_t column = uint64_t(blockIdx.x) * SUM_COLUMNS + place;
    float sum = 0.0f;
    if (column < p.width) {
#pragma unroll 8
        for (uint64_t group = part; group < p.groups; group += PARTS) {
            sum += p.partial[group * p.width + column];
        }
    }
    partial[part][place] = sum;
    __syncthreads();
    if (part == 0 && column < p.width) {
        for (uint32_t other = 1; other < PARTS; other++) {
            sum += partial[other][place];
        }
        G& slot = static_cast<G*>(p.d_weight)[column];
        slot = from_float<G>(to_float(slot) + sum);
    }
}

}  // namespace rms_norm

EXPORT(rms_norm_forward_f32, rms_norm::forward<float>, rms_norm::Forward)
EXPORT(rms_norm_forward_bf16, rms_norm::forward<bf16>, rms_norm::Forward)
EXPORT_BLOCKS(1024, 1, rms_norm_backward_rows_f32, rms_norm::backward_rows<float>,
              rms_norm::Backward)
EXPORT_BLOCKS(1024, 1, rms_norm_backward_rows_bf16, rms_norm::backward_rows<bf16>,
              rms_norm::Backward)
EXPORT(rms_norm_backward_input_f32, rms_norm::backward_input<float>, rms_norm::Backward)
EXPORT(rms_norm_backward_input_bf16, rms_norm::backward_input<bf16>, rms_norm::Backward)
EXPORT(rms_norm_backward_partial_f32, rms_norm::backward_partial<float>, rms_norm::Backward)
EXPORT(rms_norm_backward_partial_bf16, rms_norm::backward_partial<bf16>, rms_norm::Backward)
EXPORT(rms_norm_backward_weight_f32, rms_norm::backward_weight<float>, rms_norm::Backward)
EXPORT(rms_norm_backward_weight_bf16, rms_norm::backward_weight<bf16>, rms_norm::Backward)
