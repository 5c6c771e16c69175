#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/pad.h"
#include "core/row_grid.h"
#include "core/store_pair.h"

namespace agl {

// Pads ragged int32 sequences to (rows, width) int64 ids and mask, two columns at a time: what one
// device thread does, and the host too, over the same arrays.
struct PadAt {
  const int32_t* values;   // sequences end to end
  const int64_t* offsets;  // (rows + 1,): sequence i is values[offsets[i]:offsets[i + 1]]
  int64_t width;
  int64_t pad_token_id;
  Side side;
  int64_t* ids;
  int64_t* mask;

  // Columns `column` and `column + 1` of row `row`, as far as they exist.
  AGL_HD void operator()(int64_t row, int64_t column) const {
    const int64_t begin = offsets[row];
    const int64_t length = offsets[row + 1] - begin;
    const int64_t first = side == Side::kLeft ? column + length - width : column;
    const int64_t second = first + 1;
    const bool first_real = first >= 0 && first < length;
    const bool second_real = second >= 0 && second < length;
    const int64_t first_id = first_real ? values[begin + first] : pad_token_id;
    const int64_t second_id = second_real ? values[begin + second] : pad_token_id;
    const int64_t at = row * width + column;
    if (column + 1 < width) {
      store_pair(ids + at, first_id, second_id);
      store_pair(mask + at, int64_t{first_real}, int64_t{second_real});
    } else {
      ids[at] = first_id;
      mask[at] = first_real;
    }
  }
};

}  // namespace agl
