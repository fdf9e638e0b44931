// The choice of a token by its logits, one block per row.
//
// Probabilities are integers, multiples of 2^-40 of the likeliest token's probability: their sums have the same bits
// in any order.
#include "../../device/cuda/operators.cuh"

namespace sampling {

constexpr uint32_t NONE = 0xffffffffu;
constexpr float ONE = 1099511627776.0f;  // 2^40
constexpr int WARPS = THREADS / 32;
// Bits of a key that one pass over a row determines.
constexpr int DIGIT = 2, DIGITS = 1 << DIGIT;

// The host's request for a row.
struct PARAMETERS Row {
    // NONE if the token must be chosen.
    uint32_t given;
    // 0 chooses the largest logit.
    float inverse_temperature;
    float min_p, top_p, random;
    uint32_t top_k;
    // The changes of the row.
    uint32_t first_change, end_change;
};

struct PARAMETERS Change {
    uint32_t token;
    float bias, repetition, penalty;
};

struct PARAMETERS Parameters {
    // [rows, vocab_size].
    const void* logits;
    // [rows, vocab_size]: the logits with their changes, divided by the temperature.
    float* scratch;
    const void* rows;
    const void* changes;
    // [rows, 2 + 2 most_likely]: the token, or NONE if a logit is not a number or is infinity; the logarithm of its
    // probability; the most likely tokens, each with its logarithm.
    uint32_t* chosen;
    uint64_t vocab_size;
    // Tokens that may be chosen.
    uint32_t known;
    uint32_t most_likely;
};

// Returns a key that is larger for larger values.
__device__ __forceinline__ uint32_t key_of(float value) {
    const uint32_t bits = __float_as_uint(value);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of(uint32_t key) {
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

// Returns a rank that is larger for more likely tokens; among equal logits, for lower tokens.
__device__ __forceinline__ uint64_t rank_of(float logit, uint32_t token) {
    return uint64_t(key_of(logit)) << 32 | (NONE - token);
}

__device__ __forceinline__ uint32_t token_of(uint64_t rank) { return NONE - uint32_t(rank); }

__device__ uint64_t block_most(uint64_t value) {
    __shared__ uint64_t partial[WARPS];
    for (int bits = 16; bits > 0; bits /= 2) {
        value = max(value, __shfl_xor_sync(ALL_LANES, value, bits));
    }
    __syncthreads();  // The maxima of the previous call have been read.
    if (threadIdx.x % 32 == 0) {
        partial[threadIdx.x / 32] = value;
    }
    __syncthreads();
    uint64_t largest = 0;
    for (int warp = 0; warp < WARPS; warp++) {
        largest = max(largest, partial[warp]);
    }
    return largest;
}

// The rank of the most likely token below a rank; 0 if no token is below.
template <class T>
__device__ uint64_t likeliest(const T* row, uint64_t count, uint64_t below) {
    uint64_t largest = 0;
    for (uint64_t i = threadIdx.x; i < count; i += THREADS) {
        const uint64_t rank = rank_of(to_float(row[i]), uint32_t(i));
        if (rank < below) {
            largest = max(largest, rank);
        }
    }
    return block_most(largest);
}

// The tokens that may be drawn: tokens with larger keys, and the first `equal` tokens with this key.
struct Kept {
    uint32_t key = 0;
    uint64_t equal = 0;
    // Sum of the probabilities of these tokens.
    uint64_t sum = 0;
};

// The scaled logits of a row that may be chosen.
struct Scaled {
    const float* values;
    uint32_t count;
    float largest;

    __device__ __forceinline__ uint64_t probability(float value) const {
        return uint64_t(expf(value - largest) * ONE);
    }

    // The sum of `weight(value)` over all tokens.
    template <class Weight>
    __device__ uint64_t sum(Weight weight) const {
        uint64_t own = 0;
        for (uint32_t i = threadIdx.x; i < count; i += THREADS) {
            own += weight(values[i]);
        }
        return block_sum(own);
    }

    __device__ Kept all() const {
        return {0, 0, sum([&](float value) { return probability(value); })};
    }

    // Returns the fewest of the likeliest tokens with weights that add up to at least `wanted`; all weights together
    // do.
    template <class Weight>
    __device__ Kept first(uint64_t wanted, Weight weight) const {
        // Determines the key's digits, highest first: the largest key such that the tokens with at least this key
        // suffice.
        uint32_t key = 0;
        uint64_t above = 0;
        for (int shift = 32 - DIGIT; shift >= 0; shift -= DIGIT) {
            uint64_t sums[DIGITS] = {};
            for (uint32_t i = threadIdx.x; i < count; i += THREADS) {
                const uint32_t own = key_of(values[i]);
                // The higher digits are equal to the key's.
                if (((uint64_t(own) ^ key) >> shift >> DIGIT) == 0) {
                    const uint64_t added = weight(values[i]);
#pragma unroll
                    for (uint32_t digit = 0; digit < DIGITS; digit++) {
                        sums[digit] += (own >> shift & (DIGITS - 1)) == digit ? added : 0;
                    }
                }
            }
            uint32_t found = 0;
            bool is_found = false;
#pragma unroll
            for (int digit = DIGITS - 1; digit >= 0; digit--) {
                const uint64_t sum = block_sum(sums[digit]);
                if (!is_found && (above + sum >= wanted || digit == 0)) {
                    found = uint32_t(digit);
                    is_found = true;
                } else if (!is_found) {
                    above += sum;
                }
            }
            key |= found << shift;
        }
        const float value = value_of(key);
        const uint64_t each = weight(value);
        const uint64_t equal = each == 0 ? 0 : (wanted - above + each - 1) / each;
        const uint64_t larger = sum([&](float other) { return key_of(other) > key ? probability(other) : 0; });
        return {key, equal, larger + equal * probability(value)};
    }

    // Returns the first token at which the sum of the kept probabilities exceeds `wanted`. Every warp adds the
    // probabilities of a part of the row.
    __device__ uint32_t draw(const Kept& kept, uint64_t wanted) const {
        __shared__ uint64_t sums[WARPS], equals[WARPS];
        __shared__ uint32_t drawn;
        const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const uint32_t part = (count + THREADS - 1) / THREADS * 32;
        const uint32_t start = min(count, warp * part), end = min(count, start + part);
        const uint64_t each = probability(value_of(kept.key));
        uint64_t sum = 0, equal = 0;
        for (uint32_t i = start + lane; i < end; i += 32) {
            const uint32_t key = key_of(values[i]);
            sum += key > kept.key ? probability(values[i]) : 0;
            equal += key == kept.key;
        }
        sum = warp_sum(sum);
        equal = warp_sum(equal);
        if (threadIdx.x == 0) {
            drawn = NONE;
        }
        if (lane == 0) {
            sums[warp] = sum;
            equals[warp] = equal;
        }
        __syncthreads();
        // The sums before this warp's part.
        uint64_t before = 0, equals_before = 0;
        for (uint32_t other = 0; other < warp; other++) {
            const uint64_t room = kept.equal - min(kept.equal, equals_before);
            before += sums[other] + min(room, equals[other]) * each;
            equals_before += equals[other];
        }
        for (uint32_t base = start; base < end && before <= wanted; base += 32) {
            const uint32_t i = base + lane;
            const uint32_t key = i < end ? key_of(values[i]) : 0;
            const bool is_equal = i < end && key == kept.key;
            const unsigned all_equal = __ballot_sync(ALL_LANES, is_equal);
            const uint64_t number = equals_before + __popc(all_equal & ((1u << lane) - 1));
            uint64_t added = i < end && key > kept.key ? probability(values[i]) : 0;
            added = is_equal && number < kept.equal ? each : added;
            uint64_t through = added;
            for (int distance = 1; distance < 32; distance *= 2) {
                const uint64_t other = __shfl_up_sync(ALL_LANES, through, distance);
                through += int(lane) >= distance ? other : 0;
            }
            const unsigned beyond = __ballot_sync(ALL_LANES, before + through > wanted);
            if (beyond != 0) {
                if (lane == 0) {
                    drawn = base + __ffs(beyond) - 1;
                }
                break;
            }
            before += __shfl_sync(ALL_LANES, through, 31);
            equals_before += __popc(all_equal);
        }
        __syncthreads();
        return drawn;
    }
};

// Copies a row's logits to the scratch; returns whether all logits are numbers below infinity.
template <class T>
__device__ bool copy(const T* logits, float* out, uint64_t count) {
    float bad = 0.0f;
    for (uint64_t i = threadIdx.x; i < count; i += THREADS) {
        const float logit = to_float(logits[i]);
        out[i] = logit;
        bad = logit < INFINITY ? bad : 1.0f;
    }
    return block_max(bad) == 0.0f;
}

__device__ __forceinline__ void change(float* logits, uint32_t known, const Change& change) {
    if (change.token < known) {
        const float biased = logits[change.token] + change.bias;
        const float repeated = biased > 0.0f ? biased / change.repetition : biased * change.repetition;
        logits[change.token] = repeated - change.penalty;
    }
}

// Chooses the token of a row, by its logits in the scratch.
__device__ uint32_t sample(const Parameters& p, const Row& row, float* logits) {
    const Change* changes = static_cast<const Change*>(p.changes);
    for (uint32_t i = row.first_change + threadIdx.x; i < row.end_change; i += THREADS) {
        change(logits, p.known, changes[i]);
    }
    __syncthreads();
    const uint64_t best = likeliest(logits, p.known, ~0ull);
    if (row.inverse_temperature == 0.0f) {
        return token_of(best);
    }
    for (uint32_t i = threadIdx.x; i < p.known; i += THREADS) {
        logits[i] *= row.inverse_temperature;
    }
    const Scaled scaled{logits, p.known, value_of(uint32_t(best >> 32)) * row.inverse_temperature};
    __syncthreads();
    const auto one = [](float) { return uint64_t(1); };
    uint64_t most = row.top_k == 0 ? p.known : min(row.top_k, p.known);
    if (row.min_p > 0.0f) {
        const uint64_t likely = scaled.sum([&](float value) {
            return uint64_t(expf(value - scaled.largest) >= row.min_p);
        });
        // The likeliest token is always kept.
        most = min(most, max(likely, uint64_t(1)));
    }
    Kept kept = most < p.known ? scaled.first(most, one) : scaled.all();
    if (row.top_p < 1.0f) {
        const uint64_t wanted = max(uint64_t(1), uint64_t(double(kept.sum) * double(row.top_p)));
        kept = scaled.first(wanted, [&](float value) { return scaled.probability(value); });
    }
    const uint64_t wanted = uint64_t(double(kept.sum) * double(row.random));
    return scaled.draw(kept, min(wanted, kept.sum - 1));
}

template <class T>
__device__ void rows(const Parameters& p) {
    const T* logits = static_cast<const T*>(p.logits) + blockIdx.x * p.vocab_size;
    float* scratch = p.scratch + blockIdx.x * p.vocab_size;
    const Row row = static_cast<const Row*>(p.rows)[blockIdx.x];
    uint32_t* chosen = p.chosen + blockIdx.x * (2 + 2 * uint64_t(p.most_likely));
    if (!copy(logits, scratch, p.vocab_size)) {
        if (threadIdx.x == 0) {
            chosen[0] = NONE;
        }
        return;
    }
    uint64_t rank = likeliest(logits, p.vocab_size, ~0ull);
    const float largest = value_of(uint32_t(rank >> 32));
    float exponentials = 0.0f;
    for (uint64_t i = threadIdx.x; i < p.vocab_size; i += THREADS) {
        exponentials += expf(to_float(logits[i]) - largest);
    }
    const float log_sum = logf(block_sum(exponentials));
    for (uint32_t i = 0; i < p.most_likely; i++) {
        if (threadIdx.x == 0) {
            chosen[2 + 2 * i] = token_of(rank);
            chosen[3 + 2 * i] = __float_as_uint(value_of(uint32_t(rank >> 32)) - largest - log_sum);
        }
        rank = likeliest(logits, p.vocab_size, rank);
    }
    const uint32_t token = row.given != NONE ? row.given : sample(p, row, scratch);
    if (threadIdx.x == 0) {
        chosen[0] = token;
        chosen[1] = token == NONE ? 0 : __float_as_uint(to_float(logits[token]) - largest - log_sum);
    }
}

}  // namespace sampling

EXPORT(sample_f32, sampling::rows<float>, sampling::Parameters)
EXPORT(sample_bf16, sampling::rows<bf16>, sampling::Parameters)
