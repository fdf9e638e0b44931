// Head-sparse attention for sm_90a: entry points for each head dimension.
//
// bf16 inputs and outputs, f32 sums, wgmma. hopper.cuh describes parameters and launches. On other
// architectures the kernels are compiled without a body, and the host does not launch them.
#include "backward.cuh"
#include "forward.cuh"

namespace hopper_attention {

#if !defined(__CUDACC__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define ON_SM_90A(...) __VA_ARGS__
#else
#define ON_SM_90A(...)
#endif

#define HOPPER_KERNELS(width)                                                                 \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) hopper_forward_d##width(   \
        const __grid_constant__ Parameters params, const __grid_constant__ Scratch scratch,   \
        const __grid_constant__ Maps maps) {                                                  \
        ON_SM_90A(forward<width>(params, scratch, maps);)                                     \
    }                                                                                         \
    REGISTER(hopper_forward_d##width)                                                         \
    extern "C" __global__ void __launch_bounds__(PREPARE_THREADS) hopper_prepare_d##width(    \
        const __grid_constant__ Parameters params, const __grid_constant__ Scratch scratch) { \
        ON_SM_90A(prepare<width>(params, scratch);)                                           \
    }                                                                                         \
    REGISTER(hopper_prepare_d##width)                                                         \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) hopper_backward_d##width(  \
        const __grid_constant__ Parameters params, const __grid_constant__ Scratch scratch,   \
        const __grid_constant__ Maps maps) {                                                  \
        ON_SM_90A(backward<width>(params, scratch, maps);)                                    \
    }                                                                                         \
    REGISTER(hopper_backward_d##width)                                                        \
    extern "C" __global__ void __launch_bounds__(FINISH_THREADS) hopper_finish_d##width(      \
        const __grid_constant__ Parameters params, const __grid_constant__ Scratch scratch) { \
        ON_SM_90A(finish<width>(params, scratch);)                                            \
    }                                                                                         \
    REGISTER(hopper_finish_d##width)

HOPPER_KERNELS(64)
HOPPER_KERNELS(128)

}  // namespace hopper_attention
