// The embedding, one block per token.
#include "../../device/cuda/operators.cuh"

namespace embedding {

struct PARAMETERS Parameters {
    const uint32_t* ids;
    // Forward: the table and the rows read from it. Backward: the gradients of both.
    void* table;
    void* rows;
    uint64_t tokens;
    uint64_t width;
    // The rows of the vocabulary in the table.
    uint64_t first_row;
    uint64_t count;
};

// The row of an id in the table. An id before the table's rows wraps around to an index beyond them. An id
// outside the table reads zeros: it belongs to another rank, and a kernel must never read outside
// its table.
__device__ __forceinline__ uint64_t place(const Parameters& p, uint32_t id) {
    return uint64_t(id) - p.first_row;
}

template <class T>
__device__ void forward(const Parameters& p) {
    const uint64_t id = place(p, p.ids[blockIdx.x]);
    const bool held = id < p.count;
    const T* row = static_cast<const T*>(p.table) + (held ? id : 0) * p.width;
    T* out = static_cast<T*>(p.rows) + blockIdx.x * p.width;
    for (uint64_t i = threadIdx.x; i < p.width; i += THREADS) {
        out[i] = held ? row[i] : from_float<T>(0.0f);
    }
}

// Whether `id` occurs among the tokens before `end`.
__device__ __forceinline__ bool seen_before(const uint32_t* ids, uint64_t end, uint32_t id) {
    int found = 0;
    for (uint64_t i = threadIdx.x; i < end; i += THREADS) {
        found |= ids[i] == id;
    }
    return block_sum(found) > 0;
}

// Columns that a thread sums in registers at the same time.
constexpr int COLUMNS = 8;

// Adds the gradients of all tokens with this id, in order, to a range of its row.
template <class T, class G>
__device__ void add_rows(const Parameters& p, uint32_t id, uint64_t first_column) {
    __shared__ uint32_t matches[THREADS / 32];
    float sums[COLUMNS] = {};
    for (uint64_t start = blockIdx.x; start < p.tokens; start += THREADS) {
        const uint64_t token = start + threadIdx.x;
        const bool match = token < p.tokens && p.ids[token] == id;
        const uint32_t ballot = __ballot_sync(0xffffffffu, match);
        __syncthreads();
        if (threadIdx.x % 32 == 0) {
            matches[threadIdx.x / 32] = ballot;
        }
        __syncthreads();
        for (int warp = 0; warp < THREADS / 32; warp++) {
            for (uint32_t bits = matches[warp]; bits != 0; bits &= bits - 1) {
                const uint64_t match = start + warp * 32 + __ffs(bits) - 1;
                const T* row = static_cast<const T*>(p.rows) + match * p.width;
                for (int j = 0; j < COLUMNS; j++) {
                    const uint64_t column = first_column + j * THREADS + threadIdx.x;
                    sums[j] += column < p.width ? to_float(row[column]) : 0.0f;
                }
            }
        }
    }
    G* d_row = static_cast<G*>(p.table) + place(p, id) * p.width;
    for (int j = 0; j < COLUMNS; j++) {
        const uint64_t column = first_column + j * THREADS + threadIdx.x;
        if (column < p.width) {
            d_row[column] = from_float<G>(to_float(d_row[column]) + sums[j]);
        }
    }
}

// The block of an id's first token processes all tokens with this id, so that each row has one writer and a
// fixed order of summation.
template <class T, class G>
__device__ void backward(const Parameters& p) {
    const uint32_t id = p.ids[blockIdx.x];
    if (place(p, id) >= p.count || seen_before(p.ids, blockIdx.x, id)) {
        return;
    }
    for (uint64_t column = 0; column < p.width; column += COLUMNS * THREADS) {
        add_rows<T, G>(p, id, column);
    }
}

}  // namespace embedding

EXPORT(embedding_forward_f32, embedding::forward<float>, embedding::Parameters)
EXPORT(embedding_forward_bf16, embedding::forward<bf16>, embedding::Parameters)
EXPORT(embedding_backward_f32_f32, (embedding::backward<float, float>), embedding::Parameters)
EXPORT(embedding_backward_f32_bf16, (embedding::backward<float, bf16>), embedding::Parameters)
EXPORT(embedding_backward_bf16_f32, (embedding::backward<bf16, float>), embedding::Parameters)
EXPORT(embedding_backward_bf16_bf16, (embedding::backward<bf16, bf16>), embedding::Parameters)
