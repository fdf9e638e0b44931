// The functions of sm90.cuh on the CPU; sm90.cuh includes this file, and sm90.h implements them.
#pragma once

#include "sm90.h"

inline void barrier_init(SharedAddress barrier, uint32_t arrivals) {
    emulated::barrier_init(barrier, arrivals);
}

inline void barrier_init_fence() {}

inline void barrier_arrive(SharedAddress barrier) { emulated::barrier_arrive(barrier, 0); }

inline void barrier_expect(SharedAddress barrier, uint32_t bytes) {
    emulated::barrier_arrive(barrier, bytes);
}

inline void barrier_wait(SharedAddress barrier, uint32_t parity) {
    emulated::barrier_wait(barrier, parity);
}

inline void fence_async_proxy() { emulated::machine().fence_async_proxy(); }

inline void prefetch_tensor_map(const TensorMap*) {}

inline void copy_tensor(SharedAddress target, const TensorMap* map, int x, int y, int z,
                        SharedAddress barrier) {
    emulated::copy_tensor(target, map, x, y, z, barrier);
}

inline void copy_bulk(SharedAddress target, const void* source, uint32_t bytes,
                      SharedAddress barrier) {
    emulated::copy_bulk(target, source, bytes, barrier);
}

inline void reduce_bulk(float* target, SharedAddress source, uint32_t bytes) {
    emulated::reduce_bulk(target, source, bytes);
}

inline void reduce_commit() { emulated::reduce_commit(); }

template <int NEWEST>
void reduce_wait_read() {
    emulated::reduce_wait(NEWEST, false);
}

template <int NEWEST = 0>
void reduce_wait() {
    emulated::reduce_wait(NEWEST, true);
}

// Blocks run in sequence: a semaphore with another value now never reaches this value.
inline void semaphore_wait(const uint32_t* semaphore, uint32_t value) {
    if (*semaphore != value) emulated::Machine::fail("a block waits for a later one");
}

template <int NEWEST>
void semaphore_release(uint32_t* semaphore) {
    reduce_wait<NEWEST>();
    ++*semaphore;
}

template <int COUNT>
void allocate_registers() {
    static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256);
}

template <int COUNT>
void deallocate_registers() {
    static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256);
}

inline void named_sync(uint32_t barrier, uint32_t threads) {
    emulated::machine().named_barrier(barrier, threads, true);
}

inline void named_arrive(uint32_t barrier, uint32_t threads) {
    emulated::machine().named_barrier(barrier, threads, false);
}

inline void stmatrix_x4(SharedAddress row, const uint32_t (&r)[4]) {
    struct Registers {
        uint32_t r[4];
        SharedAddress row;
    } own{{r[0], r[1], r[2], r[3]}, row};
    auto lanes = emulated::machine().exchange(ALL_LANES, own);
    unsigned lane = emulated::machine().current->lane;
    for (unsigned i = 0; i < 4; ++i)
        std::memcpy(lanes[8 * i + lane / 4].row + lane % 4 * 4, &r[i], 4);
    // Marked as a row of this lane: the fence must be by this lane too.
    emulated::machine().mark_written(row, 16);
}

inline void store_4(SharedAddress target, float a, float b, float c, float d) {
    const float elements[4] = {a, b, c, d};
    std::memcpy(target, elements, sizeof(elements));
    emulated::machine().mark_written(target, sizeof(elements));
}

inline uint32_t descriptor_address(SharedAddress address) {
    return emulated::machine().shared_offset(address);
}

template <int COUNT>
void fence_operand(float (&)[COUNT]) {}

template <int COUNT>
void fence_operand(uint32_t (&)[COUNT][4]) {}

inline void wgmma_fence() { emulated::machine().current->product_fence = true; }

inline void wgmma_commit() { emulated::wgmma_commit(); }

template <int NEWEST>
void wgmma_wait() {
    emulated::wgmma_wait(NEWEST);
}

template <int TRANSPOSE_A, int TRANSPOSE_B, int COUNT>
void wgmma_first(float (&d)[COUNT], uint64_t a, uint64_t b) {
    emulated::wgmma_issue(d, 2 * COUNT, nullptr, a, b, TRANSPOSE_A, TRANSPOSE_B, false);
}

template <int TRANSPOSE_A, int TRANSPOSE_B, int COUNT>
void wgmma(float (&d)[COUNT], uint64_t a, uint64_t b) {
    emulated::wgmma_issue(d, 2 * COUNT, nullptr, a, b, TRANSPOSE_A, TRANSPOSE_B, true);
}

template <int TRANSPOSE_B, int COUNT>
void wgmma(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b) {
    emulated::wgmma_issue(d, 2 * COUNT, a, 0, b, false, TRANSPOSE_B, true);
}
