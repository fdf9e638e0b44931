// The cross-entropy and the distillation loss of a chunk of tokens from the logits of both heads, one
// block per token. With gradients, the student's logits are replaced by their gradients (formulas: teacher.rs).
#include "../../device/cuda/operators.cuh"

namespace distillation {

using cross_entropy::Exponentials;

struct PARAMETERS Losses {
    // The student's [tokens, vocab_size], and the teacher's [tokens, compared].
    void* logits;
    const void* teacher;
    const uint32_t* targets;
    // One element per token in each.
    double* losses;
    double* distillation_losses;
    // Local rows of the head. The teacher's distribution is over the first `compared` of them.
    uint64_t vocab_size;
    uint64_t compared;
    // Gradients of the total loss with respect to both losses of a token.
    float scale;
    float teacher_scale;
    float temperature;
    uint32_t with_gradients;
};

// For heads with rows that are sharded across ranks.
struct PARAMETERS VocabParallel {
    Losses losses;
    // [tokens, 4 ranks + 1]: the ranks' `Sums`, and the target's logit.
    double* sums;
    uint64_t first_row;
    uint64_t vocab_size;
    uint32_t rank;
    uint32_t ranks;
};

// Logarithms of the sums of exponentials of a token's logits, and of both heads' logits over the
// temperature in the compared rows, -inf without compared rows. Also the mean of the teacher's minus the
// student's logit over the temperature, in the teacher's distribution.
struct Sums {
    double log_sum;
    double student;
    double teacher;
    double difference;
};
constexpr int SUMS = 4;

// Exponentials of the teacher's logits, and their sum times the logits' differences. The difference is f64: after the
// difference of the logarithms is subtracted, the result may be much smaller than the logits.
struct Compared {
    float largest = -INFINITY;
    float sum = 0.0f;
    double difference = 0.0;

    template <int N>
    __device__ __forceinline__ void add(const float (&teacher)[N], const float (&student)[N]) {
        float most = largest;
#pragma unroll
        for (int j = 0; j < N; j++) {
            most = fmaxf(most, teacher[j]);
        }
        if (most > largest) {
            const float factor = expf(largest - most);
            sum *= factor;
            difference *= double(factor);
            largest = most;
        }
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float exponential = teacher[j] == -INFINITY ? 0.0f : expf(teacher[j] - largest);
            sum += exponential;
            if (exponential != 0.0f) {
                difference += double(exponential) * (double(teacher[j]) - double(student[j]));
            }
        }
    }
};

// Measures the compared rows, for all threads of the block.
template <class T, int N>
__device__ void compare_by(const Losses& p, const T* row, const T* teacher, Sums& sums) {
    const float inverse = 1.0f / p.temperature;
    Exponentials student;
    Compared compared;
    for (uint64_t i = threadIdx.x; i < p.compared / N; i += THREADS) {
        const Pack<T, N> own = packs<N>(row)[i], other = packs<N>(teacher)[i];
        float students[N], teachers[N];
#pragma unroll
        for (int j = 0; j < N; j++) {
            students[j] = to_float(own.at[j]) * inverse;
            teachers[j] = to_float(other.at[j]) * inverse;
        }
        student.add(students);
        compared.add(teachers, students);
    }
    const float students_largest = block_max(student.largest);
    const double students_sum = block_sum(double(student.less(students_largest)));
    const float largest = block_max(compared.largest);
    const double factor = compared.sum == 0.0f ? 0.0 : double(expf(compared.largest - largest));
    const double sum = block_sum(factor * double(compared.sum));
    const double difference = block_sum(factor * compared.difference);
    sums.student = double(students_largest) + log(students_sum);
    sums.teacher = double(largest) + log(sum);
    sums.difference = sum == 0.0 ? 0.0 : difference / sum;
}

template <class T>
__device__ bool compared_wide(const Losses& p, const T* row, const T* teacher) {
    return wide<T>(p.compared, row) && wide<T>(p.compared, teacher);
}

