// The query-norm router: norms of a token's queries, the selection, gates, and their gradients,
// with one block per token. With a rotation, one pass over the queries also applies RoPE.
#include "../../rope/rope.cuh"
#include "../routing.cuh"

namespace query_norm {

using router::Routing;

struct Parameters {
    // Forward: rotated in place if there is a rotation. Backward: the output of forward.
    void* qkv;
    // Backward only: added to, then rotated back in place if there is a rotation.
    void* d_qkv;
    // Backward only: <dO, O>, [tokens, heads], or null.
    const float* delta;
    // The same for all routed heads, [tokens, routed], if ranks share the heads; null otherwise.
    double* deltas;
    // Norms of all routed queries, [tokens, routed]; their squares until the ranks have summed
    // them.
    double* norms;
    // 1 / std of a token's norms, 0 if they are all equal; [tokens].
    double* inv_std;
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t head_dim;
    uint32_t top_k;
    float balance_weight;
    uint32_t padding;
    Routing routing;
    // The rotation of qkv or d_qkv; its `qkv` is null if there is none.
    rope::Parameters rope;

    __device__ __forceinline__ uint64_t row_length() const {
        return uint64_t(heads + 2 * kv_heads) * head_dim;
    }
};
static_assert(sizeof(Parameters) == 200 && offsetof(Parameters, qkv) == 0 &&
              offsetof(Parameters, d_qkv) == 8 && offsetof(Parameters, delta) == 16 &&
              offsetof(Parameters, deltas) == 24 && offsetof(Parameters, norms) == 32 &&
              offsetof(Parameters, inv_std) == 40 && offsetof(Parameters, heads) == 48 &&
              offsetof(Parameters, kv_heads) == 52 && offsetof(Parameters, head_dim) == 56 &&
              offsetof(Parameters, top_k) == 60 && offsetof(Parameters, balance_weight) == 64 &&
              offsetof(Parameters, padding) == 68 && offsetof(Parameters, routing) == 72 &&
              offsetof(Parameters, rope) == 144,
              "as in router/query_norm/cuda.rs");

template <class T>
__device__ double squared_norm(const T* head, uint32_t head_dim) {
    double sum = 0.0;
    for (uint32_t i = threadIdx.x % 32; i < head_dim; i += 32) {
        const double x = to_float(head[i]);
        sum += x * x;
    }
    return warp_sum(sum);
}

// Whether head `head` is among the `top_k` largest squares; among equals, lower heads first.
__device__ __forceinline__ bool selects(const double* squares, const Parameters& p, uint32_t head) {
    uint32_t ahead = 0;
    for (uint32_t other = 0; other < p.routing.routed; other++) {
        const double difference = squares[other] - squares[head];
        ahead += difference > 0.0 || (difference == 0.0 && other < head);
    }
    return ahead < p.top_k;
}

// The mean of a token's norms.
__device__ __forceinline__ double mean_of(const double* norms, uint32_t count) {
    double sum = 0.0;
    for (uint32_t i = 0; i < count; i++) {
        sum += norms[i];
    }
    return sum / count;
}

// 1 / (unbiased standard deviation), or 0 if all norms are equal.
__device__ __forceinline__ double inverse_deviation(const double* norms, uint32_t count) {
    const double mean = mean_of(norms, count);
    double squares = 0.0;
    bool equal = true;
    for (uint32_t i = 0; i < count; i++) {
        squares += (norms[i] - mean) * (norms[i] - mean);
        equal = equal && norms[i] == norms[0];
    }
    return equal ? 0.0 : 1.0 / sqrt(squares / (count - 1.0));
}

// Writes the squared norms of the local queries to their indices among all routed heads.
template <class T>
__device__ void measure(const Parameters& p, const T* row, double* squares) {
    const Routing& r = p.routing;
    for (uint32_t head = r.local_shared + threadIdx.x / 32; head < p.heads; head += THREADS / 32) {
        const double square = squared_norm(row + uint64_t(head) * p.head_dim, p.head_dim);
        if (threadIdx.x % 32 == 0) {
            squares[r.index(head)] = square;
        }
    }
}

// Like `measure`, for ranks, which sum their tables before heads are selected.
template <class T>
__device__ void squares(const Parameters& p) {
    const T* row = static_cast<const T*>(p.qkv) + blockIdx.x * p.row_length();
    measure(p, row, p.norms + uint64_t(blockIdx.x) * p.routing.routed);
}

// Routes the token: norms, selection, gates. `squares` has room for three elements per routed head.
template <class T>
__device__ void route(const Parameters& p, const T* row, double* squares) {
    const Routing& r = p.routing;
    const uint64_t table = uint64_t(blockIdx.x) * r.routed;
    double* norms = squares + r.routed;
    double* exponentials = norms + r.routed;
    if (r.ranks == 1) {
        measure(p, row, squares);
    } else {
        for (uint32_t head = threadIdx.x; head < r.routed; head += THREADS) {
            squares[head] = p.norms[table + head];
        }
    }
    __syncthreads();
    for (uint32_t head = threadIdx.x; head < r.routed; head += THREADS) {
        norms[head] = sqrt(squares[head]);
    }
    __syncthreads();
    const double inv_std = inverse_deviation(norms, r.routed);
    double largest = 0.0;
    for (uint32_t head = 0; head < r.routed; head++) {
        largest = norms[head] > largest ? norms[head] : largest;
    }
    for (uint32_t head = threadIdx.x; head < r.routed; head += THREADS) {
        exponentials[head] = exp((norms[head] - largest) * inv_std);
    }
    __syncthreads();
    double sum = 0.0;
    for (uint32_t head = 0; head < r.routed; head++) {
        sum += exponentials[head];
    }
    for (uint32_t head = threadIdx.x; head < r.routed; head += THREADS) {
        p.norms[table + head] = norms[head];
        r.gates[table + head] = float(exponentials[head] / sum);
        r.selected[table + head] = selects(squares, p, head);
    }
    if (threadIdx.x == 0) {
        p.inv_std[blockIdx.x] = inv_std;
    }
    __syncthreads();  // The queries have been read.
}

template <class T>
__device__ void forward(const Parameters& p) {
    DYNAMIC_SHARED(shared);
    T* row = static_cast<T*>(p.qkv) + blockIdx.x * p.row_length();
    route(p, row, reinterpret_cast<double*>(shared));
    if (!p.rope.qkv) {
        return;
    }
    if (rope::rotates_wide<T>(p.rope)) {
        rope::rotate<T, WIDE<T>>(p.rope, row);
    } else {
        rope::rotate<T, 1>(p.rope, row);
    }
}

// Writes the gradient of each of the token's norms, divided by the norm, to `factors`: the factor
// of a query in its own gradient. The formulas are those of `gates_to_norms` in cpu.rs. `gradient`
// has room for one element per routed head.
__device__ __forceinline__ void norm_factors(const Parameters& p, double* gradient,
                                             double* factors) {
    const Routing& r = p.routing;
    const uint64_t token = blockIdx.x, table = token * r.routed;
    const double* norms = p.norms + table;
    const float* gates = r.gates + table;
    for (uint32_t i = threadIdx.x; i < r.routed; i += THREADS) {
        const double share = double(r.counts[i]) / double(r.tokens);
        gradient[i] = double(p.balance_weight) * share / double(r.tokens);
        if (p.deltas) {
            gradient[i] += p.deltas[table + i];
        } else if (p.delta && r.selected[table + i]) {
            gradient[i] += p.delta[token * p.heads + r.shared_heads + i];
        }
    }
    __syncthreads();
    const double inv_std = p.inv_std[token], mean = mean_of(norms, r.routed);
    double inner = 0.0, sum = 0.0, along = 0.0;
    for (uint32_t i = 0; i < r.routed; i++) {
        inner += double(gates[i]) * gradient[i];
        sum += gates[i];
    }
    inner /= sum;
    for (uint32_t i = 0; i < r.routed; i++) {
        along += double(gates[i]) * (gradient[i] - inner) * (norms[i] - mean) * inv_std;
    }
    const double pull = along / (r.routed - 1.0);
    for (uint32_t i = threadIdx.x; i < r.routed; i += THREADS) {
        const double d_score = double(gates[i]) * (gradient[i] - inner);
        const double d_norm = (d_score - pull * (norms[i] - mean) * inv_std) * inv_std;
        factors[i] = norms[i] == 0.0 ? 0.0 : d_norm / norms[i];
    }
    __syncthreads();
}

// The terms added to the gradients of the queries: each routed query times its factor.
struct Factors {
    const Parameters& p;
    const double* factors;

