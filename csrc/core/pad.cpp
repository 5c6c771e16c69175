#include "core/pad.h"

#include <algorithm>

#include "core/stores.h"

namespace agl {
namespace {

template <Stores kStores>
void pad_row_with(const int32_t* sequence, int64_t length, int64_t width, int64_t pad_id, Side side,
                  int64_t* ids, int64_t* mask) {
  using W = Writer<kStores>;
  const int64_t kept = std::min(length, width);
  const int64_t gap = width - kept;
  if (side == Side::kLeft) {
    W::widen(W::fill(ids, gap, pad_id), sequence + (length - kept), kept);
    W::fill(W::fill(mask, gap, 0), kept, 1);
  } else {
    W::fill(W::widen(ids, sequence, kept), gap, pad_id);
    W::fill(W::fill(mask, kept, 1), gap, 0);
  }
}

}  // namespace

void pad_row(const int32_t* sequence, int64_t length, int64_t width, int64_t pad_id, Side side,
             bool streaming, int64_t* ids, int64_t* mask) {
  if (streaming) {
    pad_row_with<Stores::kStreaming>(sequence, length, width, pad_id, side, ids, mask);
  } else {
    pad_row_with<Stores::kCached>(sequence, length, width, pad_id, side, ids, mask);
  }
}

void pad_finish() { Writer<Stores::kStreaming>::finish(); }

}  // namespace agl