// Computes the sums of a row. The target is at `target`, if that is one of the row's columns.
template <class T>
__device__ Sums measure(const Losses& p, const T* row, const T* teacher, uint64_t target) {
    // Read before the barriers of the sums: after them the row is overwritten.
    const float chosen = target < p.vocab_size ? to_float(row[target]) : -INFINITY;
    const Exponentials others = cross_entropy::exponentials(row, p.vocab_size, target);
    const float largest = fmaxf(others.largest, chosen);
    double total = double(others.less(largest));
    if (target < p.vocab_size) {
        total += double(expf(chosen - largest));
    }
    Sums sums;
    sums.log_sum = double(largest) + log(total);
    if (compared_wide(p, row, teacher)) {
        compare_by<T, WIDE<T>>(p, row, teacher, sums);
    } else {
        compare_by<T, 1>(p, row, teacher, sums);
    }
    return sums;
}

// A scaled distribution: the exponentials of logits relative to `reference`, times `factor`.
struct Scaled {
    float reference;
    float factor;

    // The factor includes the f32 rounding error of the logarithm.
    __device__ Scaled(double log_sum, double scale)
        : reference(float(log_sum)), factor(float(scale * exp(double(reference) - log_sum))) {}

    __device__ __forceinline__ float of(float logit) const {
        return expf(logit - reference) * factor;
    }
};

template <class T, int N>
__device__ void differentiate_by(const Losses& p, T* row, const T* teacher, uint64_t target,
                                 const Scaled& own, const Scaled& students, const Scaled& teachers) {
    const float inverse = 1.0f / p.temperature;
    for (uint64_t i = threadIdx.x; i < p.compared / N; i += THREADS) {
        Pack<T, N> pack = packs<N>(row)[i];
        const Pack<T, N> other = packs<N>(teacher)[i];
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float logit = to_float(pack.at[j]);
            const float soft = students.of(logit * inverse) -
                               teachers.of(to_float(other.at[j]) * inverse);
            const float both = own.of(logit) + soft;
            pack.at[j] = from_float<T>(i * N + j == target ? both - p.scale : both);
        }
        packs<N>(row)[i] = pack;
    }
}

// Replaces a row's logits by their gradients.
template <class T>
__device__ void differentiate(const Losses& p, T* row, const T* teacher, uint64_t target,
                              const Sums& sums) {
    const double scale = double(p.teacher_scale) * double(p.temperature);
    const Scaled own(sums.log_sum, p.scale), students(sums.student, scale),
        teachers(sums.teacher, scale);
    if (compared_wide(p, row, teacher)) {
        differentiate_by<T, WIDE<T>>(p, row, teacher, target, own, students, teachers);
    } else {
        differentiate_by<T, 1>(p, row, teacher, target, own, students, teachers);
    }
    // A target in the compared rows wraps around to an index beyond the rest.
    cross_entropy::differentiate(row + p.compared, p.vocab_size - p.compared, target - p.compared,
                                 own.reference, own.factor, p.scale);
}

// Writes a token's losses, from the sums of the whole vocabulary and the target's logit.
__device__ void write(const Losses& p, const Sums& sums, double target) {
    const double divergence = sums.difference + sums.student - sums.teacher;
    p.losses[blockIdx.x] = sums.log_sum - target;
    p.distillation_losses[blockIdx.x] = double(p.temperature) * double(p.temperature) * divergence;
}

// Writes zero losses, for a token without a target or with a target that another rank adds.
__device__ void write_zeros(const Losses& p) {
    p.losses[blockIdx.x] = 0.0;
    p.distillation_losses[blockIdx.x] = 0.0;
}

template <class T>
__device__ void losses(const Losses& p) {
    T* row = static_cast<T*>(p.logits) + blockIdx.x * p.vocab_size;
    const T* teacher = static_cast<const T*>(p.teacher) + blockIdx.x * p.compared;
    const uint32_t target = p.targets[blockIdx.x];
    // A target outside the rows has no loss: the host checks targets before the launch.
    if (target >= p.vocab_size) {
        cross_entropy::clear_row(row, p.vocab_size);
        if (threadIdx.x == 0) {
            write_zeros(p);
        }
        return;
    }
    const float chosen = to_float(row[target]);
    const Sums sums = measure(p, row, teacher, target);
    if (threadIdx.x == 0) {
        write(p, sums, chosen);
    }
    if (p.with_gradients) {
        differentiate(p, row, teacher, target, sums);
    }
}

