// The instructions of sm_90 on the CPU: mbarriers, the copy engine and wgmma.
//
// They interpret the same input as the GPU: matrix descriptors over the swizzled bytes of shared
// memory, tensor maps with their boxes, phases of barriers. Asynchronous work happens as late as possible:
// - copies when no thread can continue without them, or at random times if `emulated::schedule_seed` is not 0;
// - products when they are waited for;
// - reductions when their source may be overwritten.
// Memory that must not change in the meantime is checked.
#pragma once

#include "emulator.h"

namespace emulated {

// ---- mbarrier ----

// The eight bytes of an mbarrier.
struct MemoryBarrier {
    int32_t bytes;
    uint16_t pending, expected_and_phase;

    void complete_phase_if_done() {
        if (pending != 0 || bytes != 0) return;
        expected_and_phase ^= 1;
        pending = expected_and_phase >> 1;
        machine().notify();
    }
};

inline MemoryBarrier& memory_barrier(unsigned char* address) {
    unsigned offset = machine().shared_offset(address);
    if (offset % 8 != 0) Machine::fail("an mbarrier is not 8-byte aligned");
    return *reinterpret_cast<MemoryBarrier*>(address);
}

inline void barrier_init(unsigned char* address, unsigned arrivals) {
    memory_barrier(address) = {0, uint16_t(arrivals), uint16_t(arrivals << 1)};
}

inline void barrier_arrive(unsigned char* address, unsigned bytes) {
    MemoryBarrier& barrier = memory_barrier(address);
    if (barrier.pending == 0) Machine::fail("too many arrivals at an mbarrier");
    barrier.bytes += int32_t(bytes);
    --barrier.pending;
    barrier.complete_phase_if_done();
    machine().give_way();
}

inline void barrier_wait(unsigned char* address, unsigned parity) {
    MemoryBarrier& barrier = memory_barrier(address);
    while ((barrier.expected_and_phase & 1) == parity) machine().park();
}

// ---- the copy engine ----

constexpr unsigned SWIZZLE_BYTES = 128;

// The address to which the 128-byte swizzle maps a byte of a 32-bit shared address.
inline unsigned swizzled(unsigned address) { return address ^ (address >> 7 & 7) << 4; }

// A tensor of two-byte elements, like a map of cuTensorMapEncodeTiled with 128-byte swizzle, no
// interleaving and zeros out of range. Strides are in bytes, for the dimensions after the first.
struct TensorMapFields {
    const unsigned char* elements;
    uint64_t dimensions[3], strides[2];
    uint32_t box[3];
};

inline void encode_tensor_map(void* map, const TensorMapFields& fields) {
    for (uint64_t stride : fields.strides)
        if (stride % 16 != 0) Machine::fail("a tensor map's stride is no multiple of 16 bytes");
    if (reinterpret_cast<uintptr_t>(fields.elements) % 16 != 0)
        Machine::fail("a tensor map's elements are not 16-byte aligned");
    if (fields.box[0] * 2 != SWIZZLE_BYTES) Machine::fail("a box is not 128 bytes wide");
    for (uint32_t length : fields.box)
        if (length == 0 || length > 256) Machine::fail("a box has a side of 1 to 256");
    static_assert(sizeof(fields) <= 128);
    std::memcpy(map, &fields, sizeof(fields));
}

inline void load_box(const TensorMapFields& map, unsigned target, const int32_t (&corner)[3]) {
    for (uint32_t z = 0; z < map.box[2]; ++z)
        for (uint32_t y = 0; y < map.box[1]; ++y)
            for (uint32_t x = 0; x < map.box[0]; ++x, target += 2) {
                uint64_t at[3] = {uint64_t(int64_t(corner[0]) + x),
                                  uint64_t(int64_t(corner[1]) + y),
                                  uint64_t(int64_t(corner[2]) + z)};
                bool inside = at[0] < map.dimensions[0] && at[1] < map.dimensions[1] &&
                              at[2] < map.dimensions[2];
                uint16_t element = 0;
                if (inside)
                    std::memcpy(
                        &element,
                        map.elements + at[0] * 2 + at[1] * map.strides[0] + at[2] * map.strides[1],
                        2);
                std::memcpy(machine().shared_at(swizzled(target), 2), &element, 2);
            }
}

inline void complete_bytes(unsigned char* barrier, unsigned bytes) {
    memory_barrier(barrier).bytes -= int32_t(bytes);
    memory_barrier(barrier).complete_phase_if_done();
}

// cp.async.bulk.tensor.3d of one box.
inline void copy_tensor(unsigned char* target, const void* map, int32_t x, int32_t y, int32_t z,
                        unsigned char* barrier) {
    TensorMapFields fields;
    std::memcpy(&fields, map, sizeof(fields));
    unsigned offset = machine().shared_offset(target);
    if (offset % 1024 != 0) Machine::fail("a swizzled box does not start at 1024 bytes");
    machine().defer([=] {
        load_box(fields, offset, {x, y, z});
        complete_bytes(barrier, fields.box[0] * fields.box[1] * fields.box[2] * 2);
    });
}

// cp.async.bulk from global to shared memory.
inline void copy_bulk(unsigned char* target, const void* source, unsigned bytes,
                      unsigned char* barrier) {
    unsigned offset = machine().shared_offset(target);
    if (offset % 16 != 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(source) % 16 != 0)
        Machine::fail("a bulk copy is not 16-byte aligned");
    machine().defer([=] {
        std::memcpy(machine().shared_at(offset, bytes), source, bytes);
        complete_bytes(barrier, bytes);
    });
}

// cp.reduce.async.bulk from shared to global memory.
inline void reduce_bulk(float* target, const unsigned char* source, unsigned bytes) {
    unsigned offset = machine().shared_offset(source);
    if (offset % 16 != 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(target) % 16 != 0)
        Machine::fail("a bulk reduction is not 16-byte aligned");
    for (unsigned i = 0; i < bytes; i += 16) machine().check_fenced(offset + i);
    Fiber& fiber = *machine().current;
    fiber.reductions.push_back({target, source, bytes, fiber.reduction_group, {}});
}

inline void reduce_commit() {
    ++machine().current->reduction_group;
    machine().give_way();
}

// Waits until the sources of all groups except the `newest` last ones have been read, and with
// `sums` also until the sums have been written.
inline void reduce_wait(unsigned newest, bool sums) {
    Fiber& fiber = *machine().current;
    size_t kept = 0;
    for (PendingReduction& reduction : fiber.reductions) {
        bool old = fiber.reduction_group - reduction.group > newest;
        if (old && reduction.elements.empty()) {
            reduction.elements.resize(reduction.bytes / 4);
            std::memcpy(reduction.elements.data(), reduction.source, reduction.bytes);
        }
        if (old && sums) {
            for (size_t i = 0; i < reduction.elements.size(); ++i)
                reduction.target[i] += reduction.elements[i];
            continue;
        }
        if (&fiber.reductions[kept] != &reduction) fiber.reductions[kept] = std::move(reduction);
        ++kept;
    }
    fiber.reductions.resize(kept);
}

// ---- wgmma ----

inline float number_at(unsigned address) {
    machine().check_fenced(address);
    uint16_t bits;
    std::memcpy(&bits, machine().shared_at(address, 2), 2);
    return reinterpret_bits<float>(uint32_t(bits) << 16);
}

// The address of element (row, k) of the operand of a descriptor with 128-byte swizzle; "row" is
// a row of A or a column of B. In a transposed operand, adjacent elements differ in the row, otherwise in k.
inline unsigned operand_address(uint64_t descriptor, bool transposed, unsigned row, unsigned k) {
    unsigned start = unsigned(descriptor & 0x3fff) * 16;
    unsigned leading = unsigned(descriptor >> 16 & 0x3fff) * 16;
    unsigned stride = unsigned(descriptor >> 32 & 0x3fff) * 16;
    if (transposed)
        start += row / 64 * leading + row % 64 * 2 + k / 8 * stride + k % 8 * 128;
    else
        start += row / 8 * stride + row % 8 * 128 + k * 2;
    return swizzled(start);
}

inline void check_descriptor(uint64_t descriptor) {
    if (descriptor >> 62 != 1) Machine::fail("a descriptor is not of 128-byte swizzle");
    if ((descriptor & ~(3ull << 62 | 0x3fffull << 32 | 0x3fffull << 16 | 0x3fffull)) != 0)
        Machine::fail("a descriptor has bits that must be 0");
}

inline void wgmma_issue(float* sums, unsigned columns, const uint32_t* a, uint64_t a_descriptor,
                        uint64_t b_descriptor, bool a_transposed, bool b_transposed,
                        bool accumulates) {
    Fiber& fiber = *machine().current;
    if (!fiber.product_fence) Machine::fail("wgmma.fence is missing");
    if (a == nullptr) check_descriptor(a_descriptor);
    check_descriptor(b_descriptor);
    PendingProduct product{sums, columns, accumulates,  a_transposed, b_transposed,        false,
                           a,    {},      a_descriptor, b_descriptor, fiber.product_group, {}};
    if (a != nullptr) std::copy(a, a + 4, product.a);
    bool pending = false;
    for (const PendingProduct& other : fiber.products) pending |= other.sums == sums;
    if (!pending) product.before.assign(sums, sums + columns / 2);
    fiber.products.push_back(std::move(product));
}

inline void check_untouched(const PendingProduct& product) {
    size_t bytes = product.before.size() * sizeof(float);
    if (bytes != 0 && std::memcmp(product.sums, product.before.data(), bytes) != 0)
        Machine::fail("sums of a product were touched while it was in flight");
    if (product.a_registers != nullptr && std::memcmp(product.a, product.a_registers, 16) != 0)
        Machine::fail("fragments of A were touched while a product was in flight");
}

// A (16 rows of this warp) and B (columns) of a product, 16 deep, as floats.
struct ProductOperands {
    float a[16][16], b[16][256];

