// Instructions of sm_90: mbarriers, the copy engine, named barriers, registers per warp, wgmma.
//
// Matrices of bf16 are stored in shared memory as panels of 64 columns: contiguous rows of 128
// bytes, with the 16-byte chunk c of row r at c ^ (r & 7). Panels start at multiples of 1024 bytes.
// The copy engine writes them with its 128-byte swizzle, and wgmma's descriptors have the same swizzle.
//
// wgmma computes D (64 x N, f32) += A (64 x 16) B (16 x N). Warp w of the warpgroup holds rows
// 16w.. of D; with g = lane / 4 and t = lane % 4, d[4n], d[4n + 1] are row g, columns 8n + 2t and
// 8n + 2t + 1; d[4n + 2], d[4n + 3] row g + 8. A in registers has the layout of mma m16n8k16
// (mma.cuh).
#pragma once

#include "mma.cuh"

constexpr int WARPGROUP = 128;

// Describes a tensor to the copy engine; the bytes of a CUtensorMap.
struct alignas(128) PARAMETERS TensorMap {
    uint64_t words[16];
};

// The wgmma descriptor of a matrix of panels: A, or B transposed. If a panel's rows are the
// matrix's rows (K along the 128 bytes), `group` is the distance of 8 rows and `panel` is not used.
// If a panel's rows are the matrix's columns (transposed), `group` is the distance of 8 columns and `panel` the
// distance of 64 rows.
static __device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, uint32_t panel,
                                                             uint32_t group) {
    constexpr uint64_t SWIZZLE_128 = 1;
    return SWIZZLE_128 << 62 | uint64_t(group / 16) << 32 | uint64_t(panel / 16) << 16 |
           (address / 16 & 0x3fff);
}

// The descriptor of the same matrix with its start advanced by `bytes`, a multiple of 16.
static __device__ __forceinline__ uint64_t advance(uint64_t descriptor, uint32_t bytes) {
    return descriptor + bytes / 16;
}

#ifdef __CUDACC__

// ---- mbarriers ----

static __device__ __forceinline__ void barrier_init(SharedAddress barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}

// Makes initialised barriers visible to the copy engine; required before the block synchronises.
static __device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

static __device__ __forceinline__ void barrier_arrive(SharedAddress barrier) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and adds `bytes` of copies to the bytes that complete the phase.
static __device__ __forceinline__ void barrier_expect(SharedAddress barrier, uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
        "r"(bytes)
        : "memory");
}

// Waits until the phase of this parity is complete. The phase before the first counts as complete.
static __device__ __forceinline__ void barrier_wait(SharedAddress barrier, uint32_t parity) {
    uint32_t done = 0;
    while (done == 0)
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}\n"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
}

// ---- the copy engine ----

// Orders this thread's earlier stores to shared memory before accesses by wgmma and the copy engine
// after the next barrier.
static __device__ __forceinline__ void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

static __device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Starts the copy of the box at (x, y, z); `barrier` expects its bytes.
static __device__ __forceinline__ void copy_tensor(SharedAddress target, const TensorMap* map,
                                                   int x, int y, int z, SharedAddress barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(target),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// Starts the copy of `bytes`, a multiple of 16; `barrier` expects them.
static __device__ __forceinline__ void copy_bulk(SharedAddress target, const void* source,
                                                 uint32_t bytes, SharedAddress barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1], %2, [%3];" ::"r"(target),
        "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier)
        : "memory");
}

// Starts target[i] += source[i] for `bytes` of f32.
static __device__ __forceinline__ void reduce_bulk(float* target, SharedAddress source,
                                                   uint32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                     __cvta_generic_to_global(target)),
                 "r"(source), "r"(bytes)
                 : "memory");
}

static __device__ __forceinline__ void reduce_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until the sources of all groups of reductions except the `NEWEST` last ones have been read.
template <int NEWEST>
static __device__ __forceinline__ void reduce_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(NEWEST) : "memory");
}

