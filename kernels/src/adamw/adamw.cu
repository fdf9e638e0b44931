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
    // What the weights' rounding left; null where they are updated as they are.
    int16_t* remainder;
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

// The sum of the squares of this thread's numbers from `start` on, N at a time.
template <class G, int N>
__device__ double squares_from(const SquaredNorm& p, uint64_t start) {
    const Pack<G, N>* x = packs<N>(static_cast<const G*>(p.x) + start);
    double sum = 0.0;
    for (uint64_t i = global_thread(); i < (p.count - start) / N; i += global_threads()) {
        const Pack<G, N> pack = x[i];
#pragma unroll
        for (int j = 0; j < N; j++) {
            const double number = to_float(pack.at[j]);
            sum += number * number;
        }
    }
    return sum;
}

template <class G>
__device__ void squared_norm(const SquaredNorm& p) {
    constexpr int N = WIDE<G>;
    double sum = 0.0;
    uint64_t rest = 0;
    if (aligned(p.x)) {
        sum = squares_from<G, N>(p, 0);
        rest = p.count / N * N;
    }
    sum = block_sum(sum + squares_from<G, 1>(p, rest));
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

// The number of a weight and its remainder, and what it leaves of them (remainder.rs).
__device__ __forceinline__ float join(bf16 weight, int16_t remainder) {
    return __uint_as_float((uint32_t(__bfloat16_as_ushort(weight)) << 16) +
                           uint32_t(int32_t(remainder)));
}
__device__ __forceinline__ int16_t remainder_of(float exact, bf16 weight) {
    const int32_t left =
        int32_t(__float_as_uint(exact) - (uint32_t(__bfloat16_as_ushort(weight)) << 16));
    return int16_t(left < -0x8000 ? -0x8000 : left > 0x7fff ? 0x7fff : left);
}
// The host gives remainders to bf16 weights alone.
__device__ __forceinline__ float join(float weight, int16_t) { return weight; }
__device__ __forceinline__ int16_t remainder_of(float, float) { return 0; }

// Updates the numbers from `start` on, N at a time.
template <class T, class G, class M, int N>
__device__ void update_from(const Update& p, float clip, uint64_t start) {
    const Pack<G, N>* gradients = packs<N>(static_cast<const G*>(p.gradients) + start);
    Pack<T, N>* weights = packs<N>(static_cast<T*>(p.weights) + start);
    Pack<int16_t, N>* remainders = packs<N>(p.remainder + start);
    Pack<M, N>* firsts = packs<N>(static_cast<M*>(p.first_moment) + start);
    Pack<M, N>* seconds = packs<N>(static_cast<M*>(p.second_moment) + start);
    for (uint64_t i = global_thread(); i < (p.count - start) / N; i += global_threads()) {
        const Pack<G, N> gradient = gradients[i];
        Pack<M, N> first = firsts[i], second = seconds[i];
        Pack<T, N> weight = weights[i];
        Pack<int16_t, N> remainder{};
        if (p.remainder) {
            remainder = remainders[i];
        }
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float g = to_float(gradient.at[j]) * clip;
            const float m = p.beta1 * to_float(first.at[j]) + p.share1 * g;
            const float v = p.beta2 * to_float(second.at[j]) + p.share2 * g * g;
            const float denominator = sqrtf(v) * p.root_correction + p.eps;
            const float before = join(weight.at[j], remainder.at[j]);
            const float after = before * p.keep - p.rate * m / denominator;
            weight.at[j] = from_float<T>(after);
            remainder.at[j] = remainder_of(after, weight.at[j]);
            first.at[j] = from_float<M>(m);
            second.at[j] = from_float<M>(v);
        }
        weights[i] = weight;
        firsts[i] = first;
        seconds[i] = second;
        if (p.remainder) {
            remainders[i] = remainder;
        }
    }
}

template <class T, class G, class M>
__device__ void update(const Update& p) {
    const double norm = sqrt(p.squared_norm[0]);
    const float clip = float(fmin(p.clip_norm / (norm + 1e-6), 1.0));
    uint64_t rest = 0;
    if (aligned(p.gradients) && aligned(p.weights) && aligned(p.remainder) &&
        aligned(p.first_moment) && aligned(p.second_moment)) {
        update_from<T, G, M, PACKED>(p, clip, 0);
        rest = p.count / PACKED * PACKED;
    }
    update_from<T, G, M, 1>(p, clip, rest);
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
