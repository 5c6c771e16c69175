#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "core/row_grid.h"

namespace agl::cuda {

template <typename Write>
__global__ void __launch_bounds__(RowGrid::kThreads) run_kernel(RowGrid grid, Write write) {
  run_thread(grid, {blockIdx.y, gridDim.y, blockIdx.x, gridDim.x, threadIdx.x}, write);
}

// Queues `write` for every row and column pair of the grid.
template <typename Write>
void launch(const RowGrid& grid, const Write& write, void* stream, const char* name) {
  if (grid.empty()) return;
  const dim3 blocks(grid.row_blocks(), grid.column_blocks());
  run_kernel<<<blocks, RowGrid::kThreads, 0, static_cast<cudaStream_t>(stream)>>>(grid, write);
  const cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(name) + " kernel: " + cudaGetErrorString(status));
}

}  // namespace agl::cuda
