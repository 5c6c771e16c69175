#pragma once

#include <cstdint>

namespace agl {

// Names the child of a radix tree's node that begins with `token`.
inline uint64_t child_key(int32_t node, int32_t token) {
  return static_cast<uint64_t>(node) << 32 | static_cast<uint32_t>(token);
}

}  // namespace agl
