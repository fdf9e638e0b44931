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
    uint64_t vocab_size;
    float scale;
    uint32_t with_gradients;
};

template <class T>
__device__ void losses(const Losses& p) {
    T* row = static_cast<T*>(p.logits) + blockIdx.x * p.vocab_size;
    const uint32_t target = p.targets[blockIdx.x];
    // A target without a row has no loss: the host checks targets before they get here.
    if (target >= p.vocab_size) {
        for (uint64_t i = threadIdx.x; i < p.vocab_size; i += THREADS) {
            row[i] = from_float<T>(0.0f);
        }
        if (threadIdx.x == 0) {
            p.losses[blockIdx.x] = 0.0;
        }
        return;
    }
    float largest = -INFINITY;
    for (uint64_t i = threadIdx.x; i < p.vocab_size; i += THREADS) {
        largest = fmaxf(largest, to_float(row[i]));
    }
    largest = block_max(largest);
    const float chosen = to_float(row[target]);
    // The target's term joins the sum in f64: where it is the largest it is 1, and the loss is the
    // logarithm of 1 and the little that the others add.
    float others = 0.0f;
    for (uint64_t i = threadIdx.x; i < p.vocab_size; i += THREADS) {
        others += i == target ? 0.0f : expf(to_float(row[i]) - largest);
    }
    const double total = double(block_sum(others)) + double(expf(chosen - largest));
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

}  // namespace cross_entropy

EXPORT(cross_entropy_losses_f32, cross_entropy::losses<float>, cross_entropy::Losses)
EXPORT(cross_entropy_losses_bf16, cross_entropy::losses<bf16>, cross_entropy::Losses)
