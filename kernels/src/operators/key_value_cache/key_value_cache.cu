// Appending to the cache, one block per token.
#include "../../device/cuda/operators.cuh"

namespace key_value_cache {

struct PARAMETERS Append {
    const void* qkv;
    void* keys;
    void* values;
    // The row of the cache for each token.
    const uint32_t* rows;
    // Elements of a token in qkv, before its keys, and of its keys.
    uint64_t row;
    uint64_t first;
    uint64_t width;
};

template <class T>
__device__ void append(const Append& p) {
    const T* keys = static_cast<const T*>(p.qkv) + blockIdx.x * p.row + p.first;
    const uint64_t start = p.rows[blockIdx.x] * p.width;
    for (uint64_t i = threadIdx.x; i < p.width; i += THREADS) {
        static_cast<T*>(p.keys)[start + i] = keys[i];
        static_cast<T*>(p.values)[start + i] = keys[p.width + i];
    }
}

}  // namespace key_value_cache

EXPORT(key_value_append_f32, key_value_cache::append<float>, key_value_cache::Append)
EXPORT(key_value_append_bf16, key_value_cache::append<bf16>, key_value_cache::Append)
