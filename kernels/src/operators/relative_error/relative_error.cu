// The relative squared error of rows and its gradient, one block per row.
#include "../../device/cuda/operators.cuh"

namespace relative_error {

struct PARAMETERS Parameters {
    const void* y;
    const void* target;
    void* d_y;
    // One per row.
    double* errors;
    uint64_t width;
    float scale;
    uint32_t padding;
};

template <class T, int N>
__device__ void row(const Parameters& p) {
    using P = Pack<T, N>;
    const uint64_t start = blockIdx.x * p.width;
    const P* y = reinterpret_cast<const P*>(static_cast<const T*>(p.y) + start);
    const P* target = reinterpret_cast<const P*>(static_cast<const T*>(p.target) + start);
    P* d_y = reinterpret_cast<P*>(static_cast<T*>(p.d_y) + start);
    float squares = 0.0f, size = 0.0f;
    for (uint64_t i = threadIdx.x; i < p.width / N; i += THREADS) {
        const P a = y[i], b = target[i];
        for (int j = 0; j < N; j++) {
            const float t = to_float(b.at[j]), difference = to_float(a.at[j]) - t;
            squares += difference * difference;
            size += t * t;
        }
    }
    const double all = double(block_sum(size));
    const double error = double(block_sum(squares));
    const double inverse = all > 0.0 ? 1.0 / all : 0.0;
    const float factor = float(2.0 * double(p.scale) * inverse);
    if (threadIdx.x == 0) {
        p.errors[blockIdx.x] = error * inverse;
    }
    for (uint64_t i = threadIdx.x; i < p.width / N; i += THREADS) {
        const P a = y[i], b = target[i];
        P out;
        for (int j = 0; j < N; j++) {
            out.at[j] = from_float<T>(factor * (to_float(a.at[j]) - to_float(b.at[j])));
        }
        d_y[i] = out;
    }
}

template <class T>
__device__ void rows(const Parameters& p) {
    if (wide<T>(p.width, p.y) && wide<T>(p.width, p.target) && wide<T>(p.width, p.d_y)) {
        row<T, WIDE<T>>(p);
    } else {
        row<T, 1>(p);
    }
}

}  // namespace relative_error

EXPORT(relative_error_f32, relative_error::rows<float>, relative_error::Parameters)
EXPORT(relative_error_bf16, relative_error::rows<bf16>, relative_error::Parameters)
