#pragma once

#include <cstdint>
#include <memory>

#include "core/token_reader.h"

namespace agl {

// The position ids of a call's tokens in several dimensions (M-RoPE), prompt and response. A call
// without them counts its tokens from 0 in every dimension.
struct TokenPositions {
  int64_t dims = 0;
  int64_t length = 0;                       // of each dimension
  std::shared_ptr<const int32_t[]> values;  // (dims, length) row-major, or null

  const int32_t* of_dim(int64_t dim) const { return values.get() + dim * length; }

  // The first of the first `count` tokens whose position differs in the other's, or `count`.
  int64_t first_difference(const TokenPositions& other, int64_t count) const {
    if (!values) return other.values ? other.first_uncounted(count) : count;
    if (!other.values) return first_uncounted(count);
    for (int64_t dim = 0; dim < dims; ++dim) {
      count = agl::first_difference(of_dim(dim), other.of_dim(dim), 0, count);
    }
    return count;
  }

 private:
  // The first of the first `count` tokens whose position is not its index, or `count`.
  int64_t first_uncounted(int64_t count) const {
    for (int64_t dim = 0; dim < dims; ++dim) {
      const int32_t* positions = of_dim(dim);
      int64_t index = 0;
      while (index < count && positions[index] == index) ++index;
      count = index;
    }
    return count;
  }
};

}  // namespace agl
