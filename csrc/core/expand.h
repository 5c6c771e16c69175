#pragma once

#include <cstdint>

#include "core/flatten.h"
#include "core/host_device.h"
#include "core/row_grid.h"
#include "core/rows.h"
#include "core/store_pair.h"

namespace agl {

// Writes all padded tensors from flat rows, two columns of [prompt | response] at a time: what one
// device thread does, and the host too, over the same arrays.
struct Expand {
  FlatView flat;
  Widths widths;
  int64_t pad_token_id;
  PaddedOutput out;

  // Columns `column` and `column + 1` of row `index`, as far as they exist.
  AGL_HD void operator()(int64_t index, int64_t column) const {
    const FlatRow row = flat.rows[index];
    const bool two = column + 1 < widths.prompt + widths.response;
    write_whole(index, row, column, two);
    if (column + 1 < widths.prompt) {
      write_prompt(index, row, column, true);
    } else if (column >= widths.prompt) {
      write_response(index, row, column - widths.prompt, two);
    } else {  // the pair lies across the border
      write_prompt(index, row, column, false);
      if (two) write_response(index, row, 0, false);
    }
  }

 private:
  struct Token {
    int64_t id;
    int64_t mask;
    int64_t position;
  };

  struct Sample {
    int64_t mask;
    int64_t call;
    float score;
    float log_prob;
  };

  AGL_HD Token token_at(const FlatRow& row, int64_t column) const {
    const int64_t length = int64_t{row.prompt_length} + row.response_length;
    const int64_t index = column - (widths.prompt - row.prompt_length);
    if (index < 0) return {pad_token_id, 0, 0};
    if (index < length) return {flat.tokens[row.first_token + index], 1, index};
    return {pad_token_id, 0, length > 0 ? length - 1 : 0};
  }

  // The position of a token in a dimension. `index`: of the token in its row, or 0 on padding
  // before the row and the last one's behind it.
  AGL_HD int64_t position_at(const FlatRow& row, int64_t dim, const Token& token,
                             int64_t column) const {
    if (column < widths.prompt - row.prompt_length) return 0;
    return flat.positions[dim * flat.num_tokens + row.first_token + token.position];
  }

  // The first of the row's segments that ends past response token `index`, or the last one.
  AGL_HD int32_t segment_of(const FlatRow& row, int64_t index) const {
    const FlatSegment* segments = flat.segments + row.first_segment;
    int32_t low = 0;
    int32_t high = row.num_segments - 1;
    while (low < high) {
      const int32_t middle = low + (high - low) / 2;
      if (segments[middle].end > index) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }

  // `found` is the segment of response token `index`, or one before it.
  AGL_HD Sample sample_at(const FlatRow& row, int64_t index, int32_t found) const {
    if (index >= row.response_length) return {0, -1, 0.0F, 0.0F};
    const FlatSegment* segments = flat.segments + row.first_segment;
    while (segments[found].end <= index) ++found;
    const FlatSegment& segment = segments[found];
    const int64_t begin = found == 0 ? 0 : segments[found - 1].end;
    const bool known = out.log_probs != nullptr && segment.first_log_prob >= 0;
    return {segment.call >= 0, segment.call, index + 1 == row.response_length ? row.score : 0.0F,
            known ? flat.log_probs[segment.first_log_prob + (index - begin)] : 0.0F};
  }

  template <typename T>
  AGL_HD static void store(T* at, bool two, T first, T second) {
    if (two) {
      store_pair(at, first, second);
    } else {
      *at = first;
    }
  }

  AGL_HD void write_whole(int64_t index, const FlatRow& row, int64_t column, bool two) const {
    const Token first = token_at(row, column);
    const Token second = token_at(row, column + 1);
    const int64_t at = index * (widths.prompt + widths.response) + column;
    store(out.input_ids + at, two, first.id, second.id);
    store(out.attention_mask + at, two, first.mask, second.mask);
    if (flat.positions == nullptr) {
      store(out.position_ids + at, two, first.position, second.position);
      return;
    }
    const int64_t width = widths.prompt + widths.response;
    int64_t* positions = out.position_ids + index * width * out.position_dims + column;
    for (int64_t dim = 0; dim < out.position_dims; ++dim, positions += width) {
      store(positions, two, position_at(row, dim, first, column),
            position_at(row, dim, second, column + 1));
    }
  }

  AGL_HD void write_prompt(int64_t index, const FlatRow& row, int64_t column, bool two) const {
    store(out.prompts + index * widths.prompt + column, two, token_at(row, column).id,
          token_at(row, column + 1).id);
  }

  // `column` counts from the start of the response.
  AGL_HD void write_response(int64_t index, const FlatRow& row, int64_t column, bool two) const {
    const int32_t found = segment_of(row, column);
    const Sample first = sample_at(row, column, found);
    const Sample second = sample_at(row, column + 1, found);
    const int64_t at = index * widths.response + column;
    store(out.responses + at, two, token_at(row, widths.prompt + column).id,
          token_at(row, widths.prompt + column + 1).id);
    store(out.response_mask + at, two, first.mask, second.mask);
    store(out.scores + at, two, first.score, second.score);
    if (out.call_index != nullptr) store(out.call_index + at, two, first.call, second.call);
    if (out.log_probs != nullptr) store(out.log_probs + at, two, first.log_prob, second.log_prob);
  }
};

inline RowGrid expand_grid(const FlatCounts& counts, const Widths& widths) {
  return {counts.rows, widths.total()};
}

}  // namespace agl
