#pragma once

#include "core/pad_at.h"

namespace agl::cuda {

// Runs `pad` for every row and column on the device's `stream` (a cudaStream_t) and returns once
// it is queued. All pointers are device memory of the calling thread's current device.
void pad(const PadAt& pad, const RowGrid& grid, void* stream);

}  // namespace agl::cuda