// Waits until all groups of reductions except the `NEWEST` last ones have been written.
template <int NEWEST = 0>
static __device__ __forceinline__ void reduce_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(NEWEST) : "memory");
}

// ---- semaphores, for an order of blocks ----

// Waits until the semaphore has this value.
static __device__ __forceinline__ void semaphore_wait(const uint32_t* semaphore, uint32_t value) {
    uint32_t now;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                     : "=r"(now)
                     : "l"(__cvta_generic_to_global(semaphore))
                     : "memory");
    } while (now != value);
    // The copy engine makes the accesses that follow.
    asm volatile("fence.proxy.async;" ::: "memory");
}

// Increments the semaphore after all groups of reductions except the `NEWEST` last ones have been
// written. The fence orders the copy engine's writes before the release.
template <int NEWEST>
static __device__ __forceinline__ void semaphore_release(uint32_t* semaphore) {
    reduce_wait<NEWEST>();
    asm volatile("fence.proxy.async;" ::: "memory");
    asm volatile(
        "red.release.gpu.global.add.u32 [%0], 1;" ::"l"(__cvta_generic_to_global(semaphore))
        : "memory");
}

// ---- warps ----

// Increases the registers per thread of the warpgroup to COUNT. All of its warps call this.
template <int COUNT>
static __device__ __forceinline__ void allocate_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Decreases the registers per thread of the warpgroup to COUNT. All of its warps call this.
template <int COUNT>
static __device__ __forceinline__ void deallocate_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Waits at one of the block's barriers 1 to 15; `threads` includes threads that arrive without
// waiting.
static __device__ __forceinline__ void named_sync(uint32_t barrier, uint32_t threads) {
    asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

static __device__ __forceinline__ void named_arrive(uint32_t barrier, uint32_t threads) {
    asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- stores to shared memory ----

// Stores four 8x8 matrices; lanes 8i..8i+7 have the addresses of the rows of matrix i. A lane's
// elements are (g, 2t) and (g, 2t+1).
static __device__ __forceinline__ void stmatrix_x4(SharedAddress row, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

static __device__ __forceinline__ void store_4(SharedAddress target, float a, float b, float c,
                                               float d) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(target), "f"(a), "f"(b), "f"(c),
                 "f"(d)
                 : "memory");
}

// ---- wgmma ----

static __device__ __forceinline__ uint32_t descriptor_address(SharedAddress address) {
    return address;
}

// Prevents the compiler from moving accesses to sums, or to fragments of A, across the asynchronous
// products.
template <int COUNT>
static __device__ __forceinline__ void fence_operand(float (&sums)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

template <int COUNT>
static __device__ __forceinline__ void fence_operand(uint32_t (&fragments)[COUNT][4]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(fragments[i][j])::"memory");
}

// Required before the first product, and after accesses to registers of a product's operands.
static __device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits for all groups of products except the `NEWEST` last ones.
template <int NEWEST>
static __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(NEWEST) : "memory");
}

// The first 16, 32 or 64 operands of an instruction: their numbers, and the sums `d`.
#define NUMBERS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NUMBERS_32                                                                                 \
    NUMBERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NUMBERS_64                                                                                 \
    NUMBERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"  \
               ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS_8(access, i)                                                                          \
    access(d[i]), access(d[i + 1]), access(d[i + 2]), access(d[i + 3]), access(d[i + 4]),          \
        access(d[i + 5]), access(d[i + 6]), access(d[i + 7])
#define SUMS_16(access) SUMS_8(access, 0), SUMS_8(access, 8)
#define SUMS_32(access) SUMS_16(access), SUMS_8(access, 16), SUMS_8(access, 24)
#define SUMS_64(access)                                                                            \
    SUMS_32(access), SUMS_8(access, 32), SUMS_8(access, 40), SUMS_8(access, 48), SUMS_8(access, 56)

