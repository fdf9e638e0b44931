// Adds elements of two tables.
#include "../../device/cuda/operators.cuh"

namespace addition {

struct PARAMETERS Parameters {
    const void* x;
    const void* y;
    void* out;
    uint64_t count;
};

template <class T>
__device__ void add(const Parameters& p) {
    const T* x = static_cast<const T*>(p.x);
    const T* y = static_cast<const T*>(p.y);
    for (uint64_t i = global_thread(); i < p.count; i += global_threads()) {
        static_cast<T*>(p.out)[i] = from_float<T>(to_float(x[i]) + to_float(y[i]));
    }
}

}  // namespace addition

EXPORT(add_f32, addition::add<float>, addition::Parameters)
EXPORT(add_bf16, addition::add<bf16>, addition::Parameters)
