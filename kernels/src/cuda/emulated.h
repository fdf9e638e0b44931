// Runs CUDA kernels on the CPU, so that a C++ compiler alone can test them.
//
// Covers the part of CUDA C++ that the kernels use: built-in variables, barriers, warp collectives,
// atomics, bf16 and shared memory. Blocks run one after the other. The threads of a block are
// fibers on the calling OS thread; a fiber gives way only at a barrier or a warp collective. All
// state is thread_local, so several OS threads may launch at once.
//
// To make races and missing waits visible, dynamic shared memory starts as NaN, copies of cp.async
// land only when waited for, and `emulated::schedule_seed` varies the order of the threads.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

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

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

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

// ---- fibers ----

namespace emulated {

// Copy of cp.async: it lands when its group is waited for.
struct PendingCopy {
    void* destination;
    const void* source;
    unsigned bytes, copied, group;
};

#if defined(__x86_64__)
// A suspended fiber: its stack pointer, with the callee-saved registers on the stack.
struct Context {
    void* stack_pointer = nullptr;
};

// Saves the running fiber in `save` and continues the one whose stack pointer is `load`.
__attribute__((naked, noinline)) inline void switch_stack(void**, void*) {
    asm("pushq %rbp\n\tpushq %rbx\n\tpushq %r12\n\tpushq %r13\n\tpushq %r14\n\tpushq %r15\n\t"
        "movq %rsp, (%rdi)\n\tmovq %rsi, %rsp\n\t"
        "popq %r15\n\tpopq %r14\n\tpopq %r13\n\tpopq %r12\n\tpopq %rbx\n\tpopq %rbp\n\tret");
}

inline void switch_context(Context& from, Context& to) {
    switch_stack(&from.stack_pointer, to.stack_pointer);
}

inline void prepare_context(Context& context, char* stack, size_t bytes, void (*entry)()) {
    // Six registers, the address to return to, and a slot that aligns the entry's frame.
    void** top = reinterpret_cast<void**>(stack + bytes) - 8;
    std::fill(top, top + 8, nullptr);
    top[6] = reinterpret_cast<void*>(entry);
    context.stack_pointer = top;
}
#else
struct Context {
    ucontext_t state;
};

inline void switch_context(Context& from, Context& to) { swapcontext(&from.state, &to.state); }

inline void prepare_context(Context& context, char* stack, size_t bytes, void (*entry)()) {
    getcontext(&context.state);
    context.state.uc_stack.ss_sp = stack;
    context.state.uc_stack.ss_size = bytes;
    context.state.uc_link = nullptr;
    makecontext(&context.state, entry, 0);
}
#endif

struct Fiber {
    Context context;
    uint3 thread_index{};
    unsigned lane = 0, warp = 0;
    std::vector<PendingCopy> copies;
    unsigned copy_group = 0;
};

// Fibers that wait until `expected` of them have arrived.
struct Barrier {
    std::vector<Fiber*> waiting;
    // Two sets, for the fibers that have gone on to the next use while others still read.
    int count[2] = {0, 0};
    unsigned parity = 0;
};

constexpr size_t LARGEST_EXCHANGE = 64;

// Lanes of one warp that meet in collectives with the same mask.
struct LaneGroup {
    unsigned mask = 0, expected = 0;
    Barrier barrier;
    alignas(16) unsigned char slots[2][32][LARGEST_EXCHANGE];
};

// What a collective leaves with each lane: the values of all lanes of the mask.
template <typename T>
struct Exchanged {
    const unsigned char (*slots)[LARGEST_EXCHANGE];
    const T& operator[](unsigned lane) const { return *reinterpret_cast<const T*>(slots[lane]); }
};

// 0 runs threads in order; other values give a repeatable order of their own.
inline thread_local unsigned schedule_seed = 0;

class Machine {
  public:
    Fiber* current = nullptr;
    dim3 grid, block;
    uint3 block_index{};

    Machine() = default;
    Machine(const Machine&) = delete;
    ~Machine() {
        if (stacks_ != nullptr) munmap(stacks_, fibers_.size() * STACK_PITCH);
    }

    unsigned char* dynamic_shared() { return shared_; }

    // Runs body(argument) for every thread of every block.
    void run(dim3 grid_size, dim3 block_size, size_t shared_bytes, void (*body)(void*),
             void* argument) {
        if (current != nullptr) fail("a kernel launches a kernel");
        grid = grid_size;
        block = block_size;
        body_ = body;
        argument_ = argument;
        random_ = schedule_seed;
        reserve(block.x * block.y * block.z, shared_bytes);
        for (unsigned z = 0; z < grid.z; ++z)
            for (unsigned y = 0; y < grid.y; ++y)
                for (unsigned x = 0; x < grid.x; ++x) {
                    block_index = {x, y, z};
                    run_block(shared_bytes);
                }
        current = nullptr;
    }

