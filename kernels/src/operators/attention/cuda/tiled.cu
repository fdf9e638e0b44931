// Head-sparse attention for sm_80 and later: entry points for each padded head dimension.
//
// bf16 inputs and outputs, f32 sums, mma.sync. tiled.cuh describes parameters and launches.
#include "backward.cuh"
#include "forward.cuh"
#include "pack.cuh"

namespace tiled_attention {

REGISTER(attention_pack_forward)
REGISTER(attention_pack_backward)
REGISTER(attention_backward_delta)

#define ATTENTION_KERNELS(width)                                     \
    extern "C" __global__ void __launch_bounds__(FORWARD_THREADS, 2) \
        attention_forward_d##width(Parameters params) {              \
        forward<width>(params);                                      \
    }                                                                \
    REGISTER(attention_forward_d##width)                             \
    extern "C" __global__ void __launch_bounds__(DQ_THREADS, 1)      \
        attention_backward_dq_d##width(Parameters params) {          \
        backward_dq<width>(params);                                  \
    }                                                                \
    REGISTER(attention_backward_dq_d##width)                         \
    extern "C" __global__ void __launch_bounds__(DKDV_THREADS, 1)    \
        attention_backward_dkdv_d##width(Parameters params) {        \
        backward_dkdv<width, 64>(params);                            \
    }                                                                \
    REGISTER(attention_backward_dkdv_d##width)

ATTENTION_KERNELS(32)
ATTENTION_KERNELS(64)
ATTENTION_KERNELS(96)
ATTENTION_KERNELS(128)

extern "C" __global__ void __launch_bounds__(DKDV_THREADS, 1)
    attention_backward_dkdv_d128_r32(Parameters params) {
    backward_dkdv<128, 32>(params);
}
REGISTER(attention_backward_dkdv_d128_r32)

}  // namespace tiled_attention