    __device__ __forceinline__ bool has(uint32_t head) const {
        return head >= p.routing.local_shared && head < p.heads;
    }
    __device__ __forceinline__ float factor(uint32_t head) const {
        return float(factors[p.routing.index(head)]);
    }
};

// Adds the router's gradient to the gradients of the queries, without a rotation.
template <class T>
__device__ void add(const Parameters& p, const T* row, T* d_row, const Factors& added) {
    for (uint32_t i = threadIdx.x; i < p.heads * p.head_dim; i += THREADS) {
        const uint32_t head = i / p.head_dim;
        if (added.has(head)) {
            d_row[i] = from_float<T>(to_float(d_row[i]) + added.factor(head) * to_float(row[i]));
        }
    }
}

template <class T>
__device__ void backward(const Parameters& p) {
    DYNAMIC_SHARED(shared);
    double* factors = reinterpret_cast<double*>(shared);
    norm_factors(p, factors + p.routing.routed, factors);
    const T* row = static_cast<const T*>(p.qkv) + blockIdx.x * p.row_length();
    T* d_row = static_cast<T*>(p.d_qkv) + blockIdx.x * p.row_length();
    const Factors added{p, factors};
    if (!p.rope.qkv) {
        add(p, row, d_row, added);
    } else if (rope::rotates_wide<T>(p.rope) && aligned(p.qkv)) {
        rope::rotate_back<T, WIDE<T>>(p.rope, d_row, row, added);
    } else {
        rope::rotate_back<T, 1>(p.rope, d_row, row, added);
    }
}

// Writes the gradients of the local heads' weights to their indices among all routed heads.
__device__ __forceinline__ void spread(const Parameters& p) {
    const Routing& r = p.routing;
    const uint64_t token = blockIdx.x, table = token * r.routed;
    for (uint32_t head = r.local_shared + threadIdx.x; head < p.heads; head += THREADS) {
        const uint32_t index = r.index(head);
        if (r.selected[table + index]) {
            p.deltas[table + index] = p.delta[token * p.heads + head];
        }
    }
}

}  // namespace query_norm

EXPORT(query_norm_forward_f32, query_norm::forward<float>, query_norm::Parameters)
EXPORT(query_norm_forward_bf16, query_norm::forward<bf16>, query_norm::Parameters)
EXPORT(query_norm_backward_f32, query_norm::backward<float>, query_norm::Parameters)
EXPORT(query_norm_backward_bf16, query_norm::backward<bf16>, query_norm::Parameters)
EXPORT(query_norm_squares_f32, query_norm::squares<float>, query_norm::Parameters)
EXPORT(query_norm_squares_bf16, query_norm::squares<bf16>, query_norm::Parameters)
EXPORT(query_norm_spread, query_norm::spread, query_norm::Parameters)
