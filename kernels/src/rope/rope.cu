// One pass over a token's queries and keys: the router reads the queries' norms, then queries and
// keys turn. A block for each token.
#include "../cuda/operators.cuh"

namespace rope {

// The tables of a routing, [tokens, routed]; `selected` is null where nothing is routed.
struct Routing {
    double* norms;
    float* gates;
    double* inv_std;
    uint8_t* selected;
    // Tokens that selected each routed head.
    uint32_t* counts;
    // Of ranks that share the heads: the columns of `selected` that are held here.
    uint8_t* held_selected;
    uint64_t tokens;
    uint32_t shared_heads;
    uint32_t routed;
    uint32_t top_k;
    // Shared heads that are held here, and which heads those are (ranks.rs, `Heads`).
    uint32_t held_shared;
    uint32_t group_size;
    uint32_t rank;
    uint32_t ranks;
    uint32_t padding;

    // Among the routed heads, the number of head `head` of those held here.
    __device__ __forceinline__ uint32_t number(uint32_t head) const {
        const uint32_t group = head / group_size * ranks + rank;
        return group * group_size + head % group_size - shared_heads;
    }
};

struct Parameters {
    // Forward: rotated in place. Backward: what forward left.
    void* qkv;
    // Backward alone: turned back in place.
    void* d_qkv;
    const float* cos;
    const float* sin;
    // Backward alone: <dO, O>, [tokens, heads], or null.
    const float* delta;
    // The same of all heads, [tokens, routed], for ranks that share them; null otherwise.
    double* deltas;
    uint64_t first_position;
    uint64_t length;
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t head_dim;
    float balance_weight;
    Routing routing;
};

template <class T>
__device__ double squared_norm(const T* head, uint32_t head_dim) {
    double sum = 0.0;
    for (uint32_t i = threadIdx.x % 32; i < head_dim; i += 32) {
        const double x = to_float(head[i]);
        sum += x * x;
    }
    for (int offset = 16; offset > 0; offset /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    }
    return sum;
}

// Whether head `head` is among the `top_k` largest squares, lower heads first among equals.
__device__ __forceinline__ bool selects(const double* squares, const Routing& r, uint32_t head) {
    uint32_t ahead = 0;
    for (uint32_t other = 0; other < r.routed; other++) {
        const double difference = squares[other] - squares[head];
        ahead += difference > 0.0 || (difference == 0.0 && other < head);
    }
    return ahead < r.top_k;
}

// Mean of a token's norms.
__device__ __forceinline__ double mean_of(const double* norms, uint32_t count) {
    double sum = 0.0;
    for (uint32_t i = 0; i < count; i++) {
        sum += norms[i];
    }
    return sum / count;
}

// 1 / (unbiased standard deviation), 0 where all norms are equal.
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

// Writes the squares of the queries that are held here to their places among those of all heads.
template <class T>
__device__ void measure(const Parameters& p, const T* row, double* squares) {
    const Routing& r = p.routing;
    for (uint32_t head = r.held_shared + threadIdx.x / 32; head < p.heads; head += THREADS / 32) {
        const double square = squared_norm(row + uint64_t(head) * p.head_dim, p.head_dim);
        if (threadIdx.x % 32 == 0) {
            squares[r.number(head)] = square;
        }
    }
}

// As `measure`, for ranks that add up their tables before the tokens choose.
template <class T>
__device__ void squares(const Parameters& p) {
    const uint64_t row_length = uint64_t(p.heads + 2 * p.kv_heads) * p.head_dim;
    const T* row = static_cast<const T*>(p.qkv) + blockIdx.x * row_length;
    measure(p, row, p.routing.norms + uint64_t(blockIdx.x) * p.routing.routed);
}

// Routes the token: norms, selection, gates. `squares` has room for three numbers a routed head.
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
            squares[head] = r.norms[table + head];
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
        r.norms[table + head] = norms[head];
        r.gates[table + head] = float(exponentials[head] / sum);
        r.selected[table + head] = selects(squares, r, head);
    }
    const uint64_t held_table = uint64_t(blockIdx.x) * (p.heads - r.held_shared);
    for (uint32_t i = threadIdx.x; r.ranks > 1 && i < p.heads - r.held_shared; i += THREADS) {
        r.held_selected[held_table + i] = selects(squares, r, r.number(r.held_shared + i));
    }
    if (threadIdx.x == 0) {
        r.inv_std[blockIdx.x] = inv_std;
    }
    __syncthreads();  // The queries have been read.
}

