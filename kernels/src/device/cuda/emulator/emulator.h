// Runs CUDA kernels on the CPU, so that a C++ compiler alone can test them.
//
// Covers the subset of CUDA C++ that the kernels use: built-in variables, barriers, warp
// collectives, atomics, bf16 and shared memory. Blocks run in sequence. The threads of a block are
// fibers on the calling OS thread; a fiber yields only at a barrier or a warp collective. All state
// is thread_local, so several OS threads may launch kernels at the same time.
//
// To expose races and missing waits, dynamic shared memory starts as NaN. cp.async copies complete
// only when waited for. Other asynchronous work is deferred until no thread can continue. A
// launch's `emulated::schedule_seed` varies the order of threads and of deferred work.
//
// threads.h implements the threads, sm90.h the instructions of sm_90, and kernel_table.h the kernels by name.
// `*_instructions.h` implement the kernels' functions of ../mma.cuh and ../sm90.cuh. emulator.cc is the
// compiled unit, and mod.rs its caller.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "threads.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define __shared__ static thread_local

// Declares `name`, a pointer to the block's dynamic shared memory, 1024-byte aligned.
#define DYNAMIC_SHARED(name) unsigned char* const name = emulated::machine().dynamic_shared()

// ---- vector types ----

#define EMULATED_VECTOR_TYPES(scalar, prefix)                                     \
    struct alignas(2 * sizeof(scalar)) prefix##2 { scalar x, y; };                \
    struct alignas(4 * sizeof(scalar) > 16 ? 16 : 4 * sizeof(scalar)) prefix##4 { \
        scalar x, y, z, w;                                                        \
    };                                                                            \
    inline prefix##2 make_##prefix##2(scalar x, scalar y) { return {x, y}; }      \
    inline prefix##4 make_##prefix##4(scalar x, scalar y, scalar z, scalar w) {   \
        return {x, y, z, w};                                                      \
    }

EMULATED_VECTOR_TYPES(float, float)
EMULATED_VECTOR_TYPES(double, double)
EMULATED_VECTOR_TYPES(int, int)
EMULATED_VECTOR_TYPES(unsigned, uint)
EMULATED_VECTOR_TYPES(short, short)
EMULATED_VECTOR_TYPES(unsigned short, ushort)
EMULATED_VECTOR_TYPES(unsigned char, uchar)
EMULATED_VECTOR_TYPES(long long, longlong)
EMULATED_VECTOR_TYPES(unsigned long long, ulonglong)
#undef EMULATED_VECTOR_TYPES

namespace emulated {

// ---- launches ----

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
            Arguments&&... arguments) {
    using Values = std::tuple<std::remove_const_t<Parameters>...>;
    struct Call {
        void (*kernel)(Parameters...);
        Values values;
    } call{kernel, Values(std::forward<Arguments>(arguments)...)};
    auto body = [](void* argument) {
        Call& call = *static_cast<Call*>(argument);
        std::apply(call.kernel, call.values);
    };
    machine().run(grid, block, shared_bytes, body, &call);
}

template <typename... Parameters, size_t... Index>
void launch_unpacked(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                     [[maybe_unused]] void** arguments, std::index_sequence<Index...>) {
    launch(kernel, grid, block, shared_bytes,
           *static_cast<std::remove_const_t<Parameters>*>(arguments[Index])...);
}

template <typename... Parameters>
void launch_pointers(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                     void** arguments) {
    launch_unpacked(kernel, grid, block, shared_bytes, arguments,
                    std::index_sequence_for<Parameters...>());
}

// One function per kernel, all with the same type: arguments[i] points to the i-th parameter, like
// the arguments of cuLaunchKernel.
template <auto Kernel>
void launch_erased(dim3 grid, dim3 block, size_t shared_bytes, void** arguments) {
    launch_pointers(Kernel, grid, block, shared_bytes, arguments);
}

// ---- cp.async ----

// Copies `copied` bytes and fills the rest of `bytes` with zeros when the group is waited for.
inline void copy_async(void* destination, const void* source, unsigned bytes, unsigned copied) {
    Fiber& fiber = *machine().current;
    fiber.copies.push_back({destination, source, bytes, copied, fiber.copy_group});
}

inline void copy_async_commit() { ++machine().current->copy_group; }

// Waits for all groups except the `newest` last ones.
inline void copy_async_wait(unsigned newest) {
    Fiber& fiber = *machine().current;
    size_t kept = 0;
    for (const PendingCopy& copy : fiber.copies) {
        // Groups count modulo 2^32. An uncommitted copy has age 0.
        if (fiber.copy_group - copy.group <= newest) {
            fiber.copies[kept++] = copy;
            continue;
        }
        auto* destination = static_cast<unsigned char*>(copy.destination);
        std::memcpy(destination, copy.source, copy.copied);
        std::memset(destination + copy.copied, 0, copy.bytes - copy.copied);
        machine().mark_written(destination, copy.bytes);
    }
    fiber.copies.resize(kept);
}

}  // namespace emulated

