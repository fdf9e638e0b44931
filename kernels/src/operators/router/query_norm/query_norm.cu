// Routers by norms of queries, with a block for two tokens. With a rotation, one pass over the queries
// also applies RoPE. A type for each router defines how a warp routes a token and
// computes the gradients of its norms.
//
// One warp routes a token, which takes about as long as a read of memory. Meanwhile the other warps
// rotate the heads that routing does not need.
#include "groups.cuh"
#include "heads.cuh"

namespace query_norm {

// `values` has room for one element per token and column, here and in `backward_packs`.
template <class By, class T, int N>
__device__ void forward_packs(const Parameters& p, double* values) {
    const Tokens tokens(p);
    const uint32_t warp = threadIdx.x / 32;
    const bool rotates = p.rope.qkv, measures = p.routing.ranks == 1;
    if (measures) {
        measure<T, N>(p, tokens, values, rotates);
        __syncthreads();
    }
    if (warp < tokens.count) {
        By::route(p, tokens.first + warp, values + warp * p.routing.columns);
    } else if (warp >= TOKENS && rotates) {
        const uint32_t first_column = measures ? p.routing.local_leading : p.heads;
        rotate_others<1, T, N>(p, tokens, static_cast<T*>(p.qkv), first_column, TOKENS);
    }
}

template <class By, class T>
__device__ void forward(const Parameters& p) {
    DYNAMIC_SHARED(shared);
    double* values = reinterpret_cast<double*>(shared);
    if (reads_wide<T>(p)) {
        forward_packs<By, T, WIDE<T>>(p, values);
    } else {
        forward_packs<By, T, 1>(p, values);
    }
}

// Adds each query that has a column, times its factor, to its gradient, and rotates the gradient back
// if the pass rotates. A rotation preserves norms, so the factor is the same for the rotated and the
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

template <class By, class T, int N>
__device__ void backward_packs(const Parameters& p, double* factors) {
    const Tokens tokens(p);
    const uint32_t warp = threadIdx.x / 32;
    if (warp < tokens.count) {
        By::norm_factors(p, tokens.first + warp, factors + warp * p.routing.columns);
    } else if (warp >= TOKENS && p.rope.qkv) {
        rotate_others<-1, T, N>(p, tokens, static_cast<T*>(p.d_qkv), p.routing.local_leading,
                                TOKENS);
    }
    __syncthreads();
    add_queries<T, N>(p, tokens, factors);
}

template <class By, class T>
__device__ void backward(const Parameters& p) {
    DYNAMIC_SHARED(shared);
    double* factors = reinterpret_cast<double*>(shared);
    if (reads_wide<T>(p)) {
        backward_packs<By, T, WIDE<T>>(p, factors);
    } else {
        backward_packs<By, T, 1>(p, factors);
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

#define EXPORT_ROUTER(name, By)                                                             \
    EXPORT_BLOCKS(THREADS, 4, name##_forward_f32, (query_norm::forward<query_norm::By, float>), \
                  query_norm::Parameters)                                                   \
    EXPORT_BLOCKS(THREADS, 4, name##_forward_bf16, (query_norm::forward<query_norm::By, bf16>), \
                  query_norm::Parameters)                                                   \
    EXPORT_BLOCKS(THREADS, 4, name##_backward_f32, (query_norm::backward<query_norm::By, float>), \
                  query_norm::Parameters)                                                   \
    EXPORT_BLOCKS(THREADS, 4, name##_backward_bf16, (query_norm::backward<query_norm::By, bf16>), \
                  query_norm::Parameters)

EXPORT_ROUTER(query_norm, Heads)
EXPORT_ROUTER(group_norm, Groups)
EXPORT(query_norm_squares_f32, query_norm::squares<float>, query_norm::Parameters)
EXPORT(query_norm_squares_bf16, query_norm::squares<bf16>, query_norm::Parameters)
EXPORT(query_norm_spread, query_norm::spread, query_norm::Parameters)