// Turns the token's queries and keys, N pairs of numbers at a time.
template <class T, int N>
__device__ void turn(const Parameters& p, T* row) {
    const uint32_t half = p.head_dim / 2, packs_of_half = half / N;
    const uint64_t angles = (p.first_position + blockIdx.x % p.length) * packs_of_half;
    for (uint32_t i = threadIdx.x; i < (p.heads + p.kv_heads) * packs_of_half; i += THREADS) {
        const uint32_t place = i % packs_of_half;
        Pack<T, N>* lows = packs<N>(row + (i / packs_of_half) * p.head_dim);
        Pack<T, N>* highs = lows + packs_of_half;
        const Pack<float, N> cos = packs<N>(p.cos)[angles + place];
        const Pack<float, N> sin = packs<N>(p.sin)[angles + place];
        Pack<T, N> low = lows[place], high = highs[place];
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float a = to_float(low.at[j]), b = to_float(high.at[j]);
            low.at[j] = from_float<T>(a * cos.at[j] - b * sin.at[j]);
            high.at[j] = from_float<T>(b * cos.at[j] + a * sin.at[j]);
        }
        lows[place] = low;
        highs[place] = high;
    }
}

// Whether the halves of heads and the angles can be read 16 bytes at a time.
template <class T>
__device__ __forceinline__ bool turns_wide(const Parameters& p) {
    return wide<T>(p.head_dim / 2, p.qkv) && aligned(p.d_qkv) && aligned(p.cos) && aligned(p.sin);
}

template <class T>
__device__ void forward(const Parameters& p) {
    DYNAMIC_SHARED(shared);
    const uint64_t row_length = uint64_t(p.heads + 2 * p.kv_heads) * p.head_dim;
    T* row = static_cast<T*>(p.qkv) + blockIdx.x * row_length;
    if (p.routing.selected) {
        route(p, row, reinterpret_cast<double*>(shared));
    }
    if (turns_wide<T>(p)) {
        turn<T, WIDE<T>>(p, row);
    } else {
        turn<T, 1>(p, row);
    }
}

// The gradient of the token's norms, over the norms themselves, into `factors`: what a query is
// multiplied by. Formulas as in the CPU's body (`gates_to_norms`). `gradient` has room for a number
// a routed head.
__device__ __forceinline__ void norm_factors(const Parameters& p, double* gradient,
                                             double* factors) {
    const Routing& r = p.routing;
    const uint64_t token = blockIdx.x, table = token * r.routed;
    const double* norms = r.norms + table;
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
    const double inv_std = r.inv_std[token], mean = mean_of(norms, r.routed);
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

// Turns the gradients of the token's queries and keys back, N pairs at a time, those of routed
// queries after `factors` times the query is added, where there are any.
template <class T, int N>
__device__ void turn_back(const Parameters& p, const T* row, T* d_row, const double* factors) {
    const uint32_t half = p.head_dim / 2, packs_of_half = half / N;
    const uint64_t angles = (p.first_position + blockIdx.x % p.length) * packs_of_half;
    for (uint32_t i = threadIdx.x; i < (p.heads + p.kv_heads) * packs_of_half; i += THREADS) {
        const uint32_t head = i / packs_of_half, place = i % packs_of_half;
        Pack<T, N>* lows = packs<N>(d_row + head * p.head_dim);
        Pack<T, N>* highs = lows + packs_of_half;
        const Pack<float, N> cos = packs<N>(p.cos)[angles + place];
        const Pack<float, N> sin = packs<N>(p.sin)[angles + place];
        Pack<T, N> low = lows[place], high = highs[place], query_low{}, query_high{};
        float factor = 0.0f;
        if (factors && head >= p.routing.held_shared && head < p.heads) {
            factor = float(factors[p.routing.number(head)]);
            query_low = packs<N>(row + head * p.head_dim)[place];
            query_high = packs<N>(row + head * p.head_dim)[packs_of_half + place];
        }
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float a = to_float(low.at[j]) + factor * to_float(query_low.at[j]);
            const float b = to_float(high.at[j]) + factor * to_float(query_high.at[j]);
            low.at[j] = from_float<T>(a * cos.at[j] + b * sin.at[j]);
            high.at[j] = from_float<T>(b * cos.at[j] - a * sin.at[j]);
        }
        lows[place] = low;
        highs[place] = high;
    }
}

