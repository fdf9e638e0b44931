// The operators that all routers share: counts, local columns and the balance loss.
#include "routing.cuh"

namespace router {

// Block i counts the tokens that selected the head of column i.
__device__ __forceinline__ void count_selected(const Routing& r) {
    int count = 0;
    for (uint64_t token = threadIdx.x; token < r.tokens; token += THREADS) {
        count += r.selected[token * r.columns + blockIdx.x];
    }
    count = block_sum(count);
    if (threadIdx.x == 0) {
        r.counts[blockIdx.x] = count;
    }
}

// Copies the columns of the local heads of a token's row of `selected`.
__device__ __forceinline__ void select_local(const Routing& r) {
    const uint64_t token = blockIdx.x;
    const uint32_t count = r.local_heads - r.local_leading;
    for (uint32_t i = threadIdx.x; i < count; i += THREADS) {
        const uint32_t column = r.column(r.local_leading + i);
        r.local_selected[token * count + i] = r.selected[token * r.columns + column];
    }
}

struct PARAMETERS Shared {
    Routing routing;
    // Bit i % 64 of word i / 64 is 1 if the head of column i is shared.
    uint64_t shared[4];
};

// Selects only the shared heads, without gates.
__device__ __forceinline__ void to_shared(const Shared& p) {
    const Routing& r = p.routing;
    for (uint64_t i = global_thread(); i < r.tokens * r.columns; i += global_threads()) {
        const uint32_t column = i % r.columns;
        r.selected[i] = column < 256 && (p.shared[column / 64] >> column % 64 & 1);
        r.gates[i] = 0.0f;
    }
}

struct PARAMETERS Balance {
    // f_i P_i, one element for each column.
    double* products;
    Routing routing;
};

// Block i computes the share of tokens that selected the head of column i, times its mean gate.
__device__ __forceinline__ void balance(const Balance& p) {
    const Routing& r = p.routing;
    double sum = 0.0;
    for (uint64_t token = threadIdx.x; token < r.tokens; token += THREADS) {
        sum += r.gates[token * r.columns + blockIdx.x];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        const double tokens = r.tokens;
        p.products[blockIdx.x] = r.counts[blockIdx.x] / tokens * (sum / tokens);
    }
}

}  // namespace router

EXPORT(router_count_selected, router::count_selected, router::Routing)
EXPORT(router_select_local, router::select_local, router::Routing)
EXPORT(router_to_shared, router::to_shared, router::Shared)
EXPORT(router_balance, router::balance, router::Balance)
