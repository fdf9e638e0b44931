// Rotary position embedding, one block per token.
#include "rope.cuh"

namespace rope {

struct NothingAdded {
    __device__ __forceinline__ bool has(uint32_t) const { return false; }
    __device__ __forceinline__ float factor(uint32_t) const { return 0.0f; }
};

template <class T>
__device__ void forward(const Parameters& p) {
    T* row = static_cast<T*>(p.qkv) + blockIdx.x * p.row_length();
    if (rotates_wide<T>(p)) {
        rotate<T, WIDE<T>>(p, row);
    } else {
        rotate<T, 1>(p, row);
    }
}

template <class T>
__device__ void backward(const Parameters& p) {
    T* d_row = static_cast<T*>(p.qkv) + blockIdx.x * p.row_length();
    if (rotates_wide<T>(p)) {
        rotate_back<T, WIDE<T>>(p, d_row, d_row, NothingAdded{});
    } else {
        rotate_back<T, 1>(p, d_row, d_row, NothingAdded{});
    }
}

}  // namespace rope

EXPORT(rope_forward_f32, rope::forward<float>, rope::Parameters)
EXPORT(rope_forward_bf16, rope::forward<bf16>, rope::Parameters)
EXPORT(rope_backward_f32, rope::backward<float>, rope::Parameters)
EXPORT(rope_backward_bf16, rope::backward<bf16>, rope::Parameters)
