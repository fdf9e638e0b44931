// The query-norm router: norms of a token's queries, the selection, gates, and their gradients, with
// a block for two tokens. With a rotation, one pass over the queries also applies RoPE.
//
// A team of threads reads a head, 16 bytes each. One warp routes a token, which takes about as long
// as a read of memory; meanwhile the other warps rotate the heads that it does not concern.
#include "../../rope/rope.cuh"
#include "../routing.cuh"

namespace query_norm {

using router::Routing;

// Tokens of a block, as in router/query_norm/cuda.rs.
constexpr uint32_t TOKENS = 2;
constexpr uint32_t WARPS = THREADS / 32;
// The square and the norm of a shared head; those of others are not negative.
constexpr double SHARED = -1.0;

struct PARAMETERS Parameters {
    // Forward: rotated in place if there is a rotation. Backward: the output of forward.
    void* qkv;
    // Backward only: added to, then rotated back in place if there is a rotation.
    void* d_qkv;
    // Backward only: <dO, O>, [tokens, heads], or null.
    const float* delta;
    // The same for all heads with a column, [tokens, columns], if ranks share the heads; null
    // otherwise.
    double* deltas;
    // Norms of the queries, [tokens, columns]; their squares until the ranks have summed them; SHARED
    // for shared heads.
    double* norms;
    // 1 / std of a token's norms, 0 if they are all equal; [tokens].
    double* inv_std;
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t head_dim;
    uint32_t top_k;
    float balance_weight;
    uint32_t padding;
    router::Routing routing;
    // Bit i % 64 of word i / 64 is 1 if the head of column i is shared.
    uint64_t shared[4];
    // The rotation of qkv or d_qkv; its `qkv` is null if there is none.
    rope::Parameters rope;

    __device__ __forceinline__ bool is_shared(uint32_t column) const {
        return column < 256 && (shared[column / 64] >> column % 64 & 1);
    }

    __device__ __forceinline__ uint64_t row_length() const {
        return uint64_t(heads + 2 * kv_heads) * head_dim;
    }
};

// The block's tokens.
struct Tokens {
    uint64_t first;
    uint32_t count;
    // Position of the first token in its sequence.
    uint32_t position;

    __device__ __forceinline__ explicit Tokens(const Parameters& p) {
        first = uint64_t(blockIdx.x) * TOKENS;
        count = p.routing.tokens - first < TOKENS ? p.routing.tokens - first : TOKENS;
        // The grid's limit keeps tokens below 2^32.
        position = p.rope.qkv ? uint32_t(first) % uint32_t(p.rope.length) : 0;
    }
};

// Teams of the threads of some warps: a team works on one head at a time, a pack of the low half and
// one of the high half in each thread.
struct Teams {
    // Threads of a team, a power of two; this thread's number in it.
    uint32_t size, thread;
    // Teams of all warps; the number of the warp's first team, and of this one from there.
    uint32_t count, first, in_warp;

    // Warps from `first_warp` on.
    __device__ __forceinline__ Teams(uint32_t packs_of_half, uint32_t first_warp) {
        size = 32;
        while (size > packs_of_half) {
            size /= 2;
        }
        thread = threadIdx.x % size;
        count = (WARPS - first_warp) * (32 / size);
        first = (threadIdx.x / 32 - first_warp) * (32 / size);
        in_warp = threadIdx.x % 32 / size;
    }

    // The sum of `value` over the team's threads, in a fixed order. All threads of the warp call it.
    __device__ __forceinline__ double sum(double value) const {
        for (uint32_t bits = 1; bits < size; bits *= 2) {
            value += __shfl_xor_sync(ALL_LANES, value, bits);
        }
        return value;
    }
};

// One of the block's heads, and where its packs of N elements are.
template <int N>
struct Head {
    // Number of the token in the block, and of the head among those of a token.
    uint32_t token, number;
    uint32_t packs_of_half;
    // Index of the head's first element, and of the first angle's pack.
    uint64_t start, angles;

