#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace agl {

// Stands for two neighbours of an array, which may_alias lets it overwrite.
template <typename T>
struct alignas(2 * sizeof(T)) [[gnu::may_alias]] Pair {
  T left;
  T right;
};

// Writes out[0] and out[1], in one store where the address allows it: rows of odd width start on
// half of a pair every other time.
template <typename T>
AGL_HD void store_pair(T* out, T left, T right) {
  if (reinterpret_cast<uintptr_t>(out) % sizeof(Pair<T>) == 0) {
    *reinterpret_cast<Pair<T>*>(out) = Pair<T>{left, right};
  } else {
    out[0] = left;
    out[1] = right;
  }
}

}  // namespace agl
