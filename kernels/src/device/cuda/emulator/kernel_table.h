// The emulated kernels by name; `EXPORT` (../operators.cuh) adds them before the program starts.
#pragma once

#include <map>
#include <string>

#include "emulator.h"

using ErasedLaunch = void (*)(dim3, dim3, size_t, void**);
inline std::map<std::string, ErasedLaunch>& kernel_table() {
    static std::map<std::string, ErasedLaunch> table;
    return table;
}
#define REGISTER(name)                    \
    static const bool registered_##name = \
        kernel_table().emplace(#name, &emulated::launch_erased<&name>).second;
