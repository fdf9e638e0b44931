// The loss of a chunk of tokens from their logits, one block per token; with a scale, logits are
// replaced by their gradients.
#include "../../device/cuda/operators.cuh"

namespace cross_entropy {

constexpr uint32_t IGNORED = 0xffffffffu;

struct PARAMETERS Losses {
    void* logits;
    const uint32_t* targets;
    // One per token.
    double* losses;
    // Local rows of the head: columns of the local logits.
    uint64_t vocab_size;
    float scale;
    uint32_t with_gradients;
};

// For a head with rows that are sharded across ranks.
struct PARAMETERS VocabParallel {
    Losses losses;
    // [tokens, ranks + 1]: logarithms of the ranks' sums of exponentials, and the target's logit.
    double* sums;
    uint64_t first_row;
    uint64_t vocab_size;
    uint32_t rank;
    uint32_t ranks;
};

// The maximum of some logits, and the sum of their exponentials relative to it; -inf and 0 without
// logits.
struct Exponentials {
    float largest = -INFINITY;
    float sum = 0.0f;

    template <int N>
    __device__ __forceinline__ void add(const float (&logits)[N]) {
        float most = largest;
#pragma unroll
        for (int j = 0; j < N; j++) {
            most = fmaxf(most, logits[j]);
        }
        if (most > largest) {
            sum *= expf(largest - most);
            largest = most;
        }
        // The maximum may also be -inf. A NaN propagates into the sum.
#pragma unroll
        for (int j = 0; j < N; j++) {
            sum += logits[j] == -INFINITY ? 0.0f : expf(logits[j] - largest);
        }
    }

    // The sum relative to another reference, which is at least the maximum.
    __device__ __forceinline__ float less(float reference) const {
        return sum == 0.0f ? 0.0f : sum * expf(largest - reference);
    }
};

// Computes the exponentials of a row's logits except the logit at `except`, for all threads of the block.
template <class T, int N>
__device__ Exponentials exponentials_of(const T* row, uint64_t count, uint64_t except) {
    Exponentials own;
    for (uint64_t i = threadIdx.x; i < count / N; i += THREADS) {
        const Pack<T, N> pack = packs<N>(row)[i];
        float logits[N];
#pragma unroll
        for (int j = 0; j < N; j++) {
            logits[j] = i * N + j == except ? -INFINITY : to_float(pack.at[j]);
        }
        own.add(logits);
    }
    const float largest = block_max(own.largest);
    return {largest, block_sum(own.less(largest))};
}

template <class T>
__device__ Exponentials exponentials(const T* row, uint64_t count, uint64_t except) {
    if (wide<T>(count, row)) {
        return exponentials_of<T, WIDE<T>>(row, count, except);
    }
    return exponentials_of<T, 1>(row, count, except);
}

// Replaces a row's logits by their gradients: the exponential relative to `reference`, times
// `factor`, minus `scale` for the target.
template <class T, int N>
__device__ void differentiate_by(T* row, uint64_t count, uint64_t target, float reference,
                                 float factor, float scale) {
    for (uint64_t i = threadIdx.x; i < count / N; i += THREADS) {
        Pack<T, N> pack = packs<N>(row)[i];
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float share = expf(to_float(pack.at[j]) - reference) * factor;
            pack.at[j] = from_float<T>(i * N + j == target ? share - scale : share);
        }
        packs<N>(row)[i] = pack;
    }
}

template <class T>
__device__ void differentiate(T* row, uint64_t count, uint64_t target, float reference,
                              float factor, float scale) {
    if (wide<T>(count, row)) {
        differentiate_by<T, WIDE<T>>(row, count, target, reference, factor, scale);
    } else {
        differentiate_by<T, 1>(row, count, target, reference, factor, scale);
    }
}

template <class T>
__device__ void clear_row(T* row, uint64_t count) {
    for (uint64_t i = threadIdx.x; i < count; i += THREADS) {
        row[i] = from_float<T>(0.0f);
    }
}

