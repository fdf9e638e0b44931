// The loss of a chunk of tokens from their logits, a block for each token; with a scale, logits
// become their gradients.
#include "../cuda/operators.cuh"

namespace cross_entropy {

constexpr uint32_t IGNORED = 0xffffffffu;

struct Losses {
    void* logits;
    const uint32_t* targets;
    // One for each token.
    double* losses;
    // Rows of the head that are held here: its columns of logits.
    uint64_t vocab_size;
    float scale;
    uint32_t with_gradients;
};

// Of a head whose rows are divided among ranks.
struct Divided {
    Losses losses;
    // [tokens, ranks + 1]: logarithms of the ranks' sums of exponentials, and the target's logit.
    double* sums;
    uint64_t first_row;
    uint64_t vocab_size;
    uint32_t rank;
    uint32_t ranks;
};

// The largest logit of a row.
template <class T>
__device__ float row_max(const T* row, uint64_t count) {
    float largest = -INFINITY;
    for (uint64_t i = threadIdx.x; i < count; i += THREADS) {
        largest = fmaxf(largest, to_float(row[i]));
    }
    return block_max(largest);
}

// The sum of a row's exponentials less the largest, but for the one at `except`.
template <class T>
__device__ float row_sum(const T* row, uint64_t count, uint64_t except, float largest) {
    float sum = 0.0f;
    for (uint64_t i = threadIdx.x; i < count; i += THREADS) {
        sum += i == except ? 0.0f : expf(to_float(row[i]) - largest);
    }
    return block_sum(sum);
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
    // A target without a row has no loss: the host checks targets before they get here.
    if (target >= p.vocab_size) {
        clear_row(row, p.vocab_size);
        if (threadIdx.x == 0) {
            p.losses[blockIdx.x] = 0.0;
        }
        return;
    }
    const float largest = row_max(row, p.vocab_size);
    const float chosen = to_float(row[target]);
    // The target's term joins the sum in f64: where it is the largest it is 1, and the loss is the
    // logarithm of 1 and the little that the others add.
    const double others = row_sum(row, p.vocab_size, target, largest);
    const double total = others + double(expf(chosen - largest));
    if (threadIdx.x == 0) {
        p.losses[blockIdx.x] = double(largest) - double(chosen) + log(total);
    }
    if (!p.with_gradients) {
        return;
    }
    const float factor = float(double(p.scale) / total);
    for (uint64_t i = threadIdx.x; i < p.vocab_size; i += THREADS) {
        const float share = expf(to_float(row[i]) - largest) * factor;
        row[i] = from_float<T>(i == target ? share - p.scale : share);
    }
}

// Writes what the ranks add up: the logarithm of the rank's own sum into its column and the target's
// logit, where it is held here, into the last. The table holds zeros.
template <class T>
__device__ void divided_sums(const Divided& p) {
    const uint64_t count = p.losses.vocab_size;
    const T* row = static_cast<const T*>(p.losses.logits) + blockIdx.x * count;
    const uint32_t id = p.losses.targets[blockIdx.x];
    if (id >= p.vocab_size) {
        return;
    }
    // An id before the rows wraps around to one beyond them.
    const uint64_t target = uint64_t(id) - p.first_row;
    const float largest = row_max(row, count);
    double total = row_sum(row, count, target, largest);
    double* sums = p.sums + uint64_t(blockIdx.x) * (p.ranks + 1);
    if (threadIdx.x == 0) {
        if (target < count) {
            total += double(expf(to_float(row[target]) - largest));
            sums[p.ranks] = to_float(row[target]);
        }
        sums[p.rank] = double(largest) + log(total);
    }
}

// The token's loss from all ranks' sums, on rank 0; with a scale, logits become their gradients.
template <class T>
__device__ void divided_losses(const Divided& p) {
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
    const float own_largest = row_max(row, count);
    const float factor = float(double(p.losses.scale) * exp(double(own_largest) - log_sum));
    for (uint64_t i = threadIdx.x; i < count; i += THREADS) {
        const float share = expf(to_float(row[i]) - own_largest) * factor;
        row[i] = from_float<T>(i == target ? share - p.losses.scale : share);
    }
}

}  // namespace cross_entropy

EXPORT(cross_entropy_losses_f32, cross_entropy::losses<float>, cross_entropy::Losses)
EXPORT(cross_entropy_losses_bf16, cross_entropy::losses<bf16>, cross_entropy::Losses)
EXPORT(divided_sums_f32, cross_entropy::divided_sums<float>, cross_entropy::Divided)
EXPORT(divided_sums_bf16, cross_entropy::divided_sums<bf16>, cross_entropy::Divided)
EXPORT(divided_losses_f32, cross_entropy::divided_losses<float>, cross_entropy::Divided)
EXPORT(divided_losses_bf16, cross_entropy::divided_losses<bf16>, cross_entropy::Divided)
