// AdamW and the sums for clipping.
#include "../../device/cuda/operators.cuh"

namespace adamw {

// A segment of elements to square and sum, and the blocks that sum them.
struct PARAMETERS Segment {
    const void* x;
    uint64_t count;
    uint32_t first_block;
    uint32_t blocks;
};

// A table of segments in the kernel's parameters: it needs neither memory nor a copy.
struct PARAMETERS SquaredNorms {
    // One sum per block.
    double* partial;
    uint64_t count;
    Segment segments[128];
};

struct PARAMETERS Sum {
    const double* x;
    double* out;
    uint64_t count;
    double scale;
};

struct PARAMETERS Update {
    const void* gradients;
    void* weights;
    // The remainders of the weights' rounding; null for weights without them.
    int16_t* remainder;
    void* first_moment;
    void* second_moment;
    uint64_t count;
    // The factor by which clipping scales every gradient.
    float clip;
    float keep;
    float rate;
    float root_correction;
    float beta1;
    float beta2;
    float share1;
    float share2;
    float eps;
    uint32_t padding;
};

// The segment of a block: the last segment that starts at or before the block.
__device__ __forceinline__ const Segment& segment_of(const SquaredNorms& p, uint32_t block) {
    uint64_t at = 0, end = p.count;
    while (end - at > 1) {
        const uint64_t middle = (at + end) / 2;
        if (p.segments[middle].first_block <= block) {
            at = middle;
        } else {
            end = middle;
        }
    }
    return p.segments[at];
}

template <class G>
__device__ __forceinline__ double square(G element) {
    const double wide = to_float(element);
    return wide * wide;
}

// Sums the squares of the segment's elements, divided among the threads of its blocks, 16 bytes at a time. The
// segment's first threads add the elements outside whole aligned groups of 16 bytes.
template <class G>
__device__ void squared_norms(const SquaredNorms& p) {
    constexpr int N = WIDE<G>;
    const Segment& segment = segment_of(p, blockIdx.x);
    const uint64_t thread = uint64_t(blockIdx.x - segment.first_block) * THREADS + threadIdx.x;
    const uint64_t threads = uint64_t(segment.blocks) * THREADS;
    const G* x = static_cast<const G*>(segment.x);
    const uint64_t to_boundary = (16 - reinterpret_cast<uint64_t>(x) % 16) % 16 / sizeof(G);
    const uint64_t before = to_boundary < segment.count ? to_boundary : segment.count;
    const uint64_t wide = (segment.count - before) / N;
    const Pack<G, N>* pack = packs<N>(x + before);
    double sum = 0.0;
    for (uint64_t i = thread; i < wide; i += threads) {
        const Pack<G, N> elements = pack[i];
#pragma unroll
        for (int j = 0; j < N; j++) {
            sum += square(elements.at[j]);
        }
    }
    const uint64_t after = before + wide * N;
    if (thread < before) {
        sum += square(x[thread]);
    }
    if (thread < segment.count - after) {
        sum += square(x[after + thread]);
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

// Joins a weight and its remainder to the f32 value, and splits the value into both (remainder.rs).
__device__ __forceinline__ float join(bf16 weight, int16_t remainder) {
    return __uint_as_float((uint32_t(__bfloat16_as_ushort(weight)) << 16) +
                           uint32_t(int32_t(remainder)));
}
__device__ __forceinline__ int16_t remainder_of(float exact, bf16 weight) {
    const int32_t left =
        int32_t(__float_as_uint(exact) - (uint32_t(__bfloat16_as_ushort(weight)) << 16));
    return int16_t(left < -0x8000 ? -0x8000 : left > 0x7fff ? 0x7fff : left);
}
// The host passes remainders only for bf16 weights.
__device__ __forceinline__ float join(float weight, int16_t) { return weight; }
__device__ __forceinline__ int16_t remainder_of(float, float) { return 0; }

// Updates N elements at a time, starting at `start`.
template <class T, class G, class M, int N>
__device__ void update_from(const Update& p, uint64_t start) {
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
            const float g = to_float(gradient.at[j]) * p.clip;
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
    uint64_t rest = 0;
    if (aligned(p.gradients) && aligned(p.weights) && aligned(p.remainder) &&
        aligned(p.first_moment) && aligned(p.second_moment)) {
        update_from<T, G, M, PACKED>(p, 0);
        rest = p.count / PACKED * PACKED;
    }
    update_from<T, G, M, 1>(p, rest);
}

}  // namespace adamw

EXPORT(squared_norms_f32, adamw::squared_norms<float>, adamw::SquaredNorms)
EXPORT(squared_norms_bf16, adamw::squared_norms<bf16>, adamw::SquaredNorms)
EXPORT(sum_f64, adamw::sum, adamw::Sum)
EXPORT(adamw_f32_f32_f32, (adamw::update<float, float, float>), adamw::Update)
EXPORT(adamw_f32_f32_bf16, (adamw::update<float, float, bf16>), adamw::Update)
EXPORT(adamw_f32_bf16_f32, (adamw::update<float, bf16, float>), adamw::Update)
EXPORT(adamw_f32_bf16_bf16, (adamw::update<float, bf16, bf16>), adamw::Update)
EXPORT(adamw_bf16_f32_f32, (adamw::update<bf16, float, float>), adamw::Update)
EXPORT(adamw_bf16_f32_bf16, (adamw::update<bf16, float, bf16>), adamw::Update)
EXPORT(adamw_bf16_bf16_f32, (adamw::update<bf16, bf16, float>), adamw::Update)
EXPORT(adamw_bf16_bf16_bf16, (adamw::update<bf16, bf16, bf16>), adamw::Update)