    // Of `heads` heads of each token, the one at `index`; from `skips` on they are `skipped` further.
    __device__ __forceinline__ Head(const Parameters& p, const Tokens& tokens, uint32_t index,
                                    uint32_t heads, uint32_t skips, uint32_t skipped) {
        token = 0;
        number = index;
        uint32_t position = tokens.position;
        // Without divisions, which would take as long as the rotation.
#pragma unroll
        for (uint32_t other = 1; other < TOKENS; other++) {
            if (number >= heads) {
                number -= heads;
                token++;
                position = position + 1 < p.rope.length ? position + 1 : 0;
            }
        }
        number += number < skips ? 0 : skipped;
        packs_of_half = p.head_dim / 2 / N;
        start = (tokens.first + token) * p.row_length() + number * p.head_dim;
        angles = (p.rope.first_position + position) * packs_of_half;
    }
};

// The angles of N pairs, if there is a rotation.
template <int N>
struct Angles {
    Pack<float, N> cos, sin;

    __device__ __forceinline__ Angles(const Parameters& p, uint64_t index) {
        if (p.rope.qkv) {
            cos = packs<N>(p.rope.cos)[index];
            sin = packs<N>(p.rope.sin)[index];
        }
    }
};

// Rotates N pairs; back if DIRECTION is -1.
template <int DIRECTION, class T, int N>
__device__ __forceinline__ void rotate(const Angles<N>& by, Pack<T, N>& low, Pack<T, N>& high) {
#pragma unroll
    for (int j = 0; j < N; j++) {
        const float2 pair = rope::rotated(to_float(low.at[j]), to_float(high.at[j]), by.cos.at[j],
                                         DIRECTION * by.sin.at[j]);
        low.at[j] = from_float<T>(pair.x);
        high.at[j] = from_float<T>(pair.y);
    }
}

// Rotates the heads of `elements` but the queries from `first_column` on, by the warps from
// `first_warp` on.
template <int DIRECTION, class T, int N>
__device__ void rotate_others(const Parameters& p, const Tokens& tokens, T* elements,
                              uint32_t first_column, uint32_t first_warp) {
    const Teams teams(p.head_dim / 2 / N, first_warp);
    const uint32_t heads = first_column + p.kv_heads;
    for (uint32_t i = teams.first + teams.in_warp; i < heads * tokens.count; i += teams.count) {
        const Head<N> head(p, tokens, i, heads, first_column, p.heads - first_column);
        Pack<T, N>* lows = packs<N>(elements + head.start);
        Pack<T, N>* highs = lows + head.packs_of_half;
        for (uint32_t at = teams.thread; at < head.packs_of_half; at += teams.size) {
            Pack<T, N> low = lows[at], high = highs[at];
            rotate<DIRECTION>(Angles<N>(p, head.angles + at), low, high);
            lows[at] = low;
            highs[at] = high;
        }
    }
}

// Writes the squared norms of the local queries that have a column, and rotates the queries if
// `rotates`. The products are exact in f64; sums of those of bf16 elements are exact too unless the
// elements differ much, so that equal norms have equal squares.
template <class T, int N>
__device__ void measure(const Parameters& p, const Tokens& tokens, double* squares, bool rotates) {
    const Routing& r = p.routing;
    const Teams teams(p.head_dim / 2 / N, 0);
    const uint32_t heads = p.heads - r.local_leading, count = heads * tokens.count;
    for (uint32_t first = teams.first; first < count; first += teams.count) {
        const uint32_t i = first + teams.in_warp;
        const Head<N> head(p, tokens, i, heads, 0, r.local_leading);
        double sum = 0.0;
        if (i < count) {
            Pack<T, N>* lows = packs<N>(static_cast<T*>(p.qkv) + head.start);
            Pack<T, N>* highs = lows + head.packs_of_half;
            for (uint32_t at = teams.thread; at < head.packs_of_half; at += teams.size) {
                Pack<T, N> low = lows[at], high = highs[at];
                const Angles<N> angles(p, head.angles + at);
                double high_sum = 0.0;
#pragma unroll
                for (int j = 0; j < N; j++) {
                    const double a = to_float(low.at[j]), b = to_float(high.at[j]);
                    sum += a * a;
                    high_sum += b * b;
                }
                sum += high_sum;
                if (rotates) {
                    rotate<1>(angles, low, high);
                    lows[at] = low;
                    highs[at] = high;
                }
            }
        }
        sum = teams.sum(sum);
        if (i < count && teams.thread == 0) {
            const uint32_t column = r.column(head.number);
            squares[head.token * r.columns + column] = p.is_shared(column) ? SHARED : sum;
        }
    }
}

// Whether the halves of heads and the angles, if there are any, can be read 16 bytes at a time.
template <class T>
__device__ __forceinline__ bool reads_wide(const Parameters& p) {
    return wide<T>(p.head_dim / 2, p.qkv) && aligned(p.d_qkv) && aligned(p.rope.cos) &&
           aligned(p.rope.sin);
}

// Like `measure`, for ranks, which sum their tables before heads are selected.
template <class T>
__device__ void squares(const Parameters& p) {
    const Tokens tokens(p);
    double* squares = p.norms + tokens.first * p.routing.columns;
    if (reads_wide<T>(p)) {
        measure<T, WIDE<T>>(p, tokens, squares, false);
    } else {
        measure<T, 1>(p, tokens, squares, false);
    }
}

// Routes the token by a warp: norms, selection, gates. `values` are the squares of its columns; each
// thread replaces its own by what it needs next.
__device__ __forceinline__ void route(const Parameters& p, uint64_t token, double* values) {
    const Routing& r = p.routing;
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t table = token * r.columns;
    if (r.ranks > 1) {
        for (uint32_t head = lane; head < r.columns; head += 32) {
            values[head] = p.norms[table + head];
        }
        __syncwarp();
    }
    // The largest squares; among equals, lower heads first.
    for (uint32_t head = lane; head < r.columns; head += 32) {
        const double square = values[head];
        uint32_t ahead = 0;
#pragma unroll 4
        for (uint32_t other = 0; other < r.columns; other++) {
            const double rival = values[other];
            ahead += rival > square || (rival == square && other < head);
        }
        r.selected[table + head] = square < 0.0 || ahead < p.top_k;
    }
    __syncwarp();  // The squares have been compared.
    double sum = 0.0, smallest = INFINITY, largest = 0.0;
    for (uint32_t head = lane; head < r.columns; head += 32) {
        const bool shared = values[head] < 0.0;
        const double norm = shared ? SHARED : sqrt(values[head]);
        values[head] = norm;
        p.norms[table + head] = norm;
        sum += shared ? 0.0 : norm;
        smallest = !shared && norm < smallest ? norm : smallest;
        largest = norm > largest ? norm : largest;
    }
    sum = warp_sum(sum);
    for (int bits = 16; bits > 0; bits /= 2) {
        const double low = __shfl_xor_sync(ALL_LANES, smallest, bits);
        const double high = __shfl_xor_sync(ALL_LANES, largest, bits);
        smallest = low < smallest ? low : smallest;
        largest = high > largest ? high : largest;
    }
    const double mean = sum / r.routed;
    double squares = 0.0;
    for (uint32_t head = lane; head < r.columns; head += 32) {
        const double deviation = values[head] < 0.0 ? 0.0 : values[head] - mean;
        squares += deviation * deviation;
    }
    squares = warp_sum(squares);
    // The mean of equal norms may differ from them by a rounding.
    const double inv_std = smallest >= largest ? 0.0 : 1.0 / sqrt(squares / (r.routed - 1.0));
    double exponentials = 0.0;
    for (uint32_t head = lane; head < r.columns; head += 32) {
        values[head] = values[head] < 0.0 ? 0.0 : exp((values[head] - largest) * inv_std);
        exponentials += values[head];
    }
    exponentials = warp_sum(exponentials);
    for (uint32_t head = lane; head < r.columns; head += 32) {
        r.gates[table + head] = float(values[head] / exponentials);
    }
    if (lane == 0) {
        p.inv_std[token] = inv_std;
    }
}

// `values` has room for one element per token and column, here and in `backward_packs`.
template <class T, int N>
__device__ void forward_packs(const Parameters& p, double* values) {
    const Tokens tokens(p);
    const uint32_t warp = threadIdx.x / 32;
    const bool rotates = p.rope.qkv, measures = p.routing.ranks == 1;
    if (measures) {
        measure<T, N>(p, tokens, values, rotates);
        __syncthreads();
    }
    if (warp < tokens.count) {
        route(p, tokens.first + warp, values + warp * p.routing.columns);
    } else if (warp >= TOKENS && rotates) {
        const uint32_t first_column = measures ? p.routing.local_leading : p.heads;
        rotate_others<1, T, N>(p, tokens, static_cast<T*>(p.qkv), first_column, TOKENS);
    }
}

template <class T>
__device__ void forward(const Parameters& p) {
    DYNAMIC_SHARED(shared);
    double* values = reinterpret_cast<double*>(shared);
    if (reads_wide<T>(p)) {
        forward_packs<T, WIDE<T>>(p, values);
    } else {
        forward_packs<T, 1>(p, values);
    }
}

// Writes the gradient of each of the token's norms, divided by the norm, to `factors`: the factor
// of a query in its own gradient, 0 for a shared head. The formulas are those of `gates_to_norms` in
// cpu.rs. One warp computes them, each thread those of its own heads.
__device__ __forceinline__ void norm_factors(const Parameters& p, uint64_t token, double* factors) {
    const Routing& r = p.routing;
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t table = token * r.columns;
    const double* norms = p.norms + table;
    const float* gates = r.gates + table;
    const double inv_std = p.inv_std[token], weight = double(p.balance_weight) / double(r.tokens);
    double inner = 0.0, gate_sum = 0.0, norm_sum = 0.0, along = 0.0;
    for (uint32_t i = lane; i < r.columns; i += 32) {
        if (norms[i] < 0.0) {
            factors[i] = 0.0;
            continue;
        }
        double delta = 0.0;
        if (p.deltas) {
            delta = p.deltas[table + i];
        } else if (p.delta && r.selected[table + i]) {
            delta = p.delta[token * p.heads + r.leading + i];
        }
        // Fused explicitly, so that both sources of delta give the same bits.
        const double gradient = fma(weight, double(r.counts[i]) / double(r.tokens), delta);
        factors[i] = gradient;
        inner += double(gates[i]) * gradient;
        gate_sum += gates[i];
        norm_sum += norms[i];
    }
    inner = warp_sum(inner) / warp_sum(gate_sum);
    const double mean = warp_sum(norm_sum) / r.routed;
    for (uint32_t i = lane; i < r.columns; i += 32) {
        along += double(gates[i]) * (factors[i] - inner) * (norms[i] - mean) * inv_std;
    }
    const double pull = warp_sum(along) / (r.routed - 1.0);
    for (uint32_t i = lane; i < r.columns; i += 32) {
        const double d_score = double(gates[i]) * (factors[i] - inner);
        const double d_norm = (d_score - pull * (norms[i] - mean) * inv_std) * inv_std;
        factors[i] = norms[i] <= 0.0 ? 0.0 : d_norm / norms[i];
    }
}

// Adds each query that has a column times its factor to its gradient, then rotates the gradient back
// if there is a rotation. It preserves norms, so the factor is the same for the rotated and the
// unrotated query.
template <class T, int N>
__device__ void add_queries(const Parameters& p, const Tokens& tokens, const double* factors) {
    const Routing& r = p.routing;
    const Teams teams(p.head_dim / 2 / N, 0);
    const uint32_t heads = p.heads - r.local_leading;
    for (uint32_t i = teams.first + teams.in_warp; i < heads * tokens.count; i += teams.count) {
        const Head<N> head(p, tokens, i, heads, 0, r.local_leading);
        const float factor = float(factors[head.token * r.columns + r.column(head.number)]);
        const Pack<T, N>* queries = packs<N>(static_cast<const T*>(p.qkv) + head.start);
        Pack<T, N>* lows = packs<N>(static_cast<T*>(p.d_qkv) + head.start);
        Pack<T, N>* highs = lows + head.packs_of_half;
        for (uint32_t at = teams.thread; at < head.packs_of_half; at += teams.size) {
            const Pack<T, N> query_low = queries[at], query_high = queries[head.packs_of_half + at];
            Pack<T, N> low = lows[at], high = highs[at];
            const Angles<N> angles(p, head.angles + at);
#pragma unroll
            for (int j = 0; j < N; j++) {
                const float a = fmaf(factor, to_float(query_low.at[j]), to_float(low.at[j]));
                const float b = fmaf(factor, to_float(query_high.at[j]), to_float(high.at[j]));
                float2 pair = make_float2(a, b);
                if (p.rope.qkv) {
                    pair = rope::rotated(a, b, angles.cos.at[j], -angles.sin.at[j]);
                }
                low.at[j] = from_float<T>(pair.x);
                high.at[j] = from_float<T>(pair.y);
            }
            lows[at] = low;
            highs[at] = high;
        }
    }
}

template <class T, int N>
__device__ void backward_packs(const Parameters& p, double* factors) {
    const Tokens tokens(p);
    const uint32_t warp = threadIdx.x / 32;
    if (warp < tokens.count) {
        norm_factors(p, tokens.first + warp, factors + warp * p.routing.columns);
    } else if (warp >= TOKENS && p.rope.qkv) {
        rotate_others<-1, T, N>(p, tokens, static_cast<T*>(p.d_qkv), p.routing.local_leading,
                                TOKENS);
    }
    __syncthreads();
    add_queries<T, N>(p, tokens, factors);
}

template <class T>
__device__ void backward(const Parameters& p) {
    DYNAMIC_SHARED(shared);
    double* factors = reinterpret_cast<double*>(shared);
    if (reads_wide<T>(p)) {
        backward_packs<T, WIDE<T>>(p, factors);
    } else {
        backward_packs<T, 1>(p, factors);
    }
}

// Writes the gradients of the local heads' weights to their columns.
__device__ __forceinline__ void spread(const Parameters& p) {
    const Routing& r = p.routing;
    const uint64_t token = blockIdx.x, table = token * r.columns;
    for (uint32_t head = r.local_leading + threadIdx.x; head < p.heads; head += THREADS) {
        const uint32_t column = r.column(head);
        if (r.selected[table + column]) {
            p.deltas[table + column] = p.delta[token * p.heads + head];
        }
    }
}

}  // namespace query_norm

EXPORT_BLOCKS(THREADS, 4, query_norm_forward_f32, query_norm::forward<float>,
              query_norm::Parameters)
EXPORT_BLOCKS(THREADS, 4, query_norm_forward_bf16, query_norm::forward<bf16>,
              query_norm::Parameters)
EXPORT_BLOCKS(THREADS, 4, query_norm_backward_f32, query_norm::backward<float>,
              query_norm::Parameters)
EXPORT_BLOCKS(THREADS, 4, query_norm_backward_bf16, query_norm::backward<bf16>,
              query_norm::Parameters)
EXPORT(query_norm_squares_f32, query_norm::squares<float>, query_norm::Parameters)
EXPORT(query_norm_squares_bf16, query_norm::squares<bf16>, query_norm::Parameters)
EXPORT(query_norm_spread, query_norm::spread, query_norm::Parameters)