// A rotation keeps norms, so the router's gradient is added in rotated coordinates.
template <class T>
__device__ void backward(const Parameters& p) {
    DYNAMIC_SHARED(shared);
    double* factors = nullptr;
    if (p.routing.selected) {
        factors = reinterpret_cast<double*>(shared);
        norm_factors(p, factors + p.routing.routed, factors);
    }
    const uint64_t row_length = uint64_t(p.heads + 2 * p.kv_heads) * p.head_dim;
    const T* row = static_cast<const T*>(p.qkv) + blockIdx.x * row_length;
    T* d_row = static_cast<T*>(p.d_qkv) + blockIdx.x * row_length;
    if (turns_wide<T>(p)) {
        turn_back<T, WIDE<T>>(p, row, d_row, factors);
    } else {
        turn_back<T, 1>(p, row, d_row, factors);
    }
}

// Writes the gradients of the weights of the heads that are held here to their places among those
// of all heads.
__device__ __forceinline__ void spread(const Parameters& p) {
    const Routing& r = p.routing;
    const uint64_t token = blockIdx.x, table = token * r.routed;
    for (uint32_t head = r.held_shared + threadIdx.x; head < p.heads; head += THREADS) {
        const uint32_t number = r.number(head);
        if (r.selected[table + number]) {
            p.deltas[table + number] = p.delta[token * p.heads + head];
        }
    }
}

// Block i counts the tokens that selected routed head i.
__device__ __forceinline__ void count_selected(const Routing& r) {
    int count = 0;
    for (uint64_t token = threadIdx.x; token < r.tokens; token += THREADS) {
        count += r.selected[token * r.routed + blockIdx.x];
    }
    count = block_sum(count);
    if (threadIdx.x == 0) {
        r.counts[blockIdx.x] = count;
    }
}

struct Balance {
    // f_i P_i, one for each routed head.
    double* products;
    Routing routing;
};

// Block i: the share of tokens that selected routed head i, times its mean gate.
__device__ __forceinline__ void balance(const Balance& p) {
    const Routing& r = p.routing;
    double sum = 0.0;
    for (uint64_t token = threadIdx.x; token < r.tokens; token += THREADS) {
        sum += r.gates[token * r.routed + blockIdx.x];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        const double tokens = r.tokens;
        p.products[blockIdx.x] = r.counts[blockIdx.x] / tokens * (sum / tokens);
    }
}

}  // namespace rope

EXPORT(rope_route_forward_f32, rope::forward<float>, rope::Parameters)
EXPORT(rope_route_forward_bf16, rope::forward<bf16>, rope::Parameters)
EXPORT(rope_route_backward_f32, rope::backward<float>, rope::Parameters)
EXPORT(rope_route_backward_bf16, rope::backward<bf16>, rope::Parameters)
EXPORT(router_squares_f32, rope::squares<float>, rope::Parameters)
EXPORT(router_squares_bf16, rope::squares<bf16>, rope::Parameters)
EXPORT(router_spread, rope::spread, rope::Parameters)
EXPORT(router_count_selected, rope::count_selected, rope::Routing)
EXPORT(router_balance, rope::balance, rope::Balance)
