#pragma once

#include <cstdint>

namespace agl {

enum class Side { kLeft, kRight };

// Writes one sequence into ids[width], filling with pad_id, and 1 under every kept token in
// mask[width]. Left padding keeps the sequence's last tokens, right padding its first.
// `streaming` writes past the cache: for outputs far larger than it; fence with pad_finish().
void pad_row(const int32_t* sequence, int64_t length, int64_t width, int64_t pad_id, Side side,
             bool streaming, int64_t* ids, int64_t* mask);

// Makes streamed rows visible to other threads; once per thread, after its last row.
void pad_finish();

}  // namespace agl
