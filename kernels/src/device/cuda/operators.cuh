// Shared by the operators' kernels: element types, vector access, sums over a block.
//
// The parameters of a kernel are structs by value, usually one struct, that PARAMETERS marks. EXPORT names
// the kernel for each element type.
#pragma once

#include <cstddef>
#include <cstdint>

#include "warp.cuh"

constexpr int THREADS = 256;

// Defines the kernel `name`, which runs `function(parameters)` in blocks of at most `threads`
// threads, with registers for `blocks` blocks on a multiprocessor.
#define EXPORT_BLOCKS(threads, blocks, name, function, Parameters)                              \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(Parameters parameters) { \
        function(parameters);                                                                   \
    }                                                                                           \
    REGISTER(name)

// Defines a kernel with blocks of THREADS threads, and registers as the compiler chooses.
#define EXPORT(name, function, Parameters)                                              \
    extern "C" __global__ void __launch_bounds__(THREADS) name(Parameters parameters) { \
        function(parameters);                                                           \
    }                                                                                   \
    REGISTER(name)

#ifdef __CUDACC__
#define REGISTER(name)
#else
#include "emulator/kernel_table.h"
#endif

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
    return __float2bfloat16_rn(x);
}

// N elements that are read and written at once, or in pieces of 16 bytes.
template <class T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Pack {
    T at[N];
};

// Adjacent elements as a pack.
template <int N, class T>
__device__ __forceinline__ Pack<T, N>* packs(T* elements) {
    return reinterpret_cast<Pack<T, N>*>(elements);
}
template <int N, class T>
__device__ __forceinline__ const Pack<T, N>* packs(const T* elements) {
    return reinterpret_cast<const Pack<T, N>*>(elements);
}

// Elements of a pack if types of 2 and of 4 bytes are mixed.
constexpr int PACKED = 8;

// Elements in 16 bytes.
template <class T>
constexpr int WIDE = 16 / sizeof(T);

// Whether an address allows 16-byte reads. Null counts as aligned; it is not read.
__device__ __forceinline__ bool aligned(const void* address) {
    return reinterpret_cast<uint64_t>(address) % 16 == 0;
}

// Whether rows of `width` elements from `address` on allow 16-byte reads.
template <class T>
__device__ __forceinline__ bool wide(uint64_t width, const void* address) {
    return width % WIDE<T> == 0 && aligned(address);
}

// The sum of `value` over the block's threads, in a fixed order, returned to all of them.
template <class A>
__device__ A block_sum(A value) {
    __shared__ A partial[THREADS / 32];
    value = warp_sum(value);
    __syncthreads();  // The partial sums of the call before have been read.
    if (threadIdx.x % 32 == 0) {
        partial[threadIdx.x / 32] = value;
    }
    __syncthreads();
    A sum = 0;
    for (int warp = 0; warp < THREADS / 32; warp++) {
        sum += partial[warp];
    }
    return sum;
}

// The maximum of `value` over the block's threads, returned to all of them.
__device__ __forceinline__ float block_max(float value) {
    __shared__ float partial[THREADS / 32];
    value = warp_max(value);
    __syncthreads();  // The maxima of the call before have been read.
    if (threadIdx.x % 32 == 0) {
        partial[threadIdx.x / 32] = value;
    }
    __syncthreads();
    float largest = partial[0];
    for (int warp = 1; warp < THREADS / 32; warp++) {
        largest = fmaxf(largest, partial[warp]);
    }
    return largest;
}

__device__ __forceinline__ uint64_t global_thread() {
    return uint64_t(blockIdx.x) * THREADS + threadIdx.x;
}

__device__ __forceinline__ uint64_t global_threads() { return uint64_t(gridDim.x) * THREADS; }
