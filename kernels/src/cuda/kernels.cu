// Every kernel, as one unit.
#include "../adamw/adamw.cu"
#include "../attention/cuda/plain.cu"
#include "../attention/cuda/tiled.cu"
#include "../convert/convert.cu"
#include "../cross_entropy/cross_entropy.cu"
#include "../embedding/embedding.cu"
#include "../key_value_cache/key_value_cache.cu"
#include "../rms_norm/rms_norm.cu"
#include "../rope/rope.cu"
#include "../swiglu/swiglu.cu"

#ifndef __CUDACC__
// Runs a kernel on the CPU; false where there is none of that name.
extern "C" bool emulated_launch(const char* name, const uint32_t* grid, uint32_t threads,
                                uint32_t shared_bytes, void* parameters) {
    const auto found = kernel_table().find(name);
    if (found == kernel_table().end()) {
        return false;
    }
    void* arguments[] = {parameters};
    found->second(dim3(grid[0], grid[1], grid[2]), dim3(threads), shared_bytes, arguments);
    return true;
}
#endif
