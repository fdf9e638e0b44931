// The group router's selection, gates and gradients: whole key/value groups with the largest sums of
// squares. A shared group has squares that are SHARED.
#pragma once

#include "norms.cuh"

namespace query_norm {

struct Groups {
    // Routes the token by a warp. `values` are the squares of its columns. All heads of a group get
    // its sum, so that sorting heads by their values also sorts the groups.
    static __device__ __forceinline__ void route(const Parameters& p, uint64_t token,
                                                 double* values) {
        const Routing& r = p.routing;
        const uint32_t lane = threadIdx.x % 32, size = r.group_size;
        const uint64_t table = token * r.columns;
        load_summed(p, token, values);
        for (uint32_t group = lane; group < r.columns / size; group += 32) {
            double* heads = values + group * size;
            double sum = 0.0;
            for (uint32_t i = 0; i < size; i++) {
                sum += heads[i];
            }
            sum = sum < 0.0 ? SHARED : sum;
            for (uint32_t i = 0; i < size; i++) {
                heads[i] = sum;
            }
        }
        __syncwarp();
        for (uint32_t head = lane; head < r.columns; head += 32) {
            r.selected[table + head] = is_selected(p, values, head);
        }
        __syncwarp();  // The sums have been compared.
        double largest = 0.0;
        for (uint32_t head = lane; head < r.columns; head += 32) {
            const double norm = values[head] < 0.0 ? SHARED : sqrt(values[head] / size);
            values[head] = norm;
            p.norms[table + head] = norm;
            largest = norm > largest ? norm : largest;
        }
        for (int bits = 16; bits > 0; bits /= 2) {
            const double other = __shfl_xor_sync(ALL_LANES, largest, bits);
            largest = other > largest ? other : largest;
        }
        double exponentials = 0.0;
        for (uint32_t head = lane; head < r.columns; head += 32) {
            values[head] = values[head] < 0.0 ? 0.0 : exp(values[head] - largest);
            exponentials += values[head];
        }
        exponentials = warp_sum(exponentials);
        for (uint32_t head = lane; head < r.columns; head += 32) {
            r.gates[table + head] = float(values[head] / exponentials);
        }
    }

    // Writes each head's part of the gradient of its group's norm, divided by the norm, to `factors`.
    static __device__ __forceinline__ void norm_factors(const Parameters& p, uint64_t token,
                                                        double* factors) {
        const Routing& r = p.routing;
        const uint32_t lane = threadIdx.x % 32, size = r.group_size;
        const uint64_t table = token * r.columns;
        const double* norms = p.norms + table;
        const float* gates = r.gates + table;
        double inner = 0.0, gate_sum = 0.0;
        for (uint32_t i = lane; i < r.columns; i += 32) {
            const double gradient = norms[i] < 0.0 ? 0.0 : gate_gradient(p, token, i);
            factors[i] = gradient;
            inner += double(gates[i]) * gradient;
            gate_sum += gates[i];
        }
        inner = warp_sum(inner) / warp_sum(gate_sum);
        __syncwarp();  // All of a group's gradients have been written.
        for (uint32_t group = lane; group < r.columns / size; group += 32) {
            const uint32_t first = group * size;
            double sum = 0.0;
            for (uint32_t i = first; i < first + size; i++) {
                sum += double(gates[i]) * (factors[i] - inner);
            }
            const double factor = norms[first] <= 0.0 ? 0.0 : sum / size / norms[first];
            for (uint32_t i = first; i < first + size; i++) {
                factors[i] = factor;
            }
        }
    }
};

}  // namespace query_norm