// Writes the rank's sums into its columns. The last column gets the target's logit, if it is local. The
// table is zero elsewhere.
template <class T>
__device__ void vocab_parallel_sums(const VocabParallel& p) {
    const uint64_t count = p.losses.vocab_size;
    const T* row = static_cast<const T*>(p.losses.logits) + blockIdx.x * count;
    const T* teacher = static_cast<const T*>(p.losses.teacher) + blockIdx.x * p.losses.compared;
    const uint32_t id = p.losses.targets[blockIdx.x];
    if (id >= p.vocab_size) {
        return;
    }
    // An id before the rows wraps around to an index beyond them.
    const uint64_t target = uint64_t(id) - p.first_row;
    const Sums sums = measure(p.losses, row, teacher, target);
    if (threadIdx.x == 0) {
        double* columns = p.sums + uint64_t(blockIdx.x) * (SUMS * p.ranks + 1);
        double* own = columns + SUMS * p.rank;
        own[0] = sums.log_sum;
        own[1] = sums.student;
        own[2] = sums.teacher;
        own[3] = sums.difference;
        if (target < count) {
            columns[SUMS * p.ranks] = double(to_float(row[target]));
        }
    }
}

// Logarithm of the sum of the exponentials of one column of all ranks.
__device__ double log_sum_exp(const double* column, uint32_t ranks) {
    double largest = column[0], total = 0.0;
    for (uint32_t rank = 1; rank < ranks; rank++) {
        largest = column[SUMS * rank] > largest ? column[SUMS * rank] : largest;
    }
    for (uint32_t rank = 0; rank < ranks; rank++) {
        total += exp(column[SUMS * rank] - largest);
    }
    return largest + log(total);
}

// Computes the token's losses from all ranks' sums, on rank 0; with gradients, replaces logits by their gradients.
template <class T>
__device__ void vocab_parallel_losses(const VocabParallel& p) {
    const uint64_t count = p.losses.vocab_size;
    T* row = static_cast<T*>(p.losses.logits) + blockIdx.x * count;
    const T* teacher = static_cast<const T*>(p.losses.teacher) + blockIdx.x * p.losses.compared;
    const uint32_t id = p.losses.targets[blockIdx.x];
    const double* columns = p.sums + uint64_t(blockIdx.x) * (SUMS * p.ranks + 1);
    if (id >= p.vocab_size) {
        cross_entropy::clear_row(row, count);
        if (threadIdx.x == 0) {
            write_zeros(p.losses);
        }
        return;
    }
    Sums sums;
    sums.log_sum = log_sum_exp(columns, p.ranks);
    sums.student = log_sum_exp(columns + 1, p.ranks);
    sums.teacher = log_sum_exp(columns + 2, p.ranks);
    sums.difference = 0.0;
    for (uint32_t rank = 0; rank < p.ranks; rank++) {
        const double* of_rank = columns + SUMS * rank;
        sums.difference += exp(of_rank[2] - sums.teacher) * of_rank[3];
    }
    if (threadIdx.x == 0) {
        if (p.rank == 0) {
            write(p.losses, sums, columns[SUMS * p.ranks]);
        } else {
            write_zeros(p.losses);
        }
    }
    if (p.losses.with_gradients) {
        differentiate(p.losses, row, teacher, uint64_t(id) - p.first_row, sums);
    }
}

}  // namespace distillation

EXPORT(distillation_losses_f32, distillation::losses<float>, distillation::Losses)
EXPORT(distillation_losses_bf16, distillation::losses<bf16>, distillation::Losses)
EXPORT(vocab_parallel_distillation_sums_f32, distillation::vocab_parallel_sums<float>, distillation::VocabParallel)
EXPORT(vocab_parallel_distillation_sums_bf16, distillation::vocab_parallel_sums<bf16>, distillation::VocabParallel)
EXPORT(vocab_parallel_distillation_losses_f32, distillation::vocab_parallel_losses<float>, distillation::VocabParallel)
EXPORT(vocab_parallel_distillation_losses_bf16, distillation::vocab_parallel_losses<bf16>, distillation::VocabParallel)
