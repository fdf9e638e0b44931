// Appending to the cache, one block per token.
#include "../../device/cuda/operators.cuh"

namespace key_value_cache {

struct PARAMETERS Append {
    const void* qkv;
    void* keys;
    void* values;
    // The place of each token in the cache: row % block_length of each head of block row / block_length.
    const uint32_t* rows;
    // Elements of a token in qkv, and elements before its keys.
    uint64_t row;
    uint64_t first;
    uint32_t kv_heads;
    uint32_t head_dim;
    uint32_t block_length;
    uint32_t padding;
};

template <class T>
__device__ void append(const Append& p) {
    const T* keys = static_cast<const T*>(p.qkv) + blockIdx.x * p.row + p.first;
    const uint32_t width = p.kv_heads * p.head_dim, row = p.rows[blockIdx.x];
    const uint64_t first = uint64_t(row / p.block_length) * p.kv_heads;
    for (uint32_t i = threadIdx.x; i < width; i += THREADS) {
        const uint64_t place = (first + i / p.head_dim) * p.block_length + row % p.block_length;
        const uint64_t at = place * p.head_dim + i % p.head_dim;
        static_cast<T*>(p.keys)[at] = keys[i];
        static_cast<T*>(p.values)[at] = keys[width + i];
    }
}

}  // namespace key_value_cache

EXPORT(key_value_append_f32, key_value_cache::append<float>, key_value_cache::Append)
EXPORT(key_value_append_bf16, key_value_cache::append<bf16>, key_value_cache::Append)
