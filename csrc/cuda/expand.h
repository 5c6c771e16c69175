#pragma once

#include "core/expand.h"

namespace agl::cuda {

// Runs `expand` for every row and column on the device's `stream` (a cudaStream_t) and returns once
// it is queued. All pointers are device memory of the calling thread's current device.
void expand(const Expand& expand, const RowGrid& grid, void* stream);

}  // namespace agl::cuda