// ---- built-in variables ----

#define threadIdx (emulated::machine().current->thread_index)
#define blockIdx (emulated::machine().block_index)
#define blockDim (emulated::machine().block)
#define gridDim (emulated::machine().grid)
constexpr int warpSize = 32;

// ---- barriers and warp collectives ----

inline void __syncthreads() { emulated::machine().sync_block(false); }
inline int __syncthreads_count(int p) { return emulated::machine().sync_block(p != 0); }
inline int __syncthreads_or(int p) { return __syncthreads_count(p) != 0; }
inline int __syncthreads_and(int p) { return __syncthreads_count(p == 0) == 0; }
inline void __syncwarp(unsigned mask = ~0u) { emulated::machine().exchange(mask, 0); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    auto values = emulated::machine().exchange(mask, predicate);
    unsigned result = 0;
    // Lanes beyond the end of the block never wrote their slot.
    unsigned threads = blockDim.x * blockDim.y * blockDim.z;
    unsigned lanes = std::min(32u, threads - emulated::machine().current->warp * 32);
    for (unsigned lane = 0; lane < lanes; ++lane)
        if (mask >> lane & 1) result |= unsigned(values[lane] != 0) << lane;
    return result;
}

inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    auto values = emulated::machine().exchange(mask, value);
    int lane = emulated::machine().current->lane;
    return values[(lane & ~(width - 1)) | (source & (width - 1))];
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
    auto values = emulated::machine().exchange(mask, value);
    int lane = emulated::machine().current->lane;
    int source = lane ^ bits;
    return source < (lane & ~(width - 1)) + width ? values[source] : value;
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    auto values = emulated::machine().exchange(mask, value);
    int lane = emulated::machine().current->lane;
    int source = lane - int(delta);
    return source >= (lane & ~(width - 1)) ? values[source] : value;
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    auto values = emulated::machine().exchange(mask, value);
    int lane = emulated::machine().current->lane;
    int source = lane + int(delta);
    return source < (lane & ~(width - 1)) + width ? values[source] : value;
}

// ---- integers, bits, atomics ----

using std::max;
using std::min;

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(unsigned(value)); }
inline unsigned __umulhi(unsigned a, unsigned b) { return uint64_t(a) * b >> 32; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned __int128)(a)*b >> 64;
}

namespace emulated {
template <typename To, typename From>
To reinterpret_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}
}  // namespace emulated

inline unsigned __float_as_uint(float value) { return emulated::reinterpret_bits<unsigned>(value); }
inline int __float_as_int(float value) { return emulated::reinterpret_bits<int>(value); }
inline float __uint_as_float(unsigned value) { return emulated::reinterpret_bits<float>(value); }
inline float __int_as_float(int value) { return emulated::reinterpret_bits<float>(value); }

// Threads that could conflict in an atomic are fibers of one OS thread.
template <typename T, typename U>
T atomicAdd(T* address, U value) {
    T old = *address;
    *address = T(old + value);
    return old;
}

template <typename T>
T __ldg(const T* address) {
    return *address;
}
template <typename T>
T __ldcs(const T* address) {
    return *address;
}
template <typename T>
T __ldcg(const T* address) {
    return *address;
}
template <typename T>
void __stcs(T* address, T value) {
    *address = value;
}

// ---- mathematics ----

inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }
inline double rsqrt(double value) { return 1.0 / std::sqrt(value); }
// The C library declares some of these names too.
inline float emulated_expf(float value) { return std::exp(value); }
inline float emulated_logf(float value) { return std::log(value); }
#define __expf(value) emulated_expf(value)
#define __logf(value) emulated_logf(value)
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float value) { return 1.0f / value; }
inline float __frsqrt_rn(float value) { return 1.0f / std::sqrt(value); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline float __saturatef(float value) { return std::min(std::max(value, 0.0f), 1.0f); }

// ---- bf16 ----

namespace emulated {
// Rounds to nearest, ties to even. A NaN stays a NaN.
inline unsigned short bf16_bits(float value) {
    unsigned bits = reinterpret_bits<unsigned>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
}  // namespace emulated

struct __nv_bfloat16 {
    unsigned short bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float value) : bits(emulated::bf16_bits(value)) {}
    operator float() const { return __uint_as_float(unsigned(bits) << 16); }
};

struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

inline float __bfloat162float(__nv_bfloat16 value) { return float(value); }
inline __nv_bfloat16 __float2bfloat16(float value) { return __nv_bfloat16(value); }
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return __nv_bfloat16(value); }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
    __nv_bfloat16 value;
    value.bits = bits;
    return value;
}
// x is the low half in memory and in a register.
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {__nv_bfloat16(x), __nv_bfloat16(y)};
}
inline __nv_bfloat162 __float22bfloat162_rn(float2 value) {
    return __floats2bfloat162_rn(value.x, value.y);
}
inline float2 __bfloat1622float2(__nv_bfloat162 value) { return {float(value.x), float(value.y)}; }