    // __syncthreads, which also counts the threads whose predicate holds.
    int sync_block(bool predicate) {
        int* count = &block_barrier_.count[block_barrier_.parity];
        *count += predicate;
        arrive(block_barrier_, threads_);
        return *count;
    }

    // Hands `value` to every lane of `mask` and returns theirs.
    template <typename T>
    Exchanged<T> exchange(unsigned mask, const T& value) {
        static_assert(sizeof(T) <= LARGEST_EXCHANGE && std::is_trivially_copyable_v<T>);
        LaneGroup& group = lane_group(mask);
        auto* slots = group.slots[group.barrier.parity];
        std::memcpy(slots[current->lane], &value, sizeof(T));
        arrive(group.barrier, group.expected);
        return {slots};
    }

  private:
    static constexpr size_t GUARD = 4096;
    static constexpr size_t STACK = 256 * 1024;
    static constexpr size_t STACK_PITCH = STACK + GUARD;

    [[noreturn]] static void fail(const char* message) {
        std::fprintf(stderr, "emulated kernel: %s\n", message);
        std::abort();
    }

    void reserve(unsigned threads, size_t shared_bytes) {
        if (threads == 0 || threads > 1024) fail("a block has 1 to 1024 threads");
        threads_ = threads;
        if (fibers_.size() < threads) {
            if (stacks_ != nullptr) munmap(stacks_, fibers_.size() * STACK_PITCH);
            fibers_ = std::vector<Fiber>(threads);
            void* memory = mmap(nullptr, threads * STACK_PITCH, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (memory == MAP_FAILED) fail("no memory for stacks");
            stacks_ = static_cast<char*>(memory);
            for (unsigned i = 0; i < threads; ++i)
                mprotect(stacks_ + i * STACK_PITCH, GUARD, PROT_NONE);
        }
        if (storage_.size() < shared_bytes + 1024) storage_.resize(shared_bytes + 1024);
        auto address = reinterpret_cast<uintptr_t>(storage_.data());
        shared_ = storage_.data() + (1024 - address % 1024) % 1024;
        for (Fiber& fiber : fibers_) fiber.copies.clear();
    }

    void run_block(size_t shared_bytes) {
        std::memset(shared_, 0xff, shared_bytes);
        groups_.resize((threads_ + 31) / 32);
        for (auto& warp : groups_) warp.clear();
        groups_used_ = 0;
        block_barrier_ = Barrier{};
        ready_.clear();
        ready_head_ = 0;
        finished_ = 0;
        for (unsigned i = 0; i < threads_; ++i) start_fiber(i);
        current = nullptr;
        Fiber* first = next_ready();
        current = first;
        switch_context(scheduler_, first->context);
        if (finished_ != threads_) report_deadlock();
    }

    void start_fiber(unsigned i) {
        Fiber& fiber = fibers_[i];
        fiber.thread_index = {i % block.x, i / block.x % block.y, i / (block.x * block.y)};
        fiber.lane = i % 32;
        fiber.warp = i / 32;
        fiber.copies.clear();
        prepare_context(fiber.context, stacks_ + i * STACK_PITCH + GUARD, STACK, &Machine::enter);
        ready_.push_back(&fiber);
    }

    static void enter();

    void finish_fiber() {
        ++finished_;
        leave(current);
    }

    Fiber* next_ready() {
        size_t index = ready_head_;
        if (random_ != 0) {
            random_ = random_ * 1664525u + 1013904223u;
            index += (random_ >> 8) % (ready_.size() - ready_head_);
            std::swap(ready_[index], ready_[ready_head_]);
        }
        Fiber* next = ready_[ready_head_++];
        if (ready_head_ == ready_.size()) {
            ready_.clear();
            ready_head_ = 0;
        }
        return next;
    }

    // Goes on with another fiber, or back to run_block when none can go on.
    void leave(Fiber* self) {
        if (ready_.empty()) {
            switch_context(self->context, scheduler_);
        } else {
            Fiber* next = next_ready();
            current = next;
            if (next != self) switch_context(self->context, next->context);
        }
        current = self;
    }

    void arrive(Barrier& barrier, unsigned expected) {
        Fiber* self = current;
        if (barrier.waiting.size() + 1 < expected) {
            barrier.waiting.push_back(self);
            leave(self);
            return;
        }
        barrier.parity ^= 1;
        barrier.count[barrier.parity] = 0;
        ready_.insert(ready_.end(), barrier.waiting.begin(), barrier.waiting.end());
        barrier.waiting.clear();
    }

    LaneGroup& lane_group(unsigned mask) {
        auto& warp = groups_[current->warp];
        if ((mask >> current->lane & 1) == 0) fail("a lane is not in its collective's mask");
        for (LaneGroup* group : warp)
            if (group->mask == mask) return *group;
        unsigned lanes = std::min(32u, threads_ - current->warp * 32);
        unsigned present = lanes == 32 ? ~0u : (1u << lanes) - 1;
        if (groups_used_ == pool_.size()) pool_.push_back(std::make_unique<LaneGroup>());
        LaneGroup* group = pool_[groups_used_++].get();
        group->mask = mask;
        group->expected = __builtin_popcount(mask & present);
        group->barrier = Barrier{};
        warp.push_back(group);
        return *group;
    }

    void report_deadlock() {
        size_t in_warps = 0;
        for (const auto& warp : groups_)
            for (const LaneGroup* group : warp) in_warps += group->barrier.waiting.size();
        std::fprintf(stderr,
                     "emulated kernel: deadlock in block (%u, %u, %u): of %u threads %u finished, "
                     "%zu wait at __syncthreads, %zu in warp collectives\n",
                     block_index.x, block_index.y, block_index.z, threads_, finished_,
                     block_barrier_.waiting.size(), in_warps);
        std::abort();
    }

    unsigned threads_ = 0, finished_ = 0, random_ = 0;
    void (*body_)(void*) = nullptr;
    void* argument_ = nullptr;
    Context scheduler_;
    std::vector<Fiber> fibers_;
    char* stacks_ = nullptr;
    std::vector<Fiber*> ready_;
    size_t ready_head_ = 0;
    Barrier block_barrier_;
    std::vector<std::vector<LaneGroup*>> groups_;
    std::vector<std::unique_ptr<LaneGroup>> pool_;
    size_t groups_used_ = 0;
    std::vector<unsigned char> storage_;
    unsigned char* shared_ = nullptr;
};

inline Machine& machine() {
    static thread_local Machine instance;
    return instance;
}

inline void Machine::enter() {
    Machine& self = machine();
    self.body_(self.argument_);
    self.finish_fiber();
}

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

// One function per kernel, all of the same type: arguments[i] points at the i-th parameter, as
// cuLaunchKernel takes them.
template <auto Kernel>
void launch_erased(dim3 grid, dim3 block, size_t shared_bytes, void** arguments) {
    launch_pointers(Kernel, grid, block, shared_bytes, arguments);
}

// ---- cp.async ----

// Copies `copied` bytes and fills the rest of `bytes` with zeros, once the group is waited for.
inline void copy_async(void* destination, const void* source, unsigned bytes, unsigned copied) {
    Fiber& fiber = *machine().current;
    fiber.copies.push_back({destination, source, bytes, copied, fiber.copy_group});
}

inline void copy_async_commit() { ++machine().current->copy_group; }

// Waits for all but the `newest` groups committed last.
inline void copy_async_wait(unsigned newest) {
    Fiber& fiber = *machine().current;
    size_t kept = 0;
    for (const PendingCopy& copy : fiber.copies) {
        // Groups count modulo 2^32; an uncommitted copy has age 0.
        if (fiber.copy_group - copy.group <= newest) {
            fiber.copies[kept++] = copy;
            continue;
        }
        auto* destination = static_cast<unsigned char*>(copy.destination);
        std::memcpy(destination, copy.source, copy.copied);
        std::memset(destination + copy.copied, 0, copy.bytes - copy.copied);
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

// The threads that could meet in an atomic are fibers of one OS thread.
template <typename T, typename U>
T atomicAdd(T* address, U value) {
    T old = *address;
    *address = T(old + value);
    return old;
}
template <typename T, typename U>
T atomicMax(T* address, U value) {
    T old = *address;
    *address = std::max(old, T(value));
    return old;
}
template <typename T, typename U>
T atomicMin(T* address, U value) {
    T old = *address;
    *address = std::min(old, T(value));
    return old;
}
template <typename T, typename U>
T atomicOr(T* address, U value) {
    T old = *address;
    *address = T(old | value);
    return old;
}
template <typename T, typename U>
T atomicExch(T* address, U value) {
    T old = *address;
    *address = T(value);
    return old;
}
template <typename T, typename U, typename V>
T atomicCAS(T* address, U compare, V value) {
    T old = *address;
    if (old == T(compare)) *address = T(value);
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
// The C library declares some of these names for itself.
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
// Rounds to nearest, ties to even; a NaN stays one.
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
