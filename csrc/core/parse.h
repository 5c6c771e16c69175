#pragma once

#include <cstdint>
#include <vector>

namespace agl {

// Reads a JSON array of token ids, such as "[1, 2, 3]". Throws std::invalid_argument naming the
// position of what is not one.
std::vector<int32_t> parse_token_ids(const char* text, int64_t length);

}  // namespace agl
