// Routers by logits: selection, gates, weights and the gradients of the logits. A warp computes a
// token, each thread some of the heads, in f64. mod.rs has the formulas.
#include "../routing.cuh"

namespace logits {

using router::Routing;

constexpr uint32_t WARPS = THREADS / 32;

struct PARAMETERS Parameters {
    // Forward: the logits, [tokens, logits]. Backward: their gradients, for `count` tokens starting at
    // `first`.
    void* logits;
    // Values of the logits of all ranks' heads; [tokens, logits].
    double* saved;
    // [tokens, local heads], or null.
    float* weights;
    // Backward only: <dO, O>, [tokens, local heads], or null.
    const float* delta;
    // <dO, O> for the last `exchanged` heads of the layer, if ranks share the heads; otherwise null.
    double* deltas;
    uint64_t first;
    uint64_t count;
    uint32_t heads;
    // Logits of a token: one per head, and two for the stages, if the router has stages.
    uint32_t width;
    uint32_t top_k;
    uint32_t shared_heads;
    uint32_t exchanged;
    float balance_weight;
    router::Routing routing;
    // Bit i % 64 of word i / 64 is 1 if head `routing.leading + i` is shared.
    uint64_t shared[4];

    __device__ __forceinline__ bool is_shared(uint32_t head) const {
        const uint32_t at = head - routing.leading;
        return head < routing.leading || (at < 256 && (shared[at / 64] >> at % 64 & 1));
    }

    __device__ __forceinline__ bool has_stages() const { return width > heads; }

    // Whether this rank adds a logit to the table of all ranks.
    __device__ __forceinline__ bool is_own(uint32_t logit) const {
        const Routing& r = routing;
        return logit < heads ? logit / r.group_size % r.ranks == r.rank : r.rank == 0;
    }
};

__device__ __forceinline__ double warp_largest(double value) {
    for (int bits = 16; bits > 0; bits /= 2) {
        const double other = __shfl_xor_sync(ALL_LANES, value, bits);
        value = other > value ? other : value;
    }
    return value;
}

// Writes the logits of the local heads, and zeros for other heads.
template <class T>
__device__ void save(const Parameters& p) {
    const T* logits = static_cast<const T*>(p.logits);
    const uint64_t all = p.routing.tokens * p.width;
    for (uint64_t i = global_thread(); i < all; i += global_threads()) {
        p.saved[i] = p.is_own(i % p.width) ? double(to_float(logits[i])) : 0.0;
    }
}

// The logits of a token and its softmaxes over routed and over shared heads; all threads of a warp
// have the same values.
struct Row {
    const double* logits;
    double largest_routed, largest_shared, routed, shared;

    __device__ __forceinline__ Row(const Parameters& p, uint64_t token) {
        logits = p.saved + token * p.width;
        largest_routed = largest_shared = -INFINITY;
        for (uint32_t head = threadIdx.x % 32; head < p.heads; head += 32) {
            double& largest = p.is_shared(head) ? largest_shared : largest_routed;
            largest = logits[head] > largest ? logits[head] : largest;
        }
        largest_routed = warp_largest(largest_routed);
        largest_shared = warp_largest(largest_shared);
        routed = shared = 0.0;
        for (uint32_t head = threadIdx.x % 32; head < p.heads; head += 32) {
            if (p.is_shared(head)) {
                shared += exp(logits[head] - largest_shared);
            } else {
                routed += exp(logits[head] - largest_routed);
            }
        }
        routed = warp_sum(routed);
        shared = warp_sum(shared);
    }

    // The gate of a routed head.
    __device__ __forceinline__ double gate(uint32_t head) const {
        return exp(logits[head] - largest_routed) / routed;
    }

    // A shared head's weight before it is multiplied by the stage's weight.
    __device__ __forceinline__ double of_shared(const Parameters& p, uint32_t head) const {
        return p.shared_heads * (exp(logits[head] - largest_shared) / shared);
    }
};

// The weights of the two stages, and the sum of the gates of selected heads.
struct Stages {
    double shared = 1.0, routed = 1.0, kept = 0.0;

    __device__ __forceinline__ Stages(const Parameters& p, const Row& row, uint64_t token) {
        const uint8_t* selected = p.routing.selected + token * p.routing.columns;
        for (uint32_t head = threadIdx.x % 32; head < p.heads; head += 32) {
            if (!p.is_shared(head) && selected[head - p.routing.leading]) {
                kept += row.gate(head);
            }
        }
        kept = warp_sum(kept);
        if (p.has_stages()) {
            const double a = row.logits[p.heads], b = row.logits[p.heads + 1];
            const double largest = a > b ? a : b;
            const double of_a = exp(a - largest), of_b = exp(b - largest);
            shared = 2.0 * (of_a / (of_a + of_b));
            routed = 2.0 * (of_b / (of_a + of_b));
        }
    }

