// Rotary position embedding, one block per token.
#include "rope.cuh"

namespace rope {

// Rotates the token's queries and keys, N pairs of elements at a time; rotates back if DIRECTION is -1.
template <class T, int N, int DIRECTION>
__device__ void rotate_pairs(const Parameters& p) {
    T* row = static_cast<T*>(p.qkv) + blockIdx.x * p.row_length();
    const uint32_t half = p.head_dim / 2, packs_of_half = half / N;
    const uint64_t angles = (p.first_position + blockIdx.x % p.length) * packs_of_half;
    for (uint32_t i = threadIdx.x; i < (p.heads + p.kv_heads) * packs_of_half; i += THREADS) {
        const uint32_t place = i % packs_of_half;
        Pack<T, N>* lows = packs<N>(row + (i / packs_of_half) * p.head_dim);
        Pack<T, N>* highs = lows + packs_of_half;
        const Pack<float, N> cos = packs<N>(p.cos)[angles + place];
        const Pack<float, N> sin = packs<N>(p.sin)[angles + place];
        Pack<T, N> low = lows[place], high = highs[place];
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float2 pair = rotated(to_float(low.at[j]), to_float(high.at[j]), cos.at[j],
                                       DIRECTION * sin.at[j]);
            low.at[j] = from_float<T>(pair.x);
            high.at[j] = from_float<T>(pair.y);
        }
        lows[place] = low;
        highs[place] = high;
    }
}

template <class T, int DIRECTION>
__device__ void rotate(const Parameters& p) {
    if (rotates_wide<T>(p)) {
        rotate_pairs<T, WIDE<T>, DIRECTION>(p);
    } else {
        rotate_pairs<T, 1, DIRECTION>(p);
    }
}

template <class T>
__device__ void forward(const Parameters& p) {
    rotate<T, 1>(p);
}

template <class T>
__device__ void backward(const Parameters& p) {
    rotate<T, -1>(p);
}

}  // namespace rope

EXPORT(rope_forward_f32, rope::forward<float>, rope::Parameters)
EXPORT(rope_forward_bf16, rope::forward<bf16>, rope::Parameters)
EXPORT(rope_backward_f32, rope::backward<float>, rope::Parameters)
EXPORT(rope_backward_bf16, rope::backward<bf16>, rope::Parameters)
