#pragma once

#include <cstdint>

#include "core/rows.h"

namespace agl {

// A Row without pointers: it indexes the arrays of a FlatView.
struct alignas(16) FlatRow {
  int64_t first_token;  // its prompt, the response right behind it
  int64_t first_segment;
  int32_t prompt_length;
  int32_t response_length;
  int32_t num_segments;
  float score;
};

// A Segment without pointers.
struct alignas(16) FlatSegment {
  int32_t end;
  int32_t call;
  int64_t first_log_prob;  // -1 where unknown
};

struct FlatCounts {
  int64_t rows;
  int64_t segments;
  int64_t log_probs;
  int64_t tokens;
  int64_t position_dims;  // 0 where the rows' positions count up from 0

  int64_t nbytes() const {
    return rows * int64_t{sizeof(FlatRow)} + segments * int64_t{sizeof(FlatSegment)} +
           log_probs * int64_t{sizeof(float)} +
           (1 + position_dims) * tokens * int64_t{sizeof(int32_t)};
  }
};

// The arrays of a flat buffer, in the order in which they lie in it, in host or device memory.
struct FlatView {
  const FlatRow* rows;
  const FlatSegment* segments;
  const float* log_probs;
  const int32_t* tokens;
  const int32_t* positions;  // (position_dims, tokens), or null
  int64_t num_tokens;
};

// `buffer` is 16-byte aligned.
FlatView flat_view(const void* buffer, const FlatCounts& counts);

// Rows about to be packed into one buffer, so that a single copy takes their real tokens, and
// nothing else, to a device. Borrows the rows and all they point at.
class FlatRows {
 public:
  // `position_dims`: of the batch, 0 where all rows count up from 0.
  FlatRows(const Row* rows, int64_t num_rows, int64_t position_dims);

  const FlatCounts& counts() const { return counts_; }

  // Packs the rows into counts().nbytes() bytes at `buffer`, 16-byte aligned and owned by the
  // caller.
  void write(void* buffer) const;

 private:
  const Row* rows_;
  FlatCounts counts_;
};

}  // namespace agl
