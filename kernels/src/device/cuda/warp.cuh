// Included by all kernels: the headers of CUDA, pairs of bf16, reductions over a warp.
//
// The sources compile as CUDA and, through emulator/emulator.h, as C++ that runs on the CPU.
#pragma once

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <math.h>
#include <stdint.h>
// Declares `name`, a pointer to the block's dynamic shared memory, 1024-byte aligned.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]
#else
#include "emulator/emulator.h"
#endif

// Marks a struct that the host passes to kernels: build/parameters.rs also declares it in Rust.
#define PARAMETERS

using bf16 = __nv_bfloat16;
using bf16x2 = __nv_bfloat162;

constexpr unsigned ALL_LANES = 0xffffffffu;

// Two elements in one register, the first in the low half.
static __device__ __forceinline__ uint32_t pack_bf16x2(float first, float second) {
    bf16x2 pair = __floats2bfloat162_rn(first, second);
    return uint32_t(__bfloat16_as_ushort(pair.y)) << 16 | __bfloat16_as_ushort(pair.x);
}

static __device__ __forceinline__ float2 unpack_bf16x2(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// The sum of `value` over the warp's threads, in a fixed order, for all of them.
template <class A>
static __device__ __forceinline__ A warp_sum(A value) {
#pragma unroll
    for (int bits = 16; bits > 0; bits /= 2) value += __shfl_xor_sync(ALL_LANES, value, bits);
    return value;
}

static __device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int bits = 16; bits > 0; bits /= 2)
        value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, bits));
    return value;
}

static __device__ __forceinline__ uint32_t warp_max(uint32_t value) {
#pragma unroll
    for (int bits = 16; bits > 0; bits /= 2)
        value = max(value, __shfl_xor_sync(ALL_LANES, value, bits));
    return value;
}

// 2^value; tiny results become 0.
static __device__ __forceinline__ float exp2_fast(float value) {
#ifdef __CUDACC__
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
#else
    return std::exp2(value);
#endif
}