// d = A B (`add` is 0) or d += A B (1) of `columns` columns; `operands` are the numbers of the operands
// after the sums.
#define WGMMA(add, access, columns, sums, operands, ...)                                           \
    asm volatile(                                                                                  \
        "{\n"                                                                                      \
        ".reg .pred p;\n"                                                                          \
        "setp.ne.b32 p, " #add ", 0;\n"                                                            \
        "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" NUMBERS_##sums          \
        "}, " operands ";\n}\n"                                                                    \
        : SUMS_##sums(access)                                                                      \
        : __VA_ARGS__)

// d = A B with A from shared memory. A TRANSPOSE flag is 1 if the panels' rows are k. The previous
// contents of d are not an operand. Other instructions may have written them while products were in
// flight, and the assembler would then have to serialise the products.
template <int TRANSPOSE_A, int TRANSPOSE_B>
static __device__ __forceinline__ void wgmma_first(float (&d)[16], uint64_t a, uint64_t b) {
    WGMMA(0, "=f", 32, 16, "%16, %17, p, 1, 1, %18, %19", "l"(a), "l"(b), "n"(TRANSPOSE_A),
          "n"(TRANSPOSE_B));
}

template <int TRANSPOSE_A, int TRANSPOSE_B>
static __device__ __forceinline__ void wgmma_first(float (&d)[32], uint64_t a, uint64_t b) {
    WGMMA(0, "=f", 64, 32, "%32, %33, p, 1, 1, %34, %35", "l"(a), "l"(b), "n"(TRANSPOSE_A),
          "n"(TRANSPOSE_B));
}

template <int TRANSPOSE_A, int TRANSPOSE_B>
static __device__ __forceinline__ void wgmma_first(float (&d)[64], uint64_t a, uint64_t b) {
    WGMMA(0, "=f", 128, 64, "%64, %65, p, 1, 1, %66, %67", "l"(a), "l"(b), "n"(TRANSPOSE_A),
          "n"(TRANSPOSE_B));
}

// d += A B with A from shared memory.
template <int TRANSPOSE_A, int TRANSPOSE_B>
static __device__ __forceinline__ void wgmma(float (&d)[16], uint64_t a, uint64_t b) {
    WGMMA(1, "+f", 32, 16, "%16, %17, p, 1, 1, %18, %19", "l"(a), "l"(b), "n"(TRANSPOSE_A),
          "n"(TRANSPOSE_B));
}

template <int TRANSPOSE_A, int TRANSPOSE_B>
static __device__ __forceinline__ void wgmma(float (&d)[32], uint64_t a, uint64_t b) {
    WGMMA(1, "+f", 64, 32, "%32, %33, p, 1, 1, %34, %35", "l"(a), "l"(b), "n"(TRANSPOSE_A),
          "n"(TRANSPOSE_B));
}

template <int TRANSPOSE_A, int TRANSPOSE_B>
static __device__ __forceinline__ void wgmma(float (&d)[64], uint64_t a, uint64_t b) {
    WGMMA(1, "+f", 128, 64, "%64, %65, p, 1, 1, %66, %67", "l"(a), "l"(b), "n"(TRANSPOSE_A),
          "n"(TRANSPOSE_B));
}

// d += A B with A from registers.
template <int TRANSPOSE_B>
static __device__ __forceinline__ void wgmma(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
    WGMMA(1, "+f", 64, 32, "{%32, %33, %34, %35}, %36, p, 1, 1, %37", "r"(a[0]), "r"(a[1]),
          "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSE_B));
}

template <int TRANSPOSE_B>
static __device__ __forceinline__ void wgmma(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
    WGMMA(1, "+f", 128, 64, "{%64, %65, %66, %67}, %68, p, 1, 1, %69", "r"(a[0]), "r"(a[1]),
          "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSE_B));
}

#else
#include "emulator/sm90_instructions.h"
#endif