template <class T>
__device__ void losses(const Losses& p) {
    T* row = static_cast<T*>(p.logits) + blockIdx.x * p.vocab_size;
    const uint32_t target = p.targets[blockIdx.x];
    // A target outside the rows has no loss: the host checks targets before the launch.
    if (target >= p.vocab_size) {
        clear_row(row, p.vocab_size);
        if (threadIdx.x == 0) {
            p.losses[blockIdx.x] = 0.0;
        }
        return;
    }
    // Read before the barriers of the sums: after them the row is overwritten.
    const float chosen = to_float(row[target]);
    const Exponentials others = exponentials(row, p.vocab_size, target);
    const float largest = fmaxf(others.largest, chosen);
    // The target's term is added in f64: if it is the maximum, the loss is the logarithm of 1 plus
    // the small sum of the other terms.
    const double total = double(others.less(largest)) + double(expf(chosen - largest));
    if (threadIdx.x == 0) {
        p.losses[blockIdx.x] = double(largest) - double(chosen) + log(total);
    }
    if (!p.with_gradients) {
        return;
    }
    const float factor = float(double(p.scale) / total);
    differentiate(row, p.vocab_size, target, largest, factor, p.scale);
}

// Writes the values that the ranks sum. The rank's own column gets the logarithm of its sum. The last column gets
// the target's logit, if it is local. The table is zero elsewhere.
template <class T>
__device__ void vocab_parallel_sums(const VocabParallel& p) {
    const uint64_t count = p.losses.vocab_size;
    const T* row = static_cast<const T*>(p.losses.logits) + blockIdx.x * count;
    const uint32_t id = p.losses.targets[blockIdx.x];
    if (id >= p.vocab_size) {
        return;
    }
    // An id before the rows wraps around to an index beyond them.
    const uint64_t target = uint64_t(id) - p.first_row;
    const Exponentials others = exponentials(row, count, target);
    const float chosen = target < count ? to_float(row[target]) : -INFINITY;
    const float largest = fmaxf(others.largest, chosen);
    double* sums = p.sums + uint64_t(blockIdx.x) * (p.ranks + 1);
    if (threadIdx.x == 0) {
        double total = others.less(largest);
        if (target < count) {
            total += double(expf(chosen - largest));
            sums[p.ranks] = chosen;
        }
        sums[p.rank] = double(largest) + log(total);
    }
}

// Computes the token's loss from all ranks' sums, on rank 0; with a scale, replaces logits by their
// gradients.
template <class T>
__device__ void vocab_parallel_losses(const VocabParallel& p) {
    const uint64_t count = p.losses.vocab_size;
    T* row = static_cast<T*>(p.losses.logits) + blockIdx.x * count;
    const uint32_t id = p.losses.targets[blockIdx.x];
    const double* sums = p.sums + uint64_t(blockIdx.x) * (p.ranks + 1);
    if (id >= p.vocab_size) {
        clear_row(row, count);
        if (threadIdx.x == 0) {
            p.losses.losses[blockIdx.x] = 0.0;
        }
        return;
    }
    double largest = sums[0], total = 0.0;
    for (uint32_t rank = 1; rank < p.ranks; rank++) {
        largest = sums[rank] > largest ? sums[rank] : largest;
    }
    for (uint32_t rank = 0; rank < p.ranks; rank++) {
        total += exp(sums[rank] - largest);
    }
    const double log_sum = largest + log(total);
    if (threadIdx.x == 0) {
        p.losses.losses[blockIdx.x] = p.rank == 0 ? log_sum - sums[p.ranks] : 0.0;
    }
    if (!p.losses.with_gradients) {
        return;
    }
    const uint64_t target = uint64_t(id) - p.first_row;
    // The factor includes the f32 rounding error of the logarithm.
    const float reference = float(log_sum);
    const float factor = float(double(p.losses.scale) * exp(double(reference) - log_sum));
    differentiate(row, count, target, reference, factor, p.losses.scale);
}

}  // namespace cross_entropy

EXPORT(cross_entropy_losses_f32, cross_entropy::losses<float>, cross_entropy::Losses)
EXPORT(cross_entropy_losses_bf16, cross_entropy::losses<bf16>, cross_entropy::Losses)
EXPORT(vocab_parallel_sums_f32, cross_entropy::vocab_parallel_sums<float>, cross_entropy::VocabParallel)
EXPORT(vocab_parallel_sums_bf16, cross_entropy::vocab_parallel_sums<bf16>, cross_entropy::VocabParallel)
EXPORT(vocab_parallel_losses_f32, cross_entropy::vocab_parallel_losses<float>, cross_entropy::VocabParallel)
EXPORT(vocab_parallel_losses_bf16, cross_entropy::vocab_parallel_losses<bf16>, cross_entropy::VocabParallel)
