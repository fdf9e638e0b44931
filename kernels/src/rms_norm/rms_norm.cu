// RMSNorm, a block for each token; the weight's gradient in two steps, partial sums over parts of
// the tokens and their sum, both in a fixed order.
#include "../cuda/operators.cuh"

namespace rms_norm {

struct Forward {
    const void* x;
    const void* weight;
    void* y;
    float* inv_rms;
    uint64_t width;
    double eps;
};

struct Backward {
    const void* x;
    const void* weight;
    const float* inv_rms;
    const void* d_y;
    void* d_x;
    // [parts, width]
    float* partial;
    void* d_weight;
    uint64_t tokens;
    uint64_t width;
    uint64_t parts;
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

template <class T>
__device__ void backward_input(const Backward& p) {
    const uint64_t start = blockIdx.x * p.width;
    const T* x = static_cast<const T*>(p.x) + start;
    const T* d_y = static_cast<const T*>(p.d_y) + start;
    const T* weight = static_cast<const T*>(p.weight);
    T* d_x = static_cast<T*>(p.d_x) + start;
    const float inv_rms = p.inv_rms[blockIdx.x];
    float inner = 0.0f;
    for (uint64_t i = threadIdx.x; i < p.width; i += THREADS) {
        inner += to_float(x[i]) * to_float(weight[i]) * to_float(d_y[i]);
    }
    const float correction = block_sum(inner) / p.width * inv_rms * inv_rms * inv_rms;
    for (uint64_t i = threadIdx.x; i < p.width; i += THREADS) {
        const float gradient =
            inv_rms * to_float(weight[i]) * to_float(d_y[i]) - correction * to_float(x[i]);
        d_x[i] = from_float<T>(to_float(d_x[i]) + gradient);
    }
}

// Block (columns, part): the part's sum of d_y x inv_rms, a column for each thread.
template <class T>
__device__ void backward_partial(const Backward& p) {
    const uint64_t column = global_thread();
    const uint64_t part = blockIdx.y, rows = (p.tokens + p.parts - 1) / p.parts;
    const uint64_t end = part * rows + rows < p.tokens ? part * rows + rows : p.tokens;
    if (column >= p.width) {
        return;
    }
    float sum = 0.0f;
    for (uint64_t token = part * rows; token < end; token++) {
        const uint64_t i = token * p.width + column;
        const float x = to_float(static_cast<const T*>(p.x)[i]);
        sum += to_float(static_cast<const T*>(p.d_y)[i]) * x * p.inv_rms[token];
    }
    p.partial[part * p.width + column] = sum;
}

template <class G>
__device__ void backward_weight(const Backward& p) {
    const uint64_t column = global_thread();
    if (column >= p.width) {
        return;
    }
    float sum = 0.0f;
    for (uint64_t part = 0; part < p.parts; part++) {
        sum += p.partial[part * p.width + column];
    }
    G& slot = static_cast<G*>(p.d_weight)[column];
    slot = from_float<G>(to_float(slot) + sum);
}

}  // namespace rms_norm

EXPORT(rms_norm_forward_f32, rms_norm::forward<float>, rms_norm::Forward)
EXPORT(rms_norm_forward_bf16, rms_norm::forward<bf16>, rms_norm::Forward)
EXPORT(rms_norm_backward_input_f32, rms_norm::backward_input<float>, rms_norm::Backward)
EXPORT(rms_norm_backward_input_bf16, rms_norm::backward_input<bf16>, rms_norm::Backward)
EXPORT(rms_norm_backward_partial_f32, rms_norm::backward_partial<float>, rms_norm::Backward)
EXPORT(rms_norm_backward_partial_bf16, rms_norm::backward_partial<bf16>, rms_norm::Backward)
EXPORT(rms_norm_backward_weight_f32, rms_norm::backward_weight<float>, rms_norm::Backward)
EXPORT(rms_norm_backward_weight_bf16, rms_norm::backward_weight<bf16>, rms_norm::Backward)
