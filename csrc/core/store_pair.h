#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace agl {

// Whether out[0] and out[1] share an aligned slot. Rows of odd width start on half of one every
// other time.
template <typename T>
AGL_HD bool pair_aligned(const T* out) {
  return reinterpret_cast<uintptr_t>(out) % (2 * sizeof(T)) == 0;
}

// Write out[0] and out[1]; on a device in one store where the address allows it. The intrinsics are
// what keeps the compiler from splitting the store again.
AGL_HD void store_pair(int64_t* out, int64_t left, int64_t right) {
#ifdef __CUDA_ARCH__
  if (pair_aligned(out)) return __stwb(reinterpret_cast<longlong2*>(out), {left, right});
#endif
  out[0] = left;
  out[1] = right;
}

AGL_HD void store_pair(float* out, float left, float right) {
#ifdef __CUDA_ARCH__
  if (pair_aligned(out)) return __stwb(reinterpret_cast<float2*>(out), {left, right});
#endif
  out[0] = left;
  out[1] = right;
}

}  // namespace agl
