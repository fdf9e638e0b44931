// Every kernel as one unit for the CPU, and the functions that mod.rs calls.
#include "../../../operators/kernels.cu"

// Runs a kernel on the CPU, with `parameters` pointing at each of its structures; returns false if no
// kernel has this name. Its threads run in the order of `schedule_seed`.
extern "C" bool emulated_launch(const char* name, const uint32_t* grid, uint32_t threads,
                                uint32_t shared_bytes, uint32_t schedule_seed,
                                void** parameters) {
    const auto found = kernel_table().find(name);
    if (found == kernel_table().end()) {
        return false;
    }
    emulated::schedule_seed = schedule_seed;
    found->second(dim3(grid[0], grid[1], grid[2]), dim3(threads), shared_bytes, parameters);
    return true;
}

// Writes the emulated tensor map of a tensor; emulated::TensorMapFields defines the sizes.
extern "C" void emulated_tensor_map(TensorMap* map, const void* elements,
                                    const uint64_t* dimensions, const uint64_t* strides,
                                    const uint32_t* box) {
    emulated::TensorMapFields fields{static_cast<const unsigned char*>(elements), {}, {}, {}};
    std::copy_n(dimensions, 3, fields.dimensions);
    std::copy_n(strides, 2, fields.strides);
    std::copy_n(box, 3, fields.box);
    emulated::encode_tensor_map(map, fields);
}
