#include "core/flatten.h"

#include <algorithm>

namespace agl {
namespace {

// The arrays of a buffer that is being written; each pointer moves as its array fills.
struct FlatCursor {
  FlatRow* rows;
  FlatSegment* segments;
  float* log_probs;
  int32_t* tokens;
};

FlatCursor cursor(void* buffer, const FlatCounts& counts) {
  FlatCursor at;
  at.rows = static_cast<FlatRow*>(buffer);
  at.segments = reinterpret_cast<FlatSegment*>(at.rows + counts.rows);
  at.log_probs = reinterpret_cast<float*>(at.segments + counts.segments);
  at.tokens = reinterpret_cast<int32_t*>(at.log_probs + counts.log_probs);
  return at;
}

}  // namespace

FlatView flat_view(const void* buffer, const FlatCounts& counts) {
  const FlatCursor at = cursor(const_cast<void*>(buffer), counts);
  return {at.rows, at.segments, at.log_probs, at.tokens};
}

FlatRows::FlatRows(const Row* rows, int64_t num_rows) : rows_(rows), counts_{num_rows, 0, 0, 0} {
  for (const Row* row = rows; row != rows + num_rows; ++row) {
    counts_.tokens += int64_t{row->prompt_length} + row->response_length;
    counts_.segments += row->num_segments;
    int32_t begin = 0;
    for (int32_t i = 0; i < row->num_segments; ++i) {
      const Segment& segment = row->segments[i];
      if (segment.log_probs != nullptr) counts_.log_probs += segment.end - begin;
      begin = segment.end;
    }
  }
}

void FlatRows::write(void* buffer) const {
  const FlatCursor start = cursor(buffer, counts_);
  FlatCursor at = start;
  for (const Row* row = rows_; row != rows_ + counts_.rows; ++row) {
    *at.rows++ = {at.tokens - start.tokens, at.segments - start.segments,
                  row->prompt_length,       row->response_length,
                  row->num_segments,        row->score};
    at.tokens = std::copy_n(row->prompt, row->prompt_length, at.tokens);
    at.tokens = std::copy_n(row->response, row->response_length, at.tokens);
    int32_t begin = 0;
    for (int32_t i = 0; i < row->num_segments; ++i) {
      const Segment& segment = row->segments[i];
      const bool known = segment.log_probs != nullptr;
      *at.segments++ = {segment.end, segment.call, known ? at.log_probs - start.log_probs : -1};
      if (known) at.log_probs = std::copy_n(segment.log_probs, segment.end - begin, at.log_probs);
      begin = segment.end;
    }
  }
}

}  // namespace agl
