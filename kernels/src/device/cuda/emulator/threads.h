// The threads of a kernel on the CPU: fibers, their order, barriers, exchanges between lanes, and
// the concurrent work of the copy engine and the tensor cores. See emulator.h for an overview.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// ---- fibers ----

namespace emulated {

// A copy of cp.async, executed when its group is waited for.
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

// Saves the running fiber in `save` and continues the fiber with the stack pointer `load`.
__attribute__((naked, noinline)) inline void switch_stack(void**, void*) {
    asm("pushq %rbp\n\tpushq %rbx\n\tpushq %r12\n\tpushq %r13\n\tpushq %r14\n\tpushq %r15\n\t"
        "movq %rsp, (%rdi)\n\tmovq %rsi, %rsp\n\t"
        "popq %r15\n\tpopq %r14\n\tpopq %r13\n\tpopq %r12\n\tpopq %rbx\n\tpopq %rbp\n\tret");
}

inline void switch_context(Context& from, Context& to) {
    switch_stack(&from.stack_pointer, to.stack_pointer);
}

inline void prepare_context(Context& context, char* stack, size_t bytes, void (*entry)()) {
    // Six registers, the return address, and a slot that aligns the entry's frame.
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

// Pending wgmma product: D (16 rows of this warp, 4 elements per lane and 8 columns) += A B, 16
// deep. A is in registers if `a_registers` is not null, otherwise in shared memory.
struct PendingProduct {
    float* sums;
    unsigned columns;
    bool accumulates, a_transposed, b_transposed, committed;
    const uint32_t* a_registers;
    uint32_t a[4];
    uint64_t a_descriptor, b_descriptor;
    unsigned group;
    // The contents of `sums` at the issue; empty if an earlier product with the same sums is
    // pending.
    std::vector<float> before;
};

// Addition of cp.reduce.async.bulk: shared memory is read when its group is waited for.
struct PendingReduction {
    float* target;
    const unsigned char* source;
    unsigned bytes, group;
    // A copy of the source, after it has been read.
    std::vector<float> elements;
};

struct Fiber {
    Context context;
    uint3 thread_index{};
    unsigned lane = 0, warp = 0;
    std::vector<PendingCopy> copies;
    unsigned copy_group = 0;
    std::vector<PendingProduct> products;
    unsigned product_group = 0;
    // Whether wgmma.fence has been executed since the last wait for products.
    bool product_fence = false;
    std::vector<PendingReduction> reductions;
    unsigned reduction_group = 0;
    // 16-byte chunks of shared memory written since the last fence.proxy.async.
    std::vector<unsigned> written;
};

// Fibers that wait until `expected` fibers have arrived.
struct Barrier {
    std::vector<Fiber*> waiting;
    // Two sets, for fibers that have reached the next use while other fibers still read.
    int count[2] = {0, 0};
    unsigned parity = 0;
};

// A barrier of bar.sync and bar.arrive.
struct NamedBarrier {
    unsigned expected = 0, arrived = 0;
    std::vector<Fiber*> waiting;
};

constexpr unsigned NAMED_BARRIERS = 16;

// The 32-bit address of the start of dynamic shared memory.
constexpr unsigned SHARED_BASE = 1024;

constexpr size_t MAX_EXCHANGE = 64;

// Lanes of one warp that meet in collectives with the same mask.
struct LaneGroup {
    unsigned mask = 0, expected = 0;
    Barrier barrier;
    alignas(16) unsigned char slots[2][32][MAX_EXCHANGE];
};

// The result of a collective in each lane: the values of all lanes of the mask.
template <typename T>
struct Exchanged {
    const unsigned char (*slots)[MAX_EXCHANGE];
    const T& operator[](unsigned lane) const { return *reinterpret_cast<const T*>(slots[lane]); }
};

// The seed of the order of threads: 0 runs them in order, other values in a reproducible random
// order.
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

    [[noreturn]] static void fail(const char* message) {
        std::fprintf(stderr, "emulated kernel: %s\n", message);
        std::abort();
    }

    // ---- shared memory as instructions see it ----

    unsigned shared_offset(const void* pointer) const {
        auto offset = static_cast<const unsigned char*>(pointer) - shared_;
        if (offset < 0 || size_t(offset) >= shared_bytes_) fail("not an address in shared memory");
        return unsigned(offset) + SHARED_BASE;
    }

    unsigned char* shared_at(unsigned offset, unsigned bytes) const {
        if (offset < SHARED_BASE || offset - SHARED_BASE + bytes > shared_bytes_)
            fail("an instruction leaves shared memory");
        return shared_ + (offset - SHARED_BASE);
    }

    // Ordinary stores. The copy engine and wgmma must not read them before fence.proxy.async.
    void mark_written(const void* pointer, unsigned bytes) {
        auto offset = static_cast<const unsigned char*>(pointer) - shared_;
        if (offset < 0 || size_t(offset) >= shared_bytes_) return;
        for (unsigned i = unsigned(offset) / 16; i <= (unsigned(offset) + bytes - 1) / 16; ++i) {
            unfenced_[i] = 1;
            current->written.push_back(i);
        }
    }

    void fence_async_proxy() {
        for (unsigned chunk : current->written) unfenced_[chunk] = 0;
        current->written.clear();
    }

    void check_fenced(unsigned offset) const {
        if (unfenced_[(offset - SHARED_BASE) / 16]) fail("fence.proxy.async is missing");
    }

    // ---- work that is concurrent with the threads ----

    // Runs `work` at some later time: with seed 0 when no thread can continue without it.
    void defer(std::function<void()> work) { deferred_.push_back(std::move(work)); }

    // Yields until a notification.
    void park() {
        parked_.push_back(current);
        leave(current);
    }

    // Other threads may run here, as they may on the GPU at any time.
    void give_way() {
        if (random_ == 0 || draw() % 4 != 0) return;
        ready_.push_back(current);
        leave(current);
    }

    void notify() {
        ready_.insert(ready_.end(), parked_.begin(), parked_.end());
        parked_.clear();
    }

    // bar.sync (waits) or bar.arrive of one thread.
    void named_barrier(unsigned id, unsigned threads, bool waits) {
        if (id == 0 || id >= NAMED_BARRIERS || threads % 32 != 0) fail("no such named barrier");
        NamedBarrier& barrier = named_[id];
        if (barrier.arrived == 0) barrier.expected = threads;
        if (barrier.expected != threads)
            fail("a named barrier is used with two numbers of threads");
        if (++barrier.arrived == barrier.expected) {
            ready_.insert(ready_.end(), barrier.waiting.begin(), barrier.waiting.end());
            barrier.waiting.clear();
            barrier.arrived = 0;
        } else if (waits) {
            barrier.waiting.push_back(current);
            leave(current);
        }
        if (!waits) give_way();
    }

    Fiber& lane_fiber(unsigned lane) { return fibers_[current->warp * 32 + lane]; }

    // Runs body(argument) for every thread of every block.
    void run(dim3 grid_size, dim3 block_size, size_t shared_bytes, void (*body)(void*),
             void* argument) {
        if (current != nullptr) fail("a kernel launches a kernel");
        grid = grid_size;
        block = block_size;
        body_ = body;
        argument_ = argument;
        random_ = schedule_seed;
        lagging_ = 0;
        reserve(block.x * block.y * block.z, shared_bytes);
        for (unsigned z = 0; z < grid.z; ++z)
            for (unsigned y = 0; y < grid.y; ++y)
                for (unsigned x = 0; x < grid.x; ++x) {
                    block_index = {x, y, z};
                    run_block(shared_bytes);
                }
        current = nullptr;
    }

    // __syncthreads, which also counts the threads with a true predicate.
    int sync_block(bool predicate) {
        int* count = &block_barrier_.count[block_barrier_.parity];
        *count += predicate;
        arrive(block_barrier_, threads_);
        return *count;
    }

    // Passes `value` to every lane of `mask` and returns the values of all of them.
    template <typename T>
    Exchanged<T> exchange(unsigned mask, const T& value) {
        static_assert(sizeof(T) <= MAX_EXCHANGE && std::is_trivially_copyable_v<T>);
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
        shared_bytes_ = shared_bytes;
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
        unfenced_.assign(shared_bytes / 16 + 1, 0);
        parked_.clear();
        for (NamedBarrier& barrier : named_) barrier = NamedBarrier{};
        for (unsigned i = 0; i < threads_; ++i) start_fiber(i);
        current = nullptr;
        Fiber* first = next_ready();
        current = first;
        switch_context(scheduler_, first->context);
        if (finished_ != threads_) report_deadlock();
        if (!deferred_.empty()) fail("a block ends before its copies arrive");
        for (const NamedBarrier& barrier : named_)
            if (barrier.arrived != 0) fail("a block ends with a named barrier half used");
    }

    void start_fiber(unsigned i) {
        Fiber& fiber = fibers_[i];
        fiber.thread_index = {i % block.x, i / block.x % block.y, i / (block.x * block.y)};
        fiber.lane = i % 32;
        fiber.warp = i / 32;
        fiber.copies.clear();
        fiber.products.clear();
        fiber.product_fence = false;
        fiber.reductions.clear();
        fiber.written.clear();
        prepare_context(fiber.context, stacks_ + i * STACK_PITCH + GUARD, STACK, &Machine::enter);
        ready_.push_back(&fiber);
    }

    static void enter();

    void finish_fiber() {
        if (!current->products.empty()) fail("a thread ends before its products are waited for");
        // Sums in global memory outlive the block; pending reads of shared memory do not.
        for (PendingReduction& reduction : current->reductions) {
            if (reduction.elements.empty()) fail("a thread ends before its reductions are read");
            for (size_t i = 0; i < reduction.elements.size(); ++i)
                reduction.target[i] += reduction.elements[i];
        }
        ++finished_;
        leave(current);
    }

    Fiber* next_ready() {
        if (random_ != 0) {
            if (draw() % 1024 == 0) choose_lagging();
            if (!deferred_.empty() && draw() % 64 == 0) work_on(draw() % deferred_.size());
            std::swap(ready_[draw_ready()], ready_[ready_head_]);
        }
        Fiber* next = ready_[ready_head_++];
        if (ready_head_ == ready_.size()) {
            ready_.clear();
            ready_head_ = 0;
        }
        return next;
    }

    unsigned draw() {
        random_ = random_ * 1664525u + 1013904223u;
        return random_ >> 8;
    }

    // A thread that is ready; threads of lagging warps only if few others are.
    size_t draw_ready() {
        size_t index = ready_head_;
        for (int tries = 0; tries < 16; ++tries) {
            index = ready_head_ + draw() % (ready_.size() - ready_head_);
            if ((lagging_ >> ready_[index]->warp & 1) == 0) break;
        }
        return index;
    }

    // For some time one warp, four neighbours, random warps or no warps lag behind.
    void choose_lagging() {
        unsigned warp = draw() % 32, kind = draw() % 4;
        if (kind == 0) lagging_ = 1u << warp;
        if (kind == 1) lagging_ = 0xfu << warp / 4 * 4;
        if (kind == 2) lagging_ = draw();
        if (kind == 3) lagging_ = 0;
    }

    void work_on(size_t index) {
        std::function<void()> work = std::move(deferred_[index]);
        deferred_.erase(deferred_.begin() + index);
        work();
    }

    // Switches to another fiber, or back to run_block if no fiber can continue.
    void leave(Fiber* self) {
        while (ready_.empty() && !deferred_.empty()) work_on(0);
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
                     "%zu wait at __syncthreads, %zu in warp collectives, %zu for an mbarrier\n",
                     block_index.x, block_index.y, block_index.z, threads_, finished_,
                     block_barrier_.waiting.size(), in_warps, parked_.size());
        for (unsigned id = 0; id < NAMED_BARRIERS; ++id)
            if (named_[id].arrived != 0)
                std::fprintf(stderr, "  named barrier %u: %u of %u arrived\n", id,
                             named_[id].arrived, named_[id].expected);
        std::abort();
    }

    unsigned threads_ = 0, finished_ = 0, random_ = 0, lagging_ = 0;
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
    size_t shared_bytes_ = 0;
    std::vector<unsigned char> unfenced_;
    std::deque<std::function<void()>> deferred_;
    std::vector<Fiber*> parked_;
    NamedBarrier named_[NAMED_BARRIERS];
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

}  // namespace emulated
