#include <cuda_runtime.h>

#include "cuda/device.h"

namespace agl::cuda {

int device_count() noexcept {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();  // having no driver is an answer, not an error for the next call to find
  return 0;
}

}  // namespace agl::cuda
