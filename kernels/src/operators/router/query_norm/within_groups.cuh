// The selection, gates and gradients of the router that selects the same number of heads of every
// key/value group. A thread computes a group's gates, of which there are few.
#pragma once

#include "norms.cuh"

namespace query_norm {

struct WithinGroups {
    // The columns of a group.
    struct Columns {
        uint32_t first, end;

        __device__ __forceinline__ Columns(const Routing& r, uint32_t group) {
            const uint32_t start = group * r.group_size, next = start + r.group_size;
            first = start > r.leading ? start - r.leading : 0;
            end = next > r.leading ? next - r.leading : 0;
        }
    };

    static __device__ __forceinline__ uint32_t groups(const Routing& r) {
        return (r.leading + r.columns) / r.group_size;
    }

    // Routes the token by a warp. `values` are the squares of its columns.
    static __device__ __forceinline__ void route(const Parameters& p, uint64_t token,
                                                 double* values) {
        const Routing& r = p.routing;
        const uint32_t lane = threadIdx.x % 32, count = groups(r);
        const uint64_t table = token * r.columns;
        load_summed(p, token, values);
        for (uint32_t head = lane; head < r.columns; head += 32) {
            const Columns of(r, (r.leading + head) / r.group_size);
            r.selected[table + head] = is_selected(p, values, head, of.first, of.end);
        }
        __syncwarp();  // The squares have been compared.
        for (uint32_t group = lane; group < count; group += 32) {
            p.inv_std[token * count + group] = gate(p, table, values, Columns(r, group), count);
        }
    }

    // Writes norms and gates of a group; returns 1 / std of its norms, 0 if they are all equal.
    static __device__ __forceinline__ double gate(const Parameters& p, uint64_t table,
                                                  double* values, const Columns& of,
                                                  uint32_t groups) {
        double sum = 0.0, smallest = INFINITY, largest = 0.0, routed = 0.0;
        for (uint32_t i = of.first; i < of.end; i++) {
            const bool shared = values[i] < 0.0;
            const double norm = shared ? SHARED : sqrt(values[i]);
            values[i] = norm;
            p.norms[table + i] = norm;
            sum += shared ? 0.0 : norm;
            routed += shared ? 0.0 : 1.0;
            smallest = !shared && norm < smallest ? norm : smallest;
            largest = norm > largest ? norm : largest;
        }
        const double mean = sum / routed;
        double squares = 0.0;
        for (uint32_t i = of.first; i < of.end; i++) {
            const double deviation = values[i] < 0.0 ? 0.0 : values[i] - mean;
            squares += deviation * deviation;
        }
        // The mean of equal norms may differ from them by a rounding.
        const double inv_std = smallest >= largest ? 0.0 : 1.0 / sqrt(squares / (routed - 1.0));
        double exponentials = 0.0;
        for (uint32_t i = of.first; i < of.end; i++) {
            values[i] = values[i] < 0.0 ? 0.0 : exp((values[i] - largest) * inv_std);
            exponentials += values[i];
        }
        for (uint32_t i = of.first; i < of.end; i++) {
            p.routing.gates[table + i] = float(values[i] / exponentials / groups);
        }
        return inv_std;
    }

    // As `Heads::norm_factors`, for each group.
    static __device__ __forceinline__ void norm_factors(const Parameters& p, uint64_t token,
                                                        double* factors) {
        const Routing& r = p.routing;
        const uint32_t count = groups(r);
        const uint64_t table = token * r.columns;
        const double* norms = p.norms + table;
        const float* gates = r.gates + table;
        for (uint32_t group = threadIdx.x % 32; group < count; group += 32) {
            const Columns of(r, group);
            const double inv_std = p.inv_std[token * count + group];
            double inner = 0.0, gate_sum = 0.0, norm_sum = 0.0, along = 0.0, routed = 0.0;
            for (uint32_t i = of.first; i < of.end; i++) {
                if (norms[i] < 0.0) {
                    factors[i] = 0.0;
                    continue;
                }
                factors[i] = gate_gradient(p, token, i);
                inner += double(gates[i]) * factors[i];
                gate_sum += gates[i];
                norm_sum += norms[i];
                routed += 1.0;
            }
            inner /= gate_sum;
            const double mean = norm_sum / routed;
            for (uint32_t i = of.first; i < of.end; i++) {
                along += double(gates[i]) * (factors[i] - inner) * (norms[i] - mean) * inv_std;
            }
            // One routed head has no deviation, so `along` is 0.
            const double pull = routed > 1.0 ? along / (routed - 1.0) : 0.0;
            for (uint32_t i = of.first; i < of.end; i++) {
                const double d_score = double(gates[i]) * (factors[i] - inner);
                const double d_norm = (d_score - pull * (norms[i] - mean) * inv_std) * inv_std;
                factors[i] = norms[i] <= 0.0 ? 0.0 : d_norm / norms[i];
            }
        }
    }
};

}  // namespace query_norm
