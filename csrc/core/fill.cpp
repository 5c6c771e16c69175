#include "core/fill.h"

#include <vector>

#include "core/parallel.h"
#include "core/stores.h"

namespace agl {
namespace {

// One (R,)-shaped slice of response_mask, call_index, scores and log_probs, without its padding.
template <Stores kStores>
void fill_segments(const Row& row, int64_t* mask, int64_t* calls, float* scores, float* log_probs) {
  using W = Writer<kStores>;
  int64_t begin = 0;
  for (int32_t s = 0; s < row.num_segments; ++s) {
    const Segment& segment = row.segments[s];
    const int64_t length = segment.end - begin;
    mask = W::fill(mask, length, segment.call >= 0 ? 1 : 0);
    if (calls) calls = W::fill(calls, length, segment.call);
    if (log_probs) {
      log_probs = segment.log_probs ? W::copy(log_probs, segment.log_probs, length)
                                    : W::zero(log_probs, length);
    }
    begin = segment.end;
  }
  if (begin == 0) return;
  W::zero(scores, begin - 1);
  scores[begin - 1] = row.score;
}

// The positions of a row's tokens in a dimension, without padding. Returns the last one, 0 where
// there is none.
template <Stores kStores>
int64_t fill_positions(const Row& row, int64_t dim, int64_t* out) {
  using W = Writer<kStores>;
  const int64_t length = int64_t{row.prompt_length} + row.response_length;
  if (row.prompt_positions) {
    const int64_t offset = dim * row.position_stride;
    out = W::widen(out, row.prompt_positions + offset, row.prompt_length);
    W::widen(out, row.response_positions + offset, row.response_length);
    return row.response_positions[offset + row.response_length - 1];
  }
  int64_t begin = 0;
  int64_t depth = 0;
  for (int32_t j = 0; j < row.num_jumps; ++j) {
    const int64_t end = row.prompt_length + int64_t{row.jumps[j].index};
    out = W::iota(out, end - begin, depth);
    begin = end;
    depth = row.jumps[j].depth;
  }
  W::iota(out, length - begin, depth);
  return length > 0 ? depth + (length - begin) - 1 : 0;
}

template <Stores kStores>
void fill_padded_row(const Row& row, int64_t index, const Widths& widths, int64_t pad_id,
                     const PaddedOutput& out) {
  using W = Writer<kStores>;
  const int64_t p = row.prompt_length;
  const int64_t r = row.response_length;
  const int64_t left = widths.prompt - p;
  const int64_t right = widths.response - r;
  const int64_t row_p = index * widths.prompt;
  const int64_t row_r = index * widths.response;
  const int64_t row_t = index * widths.total();

  W::widen(W::fill(out.prompts + row_p, left, pad_id), row.prompt, p);
  W::fill(W::widen(out.responses + row_r, row.response, r), right, pad_id);

  int64_t* ids = W::fill(out.input_ids + row_t, left, pad_id);
  ids = W::widen(W::widen(ids, row.prompt, p), row.response, r);
  W::fill(ids, right, pad_id);

  int64_t* mask = W::fill(out.attention_mask + row_t, left, 0);
  W::fill(W::fill(mask, p + r, 1), right, 0);

  int64_t* positions = out.position_ids + row_t * out.position_dims;
  for (int64_t dim = 0; dim < out.position_dims; ++dim) {
    positions = W::fill(positions, left, 0);
    const int64_t last = fill_positions<kStores>(row, dim, positions);
    positions = W::fill(positions + p + r, right, last);
  }

  fill_segments<kStores>(row, out.response_mask + row_r,
                         out.call_index ? out.call_index + row_r : nullptr, out.scores + row_r,
                         out.log_probs ? out.log_probs + row_r : nullptr);
  W::fill(out.response_mask + row_r + r, right, 0);
  if (out.call_index) W::fill(out.call_index + row_r + r, right, -1);
  W::zero(out.scores + row_r + r, right);
  if (out.log_probs) W::zero(out.log_probs + row_r + r, right);
}

// Where row i of a jagged family begins.
struct Starts {
  int64_t prompt;
  int64_t response;

  int64_t total() const { return prompt + response; }
};

// `all_tokens`: of all rows.
template <Stores kStores>
void fill_jagged_row(const Row& row, const Starts& start, int64_t all_tokens,
                     const JaggedOutput& out) {
  using W = Writer<kStores>;
  const int64_t p = row.prompt_length;
  const int64_t r = row.response_length;
  const int64_t total = start.total();
  W::widen(out.prompts + start.prompt, row.prompt, p);
  W::widen(out.responses + start.response, row.response, r);
  W::widen(W::widen(out.input_ids + total, row.prompt, p), row.response, r);
  for (int64_t dim = 0; dim < out.position_dims; ++dim) {
    fill_positions<kStores>(row, dim, out.position_ids + dim * all_tokens + total);
  }
  fill_segments<kStores>(row, out.response_mask + start.response,
                         out.call_index ? out.call_index + start.response : nullptr,
                         out.scores + start.response,
                         out.log_probs ? out.log_probs + start.response : nullptr);
}

// Runs fill(row index) for all rows on as many threads as the bytes are worth.
template <Stores kStores, typename FillRow>
void for_each_row(int64_t count, int64_t bytes, const FillRow& fill_row) {
  parallel_slices(count, threads_for(bytes), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) fill_row(i);
    Writer<kStores>::finish();
  });
}

int64_t bytes_per_response_token(bool call_index, bool log_probs) {
  return 2 * 8 + 4 + (call_index ? 8 : 0) + (log_probs ? 4 : 0);
}

}  // namespace

void fill_padded(const Row* rows, int64_t count, const Widths& widths, int64_t pad_id,
                 const PaddedOutput& out) {
  const int64_t bytes =
      count * (widths.total() * (2 + out.position_dims) * 8 + widths.prompt * 8 +
               widths.response * bytes_per_response_token(out.call_index, out.log_probs));
  if (bytes >= kStreamingBytes) {
    for_each_row<Stores::kStreaming>(count, bytes, [&](int64_t i) {
      fill_padded_row<Stores::kStreaming>(rows[i], i, widths, pad_id, out);
    });
  } else {
    for_each_row<Stores::kCached>(count, bytes, [&](int64_t i) {
      fill_padded_row<Stores::kCached>(rows[i], i, widths, pad_id, out);
    });
  }
}

void fill_jagged(const Row* rows, int64_t count, const JaggedOutput& out) {
  std::vector<Starts> starts(static_cast<std::size_t>(count) + 1);
  for (int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<std::size_t>(i);
    starts[at + 1] = {starts[at].prompt + rows[i].prompt_length,
                      starts[at].response + rows[i].response_length};
  }
  const Starts sums = starts.back();
  const int64_t bytes = sums.total() * (1 + out.position_dims) * 8 + sums.prompt * 8 +
                        sums.response * bytes_per_response_token(out.call_index, out.log_probs);
  const auto start = [&](int64_t i) { return starts[static_cast<std::size_t>(i)]; };
  if (bytes >= kStreamingBytes) {
    for_each_row<Stores::kStreaming>(count, bytes, [&](int64_t i) {
      fill_jagged_row<Stores::kStreaming>(rows[i], start(i), sums.total(), out);
    });
  } else {
    for_each_row<Stores::kCached>(count, bytes, [&](int64_t i) {
      fill_jagged_row<Stores::kCached>(rows[i], start(i), sums.total(), out);
    });
  }
}

}  // namespace agl
