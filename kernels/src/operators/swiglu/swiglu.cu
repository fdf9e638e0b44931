// SwiGLU, one block per token.
#include "../../device/cuda/operators.cuh"

namespace swiglu {

struct PARAMETERS Parameters {
    void* gate_up;
    void* out;
    uint64_t width;
};

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

template <class T, int N>
__device__ void forward_row(const T* gate_up, T* out, uint64_t width) {
    using P = Pack<T, N>;
    const P* gates = reinterpret_cast<const P*>(gate_up);
    const P* ups = reinterpret_cast<const P*>(gate_up + width);
    for (uint64_t i = threadIdx.x; i < width / N; i += THREADS) {
        const P gate = gates[i], up = ups[i];
        P result;
        for (int j = 0; j < N; j++) {
            const float g = to_float(gate.at[j]);
            result.at[j] = from_float<T>(g * sigmoid(g) * to_float(up.at[j]));
        }
        reinterpret_cast<P*>(out)[i] = result;
    }
}

template <class T>
__device__ void forward(const Parameters& p) {
    const T* gate_up = static_cast<const T*>(p.gate_up) + blockIdx.x * 2 * p.width;
    T* out = static_cast<T*>(p.out) + blockIdx.x * p.width;
    if (wide<T>(p.width, p.gate_up) && wide<T>(p.width, p.out)) {
        forward_row<T, WIDE<T>>(gate_up, out, p.width);
    } else {
        forward_row<T, 1>(gate_up, out, p.width);
    }
}

template <class T, int N>
__device__ void backward_row(T* gate_up, T* out, uint64_t width) {
    using P = Pack<T, N>;
    P* gates = reinterpret_cast<P*>(gate_up);
    P* ups = reinterpret_cast<P*>(gate_up + width);
    P* outs = reinterpret_cast<P*>(out);
    for (uint64_t i = threadIdx.x; i < width / N; i += THREADS) {
        P gate = gates[i], up = ups[i], d_out = outs[i];
        for (int j = 0; j < N; j++) {
            const float g = to_float(gate.at[j]), u = to_float(up.at[j]);
            const float d = to_float(d_out.at[j]), s = sigmoid(g);
            gate.at[j] = from_float<T>(d * u * s * (1.0f + g * (1.0f - s)));
            up.at[j] = from_float<T>(d * g * s);
            d_out.at[j] = from_float<T>(g * s * u);
        }
        gates[i] = gate;
        ups[i] = up;
        outs[i] = d_out;
    }
}

template <class T>
__device__ void backward(const Parameters& p) {
    T* gate_up = static_cast<T*>(p.gate_up) + blockIdx.x * 2 * p.width;
    T* out = static_cast<T*>(p.out) + blockIdx.x * p.width;
    if (wide<T>(p.width, p.gate_up) && wide<T>(p.width, p.out)) {
        backward_row<T, WIDE<T>>(gate_up, out, p.width);
    } else {
        backward_row<T, 1>(gate_up, out, p.width);
    }
}

}  // namespace swiglu

EXPORT(swiglu_forward_f32, swiglu::forward<float>, swiglu::Parameters)
EXPORT(swiglu_forward_bf16, swiglu::forward<bf16>, swiglu::Parameters)
EXPORT(swiglu_backward_f32, swiglu::backward<float>, swiglu::Parameters)
EXPORT(swiglu_backward_bf16, swiglu::backward<bf16>, swiglu::Parameters)
