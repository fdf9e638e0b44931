// The query-norm router's selection, gates and gradients: routed heads with the largest norms.
#pragma once

#include "norms.cuh"

namespace query_norm {

struct Heads {
    // Routes the token by a warp: norms, selection, gates. `values` are the squares of its columns;
    // each thread replaces its own values by the inputs of the next step.
    static __device__ __forceinline__ void route(const Parameters& p, uint64_t token,
                                                 double* values) {
        const Routing& r = p.routing;
        const uint32_t lane = threadIdx.x % 32;
        const uint64_t table = token * r.columns;
        load_summed(p, token, values);
        for (uint32_t head = lane; head < r.columns; head += 32) {
            r.selected[table + head] = is_selected(p, values, head);
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
        // Rounding may make the mean of equal norms differ from them.
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

    // Writes the gradient of each of the token's norms, divided by the norm, to `factors`. This is the factor
    // of a query in its own gradient, 0 for a shared head. `heads_to_norms` in cpu/scores.rs has the
    // formulas. One warp computes them, each thread for some of the heads.
    static __device__ __forceinline__ void norm_factors(const Parameters& p, uint64_t token,
                                                        double* factors) {
        const Routing& r = p.routing;
        const uint32_t lane = threadIdx.x % 32;
        const uint64_t table = token * r.columns;
        const double* norms = p.norms + table;
        const float* gates = r.gates + table;
        const double inv_std = p.inv_std[token];
        double inner = 0.0, gate_sum = 0.0, norm_sum = 0.0, along = 0.0;
        for (uint32_t i = lane; i < r.columns; i += 32) {
            if (norms[i] < 0.0) {
                factors[i] = 0.0;
                continue;
            }
            const double gradient = gate_gradient(p, token, i);
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
};

}  // namespace query_norm
