// Copies elements to the other element type.
#include "../../device/cuda/operators.cuh"

namespace convert {

struct PARAMETERS Parameters {
    const void* x;
    void* y;
    uint64_t count;
};

// Copies the elements starting at `start`, N at a time.
template <class X, class Y, int N>
__device__ void convert_from(const Parameters& p, uint64_t start) {
    const Pack<X, N>* from = packs<N>(static_cast<const X*>(p.x) + start);
    Pack<Y, N>* to = packs<N>(static_cast<Y*>(p.y) + start);
    for (uint64_t i = global_thread(); i < (p.count - start) / N; i += global_threads()) {
        const Pack<X, N> pack = from[i];
        Pack<Y, N> result;
#pragma unroll
        for (int j = 0; j < N; j++) {
            result.at[j] = from_float<Y>(to_float(pack.at[j]));
        }
        to[i] = result;
    }
}

template <class X, class Y>
__device__ void convert(const Parameters& p) {
    uint64_t rest = 0;
    if (aligned(p.x) && aligned(p.y)) {
        convert_from<X, Y, PACKED>(p, 0);
        rest = p.count / PACKED * PACKED;
    }
    convert_from<X, Y, 1>(p, rest);
}

__device__ __forceinline__ void narrow(const Parameters& p) { convert<float, bf16>(p); }
__device__ __forceinline__ void widen(const Parameters& p) { convert<bf16, float>(p); }

}  // namespace convert

EXPORT(convert_f32, convert::narrow, convert::Parameters)
EXPORT(convert_bf16, convert::widen, convert::Parameters)
