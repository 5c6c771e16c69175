#include "core/flatten.h"

#include <algorithm>
#include <numeric>

namespace agl {
namespace {

// The arrays of a buffer that is being written; each pointer moves as its array fills.
struct FlatCursor {
  FlatRow* rows;
  FlatSegment* segments;
  float* log_probs;
  int32_t* tokens;
  int32_t* positions;
};

FlatCursor cursor(void* buffer, const FlatCounts& counts) {
  FlatCursor at;
  at.rows = static_cast<FlatRow*>(buffer);
  at.segments = reinterpret_cast<FlatSegment*>(at.rows + counts.rows);
  at.log_probs = reinterpret_cast<float*>(at.segments + counts.segments);
  at.tokens = reinterpret_cast<int32_t*>(at.log_probs + counts.log_probs);
  at.positions = at.tokens + counts.tokens;
  return at;
}

// Copies the positions of a row's tokens in a dimension.
void write_positions(const Row& row, int64_t dim, int32_t* out) {
  if (row.prompt_positions == nullptr) {
    std::iota(out, out + row.prompt_length + row.response_length, 0);
    return;
  }
  const int64_t offset = dim * row.position_stride;
  out = std::copy_n(row.prompt_positions + offset, row.prompt_length, out);
  std::copy_n(row.response_positions + offset, row.response_length, out);
}

}  // namespace

FlatView flat_view(const void* buffer, const FlatCounts& counts) {
  const FlatCursor at = cursor(const_cast<void*>(buffer), counts);
  return {at.rows,
          at.segments,
          at.log_probs,
          at.tokens,
          counts.position_dims > 0 ? at.positions : nullptr,
          counts.tokens};
}

FlatRows::FlatRows(const Row* rows, int64_t num_rows, int64_t position_dims)
    : rows_(rows), counts_{num_rows, 0, 0, 0, position_dims} {
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
    for (int64_t dim = 0; dim < counts_.position_dims; ++dim) {
      write_positions(*row, dim, at.positions + dim * counts_.tokens + (at.tokens - start.tokens));
    }
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
