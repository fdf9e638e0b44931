// Matrix instructions of sm_80: ldmatrix, mma m16n8k16 of bf16 with f32 sums, cp.async.
//
// On the CPU the same functions exchange values between the lanes of a warp according to the
// fragment layouts. With g = lane / 4 and t = lane % 4:
//   A (16x16): a0 holds row g, columns 2t and 2t+1; a1 row g+8; a2 and a3 the same rows, columns
//   + 8. B (16x8):  b0 holds rows 2t and 2t+1 of column g; b1 rows + 8. C, D (16x8): d0, d1 hold
//   row g, columns 2t and 2t+1; d2, d3 row g+8.
#pragma once

#include "warp.cuh"

#ifdef __CUDACC__

// An address in shared memory, in bytes.
using SharedAddress = uint32_t;

static __device__ __forceinline__ SharedAddress shared_address(const void* pointer) {
    return uint32_t(__cvta_generic_to_shared(pointer));
}

// Loads four 8x8 matrices; lanes 8i..8i+7 have the addresses of the rows of matrix i. A lane's
// elements are (g, 2t) and (g, 2t+1).
static __device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

// Loads like ldmatrix_x4, with each matrix transposed: a lane's elements are (2t, g) and (2t+1, g).
static __device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

// d += a b.
static __device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4],
                                                    const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Copies 16 bytes to shared memory, or fills them with zeros; both addresses 16-byte aligned.
static __device__ __forceinline__ void cp_async_16(SharedAddress shared, const void* global,
                                                   bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared),
                 "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0)
                 : "memory");
}

// Copies or fills 4 bytes.
static __device__ __forceinline__ void cp_async_4(SharedAddress shared, const void* global,
                                                  bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared),
                 "l"(__cvta_generic_to_global(global)), "r"(valid ? 4 : 0)
                 : "memory");
}

static __device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits for all groups of this thread's copies except the `NEWEST` last ones.
template <int NEWEST>
static __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(NEWEST) : "memory");
}

#else
#include "emulator/mma_instructions.h"
#endif
