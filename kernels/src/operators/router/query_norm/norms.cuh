// Norms of a token's queries, with a block for two tokens, and RoPE in the same pass.
//
// A team of threads reads a head, 16 bytes each.
#pragma once

#include "../../rope/rope.cuh"
#include "../routing.cuh"

namespace query_norm {

using router::Routing;

// Tokens of a block, as in router/query_norm/cuda.rs.
constexpr uint32_t TOKENS = 2;
constexpr uint32_t WARPS = THREADS / 32;
// The square and the norm of a shared head. Squares and norms of other heads are not negative.
constexpr double SHARED = -1.0;

struct PARAMETERS Parameters {
    // Forward: rotated in place if the pass rotates. Backward: the output of forward.
    void* qkv;
    // Backward only: added to, then rotated back in place if the pass rotates.
    void* d_qkv;
    // Backward only: <dO, O>, [tokens, heads], or null.
    const float* delta;
    // <dO, O> for all heads with a column, [tokens, columns], if ranks share the heads; null
    // otherwise.
    double* deltas;
    // Norms of the queries, [tokens, columns]; their squares until the ranks have summed them; SHARED
    // for shared heads.
    double* norms;
    // 1 / std of a token's norms, 0 if they are all equal; [tokens]. Unused if whole groups are
    // selected.
    double* inv_std;
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t head_dim;
    // Routed heads that a token selects.
    uint32_t top_k;
    float balance_weight;
    uint32_t padding;
    router::Routing routing;
    // Bit i % 64 of word i / 64 is 1 if the head of column i is shared.
    uint64_t shared[4];
    // The rotation of qkv or d_qkv; its `qkv` is null if the pass does not rotate.
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
        // The grid's limit keeps the number of tokens below 2^32.
        position = p.rope.qkv ? uint32_t(first) % uint32_t(p.rope.length) : 0;
    }
};

// Teams of the threads of some warps: a team works on one head at a time. Each thread has a pack of the low half
// and a pack of the high half.
struct Teams {
    // Threads of a team, a power of two; this thread's number in the team.
    uint32_t size, thread;
    // Teams of all warps; the number of the warp's first team; this team's number in the warp.
    uint32_t count, first, in_warp;

    // The teams of the warps from `first_warp` on.
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

    // The sum of `value` over the team's threads, in a fixed order. All threads of the warp call this method.
    __device__ __forceinline__ double sum(double value) const {
        for (uint32_t bits = 1; bits < size; bits *= 2) {
            value += __shfl_xor_sync(ALL_LANES, value, bits);
        }
        return value;
    }
};

// One of the block's heads, and the positions of its packs of N elements.
template <int N>
struct Head {
    // Number of the token in the block, and of the head in the token.
    uint32_t token, number;
    uint32_t packs_of_half;
    // Index of the head's first element, and of the first angle's pack.
    uint64_t start, angles;

    // The head at `index` among `heads` heads of each token; from `skips` on, head numbers are `skipped` larger.
    __device__ __forceinline__ Head(const Parameters& p, const Tokens& tokens, uint32_t index,
                                    uint32_t heads, uint32_t skips, uint32_t skipped) {
        token = 0;
        number = index;
        uint32_t position = tokens.position;
        // Without divisions, which would need as much time as the rotation.
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

// The angles of N pairs, if the pass rotates.
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

// Rotates N pairs; rotates back if DIRECTION is -1.
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

// Rotates the heads of `elements` except the queries from `first_column` on, by the warps from
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
// `rotates`. Products are exact in f64. Sums of bf16 products are also exact unless the
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

// Whether the halves of heads, and the angles if the pass rotates, can be read 16 bytes at a time.
template <class T>
__device__ __forceinline__ bool reads_wide(const Parameters& p) {
    return wide<T>(p.head_dim / 2, p.qkv) && aligned(p.d_qkv) && aligned(p.rope.cos) &&
           aligned(p.rope.sin);
}

// Like `measure`, for ranks that sum their tables before heads are selected.
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

// Reads the squares that the ranks have summed into `values`. A warp calls this function and the functions below.
__device__ __forceinline__ void load_summed(const Parameters& p, uint64_t token, double* values) {
    const Routing& r = p.routing;
    if (r.ranks > 1) {
        for (uint32_t head = threadIdx.x % 32; head < r.columns; head += 32) {
            values[head] = p.norms[token * r.columns + head];
        }
        __syncwarp();
    }
}

// Whether the square of a column selects its head: shared heads and the largest squares of the other heads; among
// equal squares, lower heads first.
__device__ __forceinline__ bool is_selected(const Parameters& p, const double* squares,
                                            uint32_t head) {
    const double square = squares[head];
    uint32_t ahead = 0;
#pragma unroll 4
    for (uint32_t other = 0; other < p.routing.columns; other++) {
        const double rival = squares[other];
        ahead += rival > square || (rival == square && other < head);
    }
    return square < 0.0 || ahead < p.top_k;
}

// The gradient of the gate of a routed head's column.
__device__ __forceinline__ double gate_gradient(const Parameters& p, uint64_t token, uint32_t i) {
    const Routing& r = p.routing;
    const uint64_t table = token * r.columns;
    double delta = 0.0;
    if (p.deltas) {
        delta = p.deltas[table + i];
    } else if (p.delta && r.selected[table + i]) {
        delta = p.delta[token * p.heads + r.leading + i];
    }
    // Fused explicitly, so that both sources of delta give the same bits.
    const double weight = double(p.balance_weight) / double(r.tokens);
    return fma(weight, double(r.counts[i]) / double(r.tokens), delta);
}

}  // namespace query_norm