    // A selected head's weight before it is multiplied by the stage's weight.
    __device__ __forceinline__ double of_selected(const Parameters& p, const Row& row,
                                                  uint32_t head) const {
        return p.top_k * row.gate(head) / kept;
    }
};

__device__ __forceinline__ void forward(const Parameters& p) {
    const Routing& r = p.routing;
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t token = uint64_t(blockIdx.x) * WARPS + threadIdx.x / 32;
    if (token >= r.tokens) {
        return;
    }
    const Row row(p, token);
    const uint64_t table = token * r.columns;
    for (uint32_t head = r.leading + lane; head < p.heads; head += 32) {
        const double logit = row.logits[head];
        const bool shared = p.is_shared(head);
        uint32_t ahead = 0;
        for (uint32_t other = r.leading; other < p.heads; other++) {
            const double rival = row.logits[other];
            const bool before = rival > logit || (rival == logit && other < head);
            ahead += before && !p.is_shared(other);
        }
        r.selected[table + head - r.leading] = shared || ahead < p.top_k;
        r.gates[table + head - r.leading] = shared ? 0.0f : float(row.gate(head));
    }
    if (!p.weights) {
        return;
    }
    __syncwarp();  // All of the token's selection has been written.
    const Stages stages(p, row, token);
    for (uint32_t i = lane; i < r.local_heads; i += 32) {
        const uint32_t head = r.column(i) + r.leading;
        double weight = 0.0;
        if (p.is_shared(head)) {
            weight = stages.shared * row.of_shared(p, head);
        } else if (r.selected[table + head - r.leading]) {
            weight = stages.routed * stages.of_selected(p, row, head);
        }
        p.weights[token * r.local_heads + i] = float(weight);
    }
}

// Writes the deltas of local heads that are in the table and computed by the token.
__device__ __forceinline__ void spread(const Parameters& p) {
    const Routing& r = p.routing;
    const uint64_t token = blockIdx.x;
    const uint32_t first = p.heads - p.exchanged;
    for (uint32_t i = threadIdx.x; i < r.local_heads; i += THREADS) {
        const uint32_t head = r.column(i) + r.leading;
        const bool active =
            head < r.leading || r.selected[token * r.columns + head - r.leading];
        if (head >= first && active) {
            p.deltas[token * p.exchanged + head - first] = p.delta[token * r.local_heads + i];
        }
    }
}

// <dO, O> of a head; 0 for heads that the table for ranks lacks.
__device__ __forceinline__ double delta_of(const Parameters& p, uint64_t token, uint32_t head) {
    const uint32_t first = p.heads - p.exchanged;
    if (p.deltas) {
        return head < first ? 0.0 : p.deltas[token * p.exchanged + head - first];
    }
    return p.delta ? double(p.delta[token * p.heads + head]) : 0.0;
}

template <class T>
__device__ void backward(const Parameters& p) {
    const Routing& r = p.routing;
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t index = uint64_t(blockIdx.x) * WARPS + threadIdx.x / 32;
    if (index >= p.count) {
        return;
    }
    const uint64_t token = p.first + index;
    const bool weighs = p.weights;
    const Row row(p, token);
    const uint8_t* selected = r.selected + token * r.columns;
    const double balance = double(p.balance_weight) / double(r.tokens);
    // The gradient of a routed head's gate: by the balance loss, and straight-through if the router has
    // no weights.
    const auto d_gate = [&](uint32_t head) {
        const uint32_t column = head - r.leading;
        const bool through = !weighs && selected[column];
        const double delta = through ? delta_of(p, token, head) : 0.0;
        return fma(balance, double(r.counts[column]) / double(r.tokens), delta);
    };
    double inner = 0.0, of_shared = 0.0, of_selected = 0.0;
    for (uint32_t head = lane; head < p.heads; head += 32) {
        if (!p.is_shared(head)) {
            inner += row.gate(head) * d_gate(head);
        }
    }
    inner = warp_sum(inner);
    const Stages stages(p, row, token);
    if (weighs) {
        for (uint32_t head = lane; head < p.heads; head += 32) {
            if (p.is_shared(head)) {
                of_shared += row.of_shared(p, head) * delta_of(p, token, head);
            } else if (selected[head - r.leading]) {
                of_selected += stages.of_selected(p, row, head) * delta_of(p, token, head);
            }
        }
        of_shared = warp_sum(of_shared);
        of_selected = warp_sum(of_selected);
    }
    T* d_logits = static_cast<T*>(p.logits) + index * p.width;
    // Each stage's values are their number n times a softmax, so d = value (d - <value, d> / n).
    for (uint32_t head = lane; head < p.heads; head += 32) {
        double d = 0.0;
        if (!p.is_shared(head)) {
            d = row.gate(head) * (d_gate(head) - inner);
            if (weighs && selected[head - r.leading]) {
                const double centred = delta_of(p, token, head) - of_selected / p.top_k;
                d += stages.routed * stages.of_selected(p, row, head) * centred;
            }
        } else if (weighs) {
            const double centred = delta_of(p, token, head) - of_shared / p.shared_heads;
            d = stages.shared * row.of_shared(p, head) * centred;
        }
        d_logits[head] = from_float<T>(float(d));
    }
    if (p.has_stages() && lane == 0) {
        const double mean = (stages.shared * of_shared + stages.routed * of_selected) / 2.0;
        d_logits[p.heads] = from_float<T>(float(stages.shared * (of_shared - mean)));
        d_logits[p.heads + 1] = from_float<T>(float(stages.routed * (of_selected - mean)));
    }
}

}  // namespace logits

EXPORT(logits_save_f32, logits::save<float>, logits::Parameters)
EXPORT(logits_save_bf16, logits::save<bf16>, logits::Parameters)
EXPORT(logits_forward, logits::forward, logits::Parameters)
EXPORT(logits_spread, logits::spread, logits::Parameters)
EXPORT(logits_backward_f32, logits::backward<float>, logits::Parameters)
EXPORT(logits_backward_bf16, logits::backward<bf16>, logits::Parameters)
