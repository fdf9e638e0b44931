// AdamW and the sums that clipping needs. The squared norm never leaves the device.
#include "../cuda/operators.cuh"

namespace adamw {

struct SquaredNorm {
    const void* x;
    // One sum for each block.
    double* partial;
    uint64_t count;
};

struct Sum {
    const double* x;
    double* out;
    uint64_t count;
    double scale;
};

struct Update {
    const double* squared_norm;
    const void* gradients;
    void* weights;
    // Null: the weights are their own master copy.
    float* master;
    void* first_moment;
    void* second_moment;
    uint64_t count;
    double clip_norm;
    float keep;
    float rate;
    float root_correction;
    float beta1;
    float beta2;
    float share1;
    float share2;
    float eps;
};

template <class G>
__device__ void squared_norm(const SquaredNorm& p) {
    double sum = 0.0;
    for (uint64_t i = global_thread(); i < p.count; i += global_threads()) {
        const double x = to_float(static_cast<const G*>(p.x)[i]);
        sum += x * x;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        p.partial[blockIdx.x] = sum;
    }
}

// out[0] += scale * sum(x), by one block.
__device__ __forceinline__ void sum(const Sum& p) {
    double sum = 0.0;
    for (uint64_t i = threadIdx.x; i < p.count; i += THREADS) {
        sum += p.x[i];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        p.out[0] += p.scale * sum;
    }
}

template <class T, class G, class M>
__device__ void update(const Update& p) {
    const double norm = sqrt(p.squared_norm[0]);
    const float clip = float(fmin(p.clip_norm / (norm + 1e-6), 1.0));
    T* weights = static_cast<T*>(p.weights);
    M* first = static_cast<M*>(p.first_moment);
    M* second = static_cast<M*>(p.second_moment);
    for (uint64_t i = global_thread(); i < p.count; i += global_threads()) {
        const float gradient = to_float(static_cast<const G*>(p.gradients)[i]) * clip;
        const float m = p.beta1 * to_float(first[i]) + p.share1 * gradient;
        const float v = p.beta2 * to_float(second[i]) + p.share2 * gradient * gradient;
        const float before = p.master ? p.master[i] : to_float(weights[i]);
        const float denominator = sqrtf(v) * p.root_correction + p.eps;
        const float after = before * p.keep - p.rate * m / denominator;
        if (p.master) {
            p.master[i] = after;
        }
        weights[i] = from_float<T>(after);
        first[i] = from_float<M>(m);
        second[i] = from_float<M>(v);
    }
}

}  // namespace adamw

EXPORT(squared_norm_f32, adamw::squared_norm<float>, adamw::SquaredNorm)
EXPORT(squared_norm_bf16, adamw::squared_norm<bf16>, adamw::SquaredNorm)
EXPORT(sum_f64, adamw::sum, adamw::Sum)
EXPORT(adamw_f32_f32_f32, (adamw::update<float, float, float>), adamw::Update)
EXPORT(adamw_f32_f32_bf16, (adamw::update<float, float, bf16>), adamw::Update)
EXPORT(adamw_f32_bf16_f32, (adamw::update<float, bf16, float>), adamw::Update)
EXPORT(adamw_f32_bf16_bf16, (adamw::update<float, bf16, bf16>), adamw::Update)
EXPORT(adamw_bf16_f32_f32, (adamw::update<bf16, float, float>), adamw::Update)
EXPORT(adamw_bf16_f32_bf16, (adamw::update<bf16, float, bf16>), adamw::Update)
EXPORT(adamw_bf16_bf16_f32, (adamw::update<bf16, bf16, float>), adamw::Update)
EXPORT(adamw_bf16_bf16_bf16, (adamw::update<bf16, bf16, bf16>), adamw::Update)