    void load(unsigned index) {
        const PendingProduct& first = machine().lane_fiber(0).products[index];
        for (unsigned k = 0; k < 16; ++k)
            for (unsigned n = 0; n < first.columns; ++n)
                b[k][n] = number_at(operand_address(first.b_descriptor, first.b_transposed, n, k));
        if (first.a_registers != nullptr) {
            load_registers(index);
            return;
        }
        unsigned row = machine().current->warp % 4 * 16;
        for (unsigned m = 0; m < 16; ++m)
            for (unsigned k = 0; k < 16; ++k)
                a[m][k] =
                    number_at(operand_address(first.a_descriptor, first.a_transposed, row + m, k));
    }

    void load_registers(unsigned index) {
        for (unsigned lane = 0; lane < 32; ++lane)
            for (unsigned i = 0; i < 4; ++i) {
                uint32_t pair = machine().lane_fiber(lane).products[index].a[i];
                float* target = &a[lane / 4 + i % 2 * 8][lane % 4 * 2 + i / 2 * 8];
                target[0] = reinterpret_bits<float>(pair << 16);
                target[1] = reinterpret_bits<float>(pair & 0xffff0000u);
            }
    }
};

// Computes product `index` of this warp's lanes.
inline void compute_product(unsigned index) {
    static thread_local ProductOperands operands;
    static thread_local float sums[16][256];
    const PendingProduct& first = machine().lane_fiber(0).products[index];
    operands.load(index);
    std::memset(sums, 0, sizeof(sums));
    for (unsigned m = 0; m < 16; ++m)
        for (unsigned k = 0; k < 16; ++k)
            for (unsigned n = 0; n < first.columns; ++n)
                sums[m][n] += operands.a[m][k] * operands.b[k][n];
    for (unsigned lane = 0; lane < 32; ++lane) {
        PendingProduct& own = machine().lane_fiber(lane).products[index];
        if (own.b_descriptor != first.b_descriptor || own.columns != first.columns ||
            own.a_descriptor != first.a_descriptor)
            Machine::fail("lanes of a warp multiply different matrices");
        check_untouched(own);
        for (unsigned n = 0; n < own.columns / 8; ++n)
            for (unsigned i = 0; i < 4; ++i) {
                float value = sums[lane / 4 + i / 2 * 8][8 * n + lane % 4 * 2 + i % 2];
                own.sums[4 * n + i] = own.accumulates ? own.sums[4 * n + i] + value : value;
            }
    }
}

inline void wgmma_commit() {
    for (PendingProduct& product : machine().current->products) product.committed = true;
    ++machine().current->product_group;
    machine().give_way();
}

// Computes the products of all groups except the `newest` last ones. After every lane has arrived, the
// first lane computes them for its warp.
inline void wgmma_wait(unsigned newest) {
    Machine& self = machine();
    Fiber& fiber = *self.current;
    unsigned done = 0;
    for (const PendingProduct& product : fiber.products)
        done += product.committed && fiber.product_group - product.group > newest;
    fiber.product_fence = false;
    auto counts = self.exchange(~0u, done);
    if (counts[0] != done) Machine::fail("lanes of a warp wait for different products");
    if (fiber.lane == 0)
        for (unsigned i = 0; i < done; ++i) compute_product(i);
    self.exchange(~0u, done);
    // A product that follows a completed one accumulates into its sums.
    for (unsigned i = done; i < fiber.products.size(); ++i) {
        bool first = true;
        for (unsigned j = done; j < i; ++j)
            first &= fiber.products[j].sums != fiber.products[i].sums;
        PendingProduct& product = fiber.products[i];
        if (first && product.before.empty())
            product.before.assign(product.sums, product.sums + product.columns / 2);
    }
    fiber.products.erase(fiber.products.begin(), fiber.products.begin() + done);
}

}  // namespace emulated
