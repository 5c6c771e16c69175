#pragma once

#include <cstdint>

namespace agl {

// Room that the ids of a text of this length may need.
inline int64_t max_token_ids(int64_t length) { return length / 2; }

// Reads a JSON array of token ids, such as "[1, 2, 3]", into out[max_token_ids(length)]; returns
// how many there are. Throws std::invalid_argument naming the position of what is not one.
int64_t parse_token_ids(const char* text, int64_t length, int32_t* out);

}  // namespace agl
