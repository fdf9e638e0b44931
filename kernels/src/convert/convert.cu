// Copies numbers to the other type of number.
#include "../cuda/operators.cuh"

namespace convert {

struct Parameters {
    const void* x;
    void* y;
    uint64_t count;
};

template <class X, class Y>
__device__ void convert(const Parameters& p) {
    for (uint64_t i = global_thread(); i < p.count; i += global_threads()) {
        static_cast<Y*>(p.y)[i] = from_float<Y>(to_float(static_cast<const X*>(p.x)[i]));
    }
}

__device__ __forceinline__ void narrow(const Parameters& p) { convert<float, bf16>(p); }
__device__ __forceinline__ void widen(const Parameters& p) { convert<bf16, float>(p); }

}  // namespace convert

EXPORT(convert_f32, convert::narrow, convert::Parameters)
EXPORT(convert_bf16, convert::widen, convert::Parameters)
